"""A listener that keeps what a run tells."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RecordingListener:
    """Keeps everything by kind; `text` is what a person would read."""

    def __init__(self, notes: list[str] | None = None) -> None:
        self.notes: list[str] = [] if notes is None else notes
        self.errors: list[str] = []
        self.lines: list[str] = []
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.rows: list[dict[str, Any]] = []
        self.versions: list[int] = []
        self.faults: list[str] = []
        self.checkpoints: list[tuple[int, Path]] = []
        self.rollbacks: list[int] = []
        self.failures: list[BaseException] = []

    @property
    def text(self) -> str:
        """All lines, as a console prints them."""
        return "\n".join(self.lines)

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.lines.append(text)

    def error(self, text: str) -> None:
        self.errors.append(text)
        self.lines.append(f"error: {text}")

    def fault(self, text: str) -> None:
        self.faults.append(text)

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append((step, dict(metrics)))

    def samples(self, rows: list[dict[str, Any]]) -> None:
        self.rows.extend(rows)

    def published(self, version: int, seconds: float) -> None:
        self.versions.append(version)

    def saved(self, step: int, path: Path) -> None:
        self.checkpoints.append((step, path))

    def rolled_back(self, step: int) -> None:
        self.rollbacks.append(step)

    def fail(self, error: BaseException) -> None:
        """A failure handler, too."""
        self.failures.append(error)
