"""Every architecture in vLLM: what it loads and what is published to it, against transformers; and
what the trial before a run says of it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from async_grpo.run.preflight.engine_trial import HALF_BOUND
from tests.support.engine_families import BORDERLINE, DEADLINE_S, EXACT, HALF, REFUSED
from tests.support.families import FAMILIES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * DEADLINE_S + 120)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Wait for a family's line, of one process that goes through all of them."""
    out = tmp_path_factory.mktemp("families") / "found.jsonl"
    command = [sys.executable, "-m", "tests.support.engine_families", *sorted(FAMILIES)]
    with (
        open(out.with_suffix(".log"), "w") as log,
        subprocess.Popen([*command, "--out", str(out)], stdout=log, stderr=log) as process,
    ):

        def line_of(name: str) -> dict[str, Any]:
            end = time.monotonic() + 2 * DEADLINE_S
            while time.monotonic() < end:
                ended = process.poll() is not None
                for line in lines(out):
                    if line["family"] == name:
                        return line
                assert not ended, out.with_suffix(".log").read_text()[-2000:]
                time.sleep(0.5)
            raise TimeoutError(name)

        try:
            yield line_of
        finally:
            process.kill()


def lines(path: Path) -> list[dict[str, Any]]:
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_engine_computes_a_family_or_the_trial_refuses_it(
    name: str, measured: Callable[[str], dict[str, Any]]
) -> None:
    found = measured(name)
    assert "failed" not in found, found
    bound = HALF_BOUND if name in HALF else EXACT
    if name not in REFUSED:
        assert found["trial"] == "", found
        assert found["first"] <= bound and found["published"] <= bound, found
        assert found["moved"] > 2 * bound, found
    else:
        assert re.search(REFUSED[name], found["trial"]), found
        least = EXACT / 2 if name in BORDERLINE else EXACT
        assert "error" in found or max(found["first"], found["published"]) > least, found
    if "without repair" in found and name not in REFUSED:
        assert found["experts left out"] <= bound, found
        assert found["without repair"] > 0.1, found
