"""An environment that does what it is told, and a task that has it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from pathlib import Path
from typing import Any, ClassVar

from async_grpo.environments.base import Action, Observation
from async_grpo.tasks.base import Problem


class Told:
    """Does what the action says: a verb, and what it needs."""

    def __init__(self, log: str | None) -> None:
        self._log = None if log is None else Path(log)
        self.turns, self.closing_s = 0, 0.0
        self._note("made")

    def _note(self, text: str) -> None:
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(f"{text}\n")

    def reset(self, reference: Any, seed: int) -> Observation:
        if reference:
            getattr(self, f"do_{reference['verb']}")(reference.get("argument", ""))
        return Observation(f"seed {seed}")

    def step(self, action: Action) -> Any:
        self.turns += 1
        verb, _, argument = action.text.partition(" ")
        return getattr(self, f"do_{verb}")(argument)

    def close(self) -> None:
        self._note("closed")

    def do_invalid(self, text: str) -> Observation:
        return Observation("what?", invalid=True)

    def do_say(self, text: str) -> Observation:
        return Observation(f"{text} {self.turns}", {"value": 0.5})

    def do_where(self, text: str) -> Observation:
        return Observation(str(os.getpid()))

    def do_end(self, text: str) -> Observation:
        return Observation(rewards={"value": float(text)}, done=True, correct=1.0)

    def do_raise(self, text: str) -> Observation:
        raise ValueError(text)

    def do_late(self, text: str) -> Observation:
        raise TimeoutError("the environment's own")

    def do_stop(self, text: str) -> Observation:
        raise StopIteration(text)

    def do_exit(self, text: str) -> Observation:
        raise SystemExit(3)

    def do_sleep(self, text: str) -> Observation:
        time.sleep(float(text))
        return Observation("woke")

    def do_linger(self, text: str) -> Observation:
        self.closing_s = float(text)
        return Observation()

    def do_spin(self, text: str) -> Observation:
        while True:
            pass

    def do_hold(self, text: str) -> Observation:
        """Keeps the interpreter's lock, so that no thread of the process can run."""
        ctypes.PyDLL(None).sleep(int(text))
        return Observation()

    def do_crash(self, text: str) -> Observation:
        os._exit(int(text or 1))

    def do_eat(self, text: str) -> Observation:
        return Observation(str(len(bytearray(int(text) * 2**20))))

    def do_print(self, text: str) -> Observation:
        print(text, flush=True)
        return Observation("printed")

    def do_give(self, text: str) -> Any:
        return {
            "none": None,
            "text": "text",
            "component": Observation(rewards={"other": 1.0}),
            "nan": Observation(rewards={"value": float("nan")}),
            "content": Observation(content=[1.5]),
            "done": Observation(done=1),
            "bytes": Observation(content=[{"role": "user", "content": object()}]),
            "tokens": Observation(content=[3, 4]),
            "messages": Observation(content=[{"role": "tool", "content": "x"}]),
            "large": Observation(content="x" * (33 * 2**20)),
        }[text]


class ToldLater(Told):
    """The same with methods that give way."""

    async def step(self, action: Action) -> Any:
        verb, _, argument = action.text.partition(" ")
        if verb == "sleep":
            await asyncio.sleep(float(argument))
            return Observation("woke")
        if verb == "thread":
            return await asyncio.gather(asyncio.to_thread(self.do_sleep, argument))
        return super().step(action)

    async def close(self) -> None:
        self._note("closing")
        await asyncio.sleep(self.closing_s)
        super().close()


class TaskOfTold:
    """Options: log, a file that environments write to; later, whether methods give way."""

    weights: ClassVar[dict[str, float]] = {"value": 1.0}
    fingerprint = "told"

    def __init__(self, settings: Any, seed: int) -> None:
        self._options = settings.options

    def __len__(self) -> int:
        return 1

    def train(self, index: int) -> Problem:
        return Problem("do something", None)

    def evaluation(self, n: int) -> list[Problem]:
        return [Problem(f"held out {index} ", None) for index in range(min(n, 4))]

    def environment(self) -> Told:
        return (ToldLater if self._options.get("later") else Told)(self._options.get("log"))
