"""A tracker of experiments besides MLflow, which is a folder: all that it needs is this file."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_grpo.observe.tracking.sink import Gone, Point, Refused, RunFacts


class Folder:
    """A tracker whose server is a folder: one of its own per run, with a CSV file of points.

    A file `away` in it stands for a server that does not answer, `no pairs` for one that fails with
    parameters and tags.
    """

    title = "Folder"
    ends_last = False

    def __init__(self, uri: str | None, run_dir: Path) -> None:
        self.address = uri or str(run_dir / "folder")

    def where(self) -> str:
        return f" in {self.address}"

    def start(self, run: RunFacts) -> str:
        place = Path(self.address) / run.experiment / run.key
        place.mkdir(parents=True, exist_ok=True)
        (place / "name").write_text(run.name)
        return f"{run.experiment}/{run.key}"

    def set_status(self, run_id: str, status: str, ended: int | None) -> None:
        (self._run(run_id) / "status").write_text(status)

    def log(
        self,
        run_id: str,
        *,
        parameters: dict[str, str] | None = None,
        tags: dict[str, str] | None = None,
        points: Sequence[Point] = (),
    ) -> None:
        run = self._run(run_id)
        if (parameters or tags) and (Path(self.address) / "no pairs").exists():
            raise ConnectionError("no pairs")
        if any(point.name == "refused" for point in points):
            raise Refused("no such metric, please")
        with open(run / "calls", "a") as calls:
            calls.write(f"{sorted({point.step for point in points})}\n" if points else "")
        for kind, pairs in (("parameter", parameters), ("tag", tags)):
            for name, value in (pairs or {}).items():
                (run / f"{kind} {name}").write_text(value)
        known = {tuple(row) for row in points_of(run)}
        with open(run / "points.csv", "a", newline="") as file:
            rows = [tuple(map(str, point)) for point in points]
            csv.writer(file).writerows(row for row in rows if row not in known)

    def show_samples(self, run_id: str, rows: list[dict[str, Any]]) -> None:
        (self._run(run_id) / "samples").write_text(json.dumps(rows))

    def put(self, run_id: str, path: Path, place: str) -> None:
        target = self._run(run_id) / place
        if place == "refused":
            raise Refused("no such place, please")
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True)
        else:
            shutil.copy(path, target)

    def register(self, run_id: str, model: str, place: str) -> None:
        if "/" in model:
            raise Refused(f"no slashes in {model}, please")
        if (Path(self.address) / "no registry").exists():
            raise ConnectionError("no registry")
        (Path(self.address) / f"model {model}").write_text(f"{run_id}/{place}")

    def _run(self, run_id: str) -> Path:
        if (Path(self.address) / "away").exists():
            raise ConnectionError("away")
        if not (run := Path(self.address) / run_id).is_dir():
            raise Gone(run_id)
        return run


def points_of(run: Path) -> list[list[str]]:
    path = run / "points.csv"
    return list(csv.reader(path.open(newline=""))) if path.exists() else []
