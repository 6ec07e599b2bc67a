"""examples/quickstart.ipynb: what is stored, and that its cells run from the first to the last."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.support.reader import Reader
from tests.support.snippets import ROOT, Snippet

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
RUN_S = 900


STORED = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
CODE = [cell for cell in STORED["cells"] if cell["cell_type"] == "code"]


def test_it_is_stored_without_what_it_prints() -> None:
    assert STORED["nbformat"] == 4 and len(CODE) > 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)


def test_its_cells_call_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    (tmp_path / "runs" / "double").mkdir(parents=True)  # the run directory of doubles
    reader = Reader("quickstart.ipynb", {})
    with reader.at_work():
        for number, cell in enumerate(CODE):
            reader.read(Snippet(f"cell {number}", 1, "python", "".join(cell["source"])))


def said(cell: Any) -> str:
    """The value of a cell, beside which the run's own lines come at any time."""
    [value] = [one for one in cell["outputs"] if one["output_type"] == "execute_result"]
    return value["data"]["text/plain"]


@pytest.mark.slow
@pytest.mark.timeout(RUN_S)
def test_its_cells_run(tmp_path: Path) -> None:
    """In a kernel of this interpreter; a cell that raises ends the test."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(
        notebook,
        timeout=RUN_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    cells = {cell["source"].partition("\n")[0]: cell for cell in notebook["cells"]}
    assert said(cells["history = []"]) == "20"
    shown = cells["import matplotlib.pyplot as plt"]["outputs"]
    assert sum("image/png" in one.get("data", {}) for one in shown) == 1
    assert "eval/accuracy_greedy" in said(cells["after = trainer.evaluate()"])
    [run] = (tmp_path / "runs").iterdir()
    assert (run / "checkpoints" / "step_000020" / "hf" / "config.json").is_file()
    assert "'report'" in said(notebook["cells"][-1])
