"""The tasks of the chaos runs: a random model is right half of the time, and a verifier, or an
environment, hangs when it is asked to.
"""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path
from typing import Any

from async_grpo.config import schema
from async_grpo.environments.base import Action, Observation
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
        Arithmetic.__init__(self, settings.unchecked_copy(update={"options": options}), seed)

    def score(self, response: str, reference: Any) -> Score:
        hang_if_asked(self._side)
        return super().score(response, reference)


def hang_if_asked(side: Path) -> None:
    """Wait for ever, if nobody else does it."""
    try:
        (side / "hang").rename(side / f"hangs-{os.getpid()}")
    except FileNotFoundError:
        return
    while True:
        time.sleep(60)


class ChaoticEpisodes(Chaotic):
    """The same in episodes of one to three turns, which write down when they are opened and closed:
    `o` and `c` in `environments-<pid>`.
    """

    def environment(self) -> ChaoticEpisode:
        return ChaoticEpisode(self._side)


class ChaoticEpisode:
    """Ends, right or wrong, as the checksum of what was said tells."""

    def __init__(self, side: Path) -> None:
        self._side, self._turns, self._said = side, 0, ""
        self._note("o")

    def reset(self, reference: Any, seed: int) -> Observation:
        return Observation()

    def step(self, action: Action) -> Observation:
        hang_if_asked(self._side)
        self._turns += 1
        self._said += action.text
        right = float(zlib.crc32(self._said.encode()) & 1)
        if self._turns == 3 or zlib.crc32(self._said.encode()) & 2:
            return Observation(rewards={"correct": right}, correct=right, done=True)
        return Observation("1+1=", correct=right)

    def close(self) -> None:
        self._note("c")

    def _note(self, text: str) -> None:
        with open(self._side / f"environments-{os.getpid()}", "a") as file:
            file.write(text)
