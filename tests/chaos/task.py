"""The task of the chaos runs: a random model is right half of the time, and a verifier hangs when
it is asked to.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from async_grpo.config import schema
from async_grpo.tasks.arithmetic import Arithmetic
from async_grpo.tasks.base import Score
from tests.support.mixed_task import Mixed


class Chaotic(Mixed):
    """Option `side`: a directory. The first verifier child that takes the file `hang` there waits
    for ever, and leaves `hangs-<pid>`.
    """

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        options = dict(settings.options)
        self._side = Path(options.pop("side"))
        Arithmetic.__init__(self, settings.model_copy(update={"options": options}), seed)

    def score(self, response: str, reference: Any) -> Score:
        try:
            (self._side / "hang").rename(self._side / f"hangs-{os.getpid()}")
        except FileNotFoundError:
            return super().score(response, reference)
        while True:
            signal.pause()
