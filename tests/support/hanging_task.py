"""A task whose verifier hangs as long as the file `task.train` says so."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from async_grpo.config import schema
from async_grpo.tasks.base import Score
from tests.support.mixed_task import Mixed


class Hanging(Mixed):
    """Mixed, with a verifier that can be held up."""

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        super().__init__(settings, seed)
        self._file = Path(settings.train)

    def score(self, response: str, reference: Any) -> Score:
        while self._file.read_text() == "hang":
            time.sleep(0.05)
        return super().score(response, reference)
