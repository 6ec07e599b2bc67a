"""The quickstart learns as much in 40 learner steps as recorded runs (`make learning`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learning import low, recorded, run


@pytest.mark.timeout(1200)  # on a new machine it builds the quickstart's model, too
def test_the_quickstart_learns_as_recorded_runs_do(tmp_path: Path) -> None:
    row = run("quickstart", 0, tmp_path)
    assert row["accuracy"] >= low(recorded("quickstart")), row
