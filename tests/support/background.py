"""Stories of subprocesses that are told beside other tests, since systems that start and stop leave
much of two cores free.

    python -m tests.support.background HOME MODULE...        tells the stories of these modules, one
                                                             after the other

A module whose story may have company gives it as `story`, a function of a directory, and asks the
fixture `told_beside` for what it returned. The order of a test run is then: modules marked `alone`,
which look at all that the machine has or use it up; all others, with the stories beside them in a
process of its own; and last the tests that asked for a story. Alone, such a module waits for its
story.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

FIXTURE, ALONE = "told_beside", "alone"
ROOT = Path(__file__).resolve().parents[2]
END_S = 60.0


def place(item: pytest.Item) -> int:
    """Where in the order of a test run it belongs."""
    return 2 if FIXTURE in item.fixturenames else 0 if item.get_closest_marker(ALONE) else 1


class Company:
    """The stories of one test run."""

    def __init__(self, items: Iterable[pytest.Item], home: Path) -> None:
        """items: all tests of the run. home: an empty directory."""
        self._modules = list(
            dict.fromkeys(item.module.__name__ for item in items if FIXTURE in item.fixturenames)
        )
        self._home, self._process = home, None

    def begin(self) -> None:
        """Tell them, unless they are being told."""
        if self._process is None and self._modules:
            command = [
                sys.executable,
                "-u",
                "-m",
                "tests.support.background",
                str(self._home),
                *self._modules,
            ]
            with open(self._home / "log.txt", "w") as log:
                self._process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=os.environ | {"PYTHONPATH": str(ROOT)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def wait(self, module: str) -> Any:
        """What the story of this module returned."""
        self.begin()
        told = self._home / f"{module}.pickle"
        while not told.exists():
            ended = self._process.poll() is not None
            assert told.exists() or not ended, (
                f"the story of {module} failed:\n{(self._home / 'log.txt').read_text()[-6000:]}"
            )
            time.sleep(0.05)
        return pickle.loads(told.read_bytes())

    def end(self) -> None:
        """Stop the one that is being told; what it started is gone then."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(END_S)


def main(home: Path, modules: list[str]) -> int:
    failed = 0
    for module in modules:
        own, draft = home / module, home / "draft"
        own.mkdir()
        try:
            draft.write_bytes(pickle.dumps(importlib.import_module(module).story(own)))
            draft.rename(home / f"{module}.pickle")
        except Exception:  # noqa: BLE001 - the others are told all the same
            failed += 1
            traceback.print_exc()
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
