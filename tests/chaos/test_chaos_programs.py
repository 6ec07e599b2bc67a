"""Faults while 64 programs play: no group is lost, none trained twice, and no process is left, of
the run, of a program, or of what a program started; also after a driver that was killed.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from tests.chaos import account, case
from tests.chaos.agent_marks import programs
from tests.chaos.faults import Chaos, end
from tests.chaos.harness import Run

KINDS = ("kill rollout actor", "kill EngineCore", "kill queue", "kill driver")
AT_ONCE = 64

pytestmark = [pytest.mark.timeout(1800), pytest.mark.alone, pytest.mark.slow]


class Most:
    """The most programs that were seen at the same time, in a thread."""

    def __init__(self, run: Run) -> None:
        self._run, self._ended = run, threading.Event()
        self.seen = 0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while not self._ended.wait(0.2):
            self.seen = max(self.seen, len(programs(self._run.temporary, left=False)))

    def close(self) -> None:
        self._ended.set()


def test_programs_survive_what_responses_survive(tmp_path: Path) -> None:
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(10**6)))
    print(f"CHAOS_SEED={seed}", flush=True)
    run = Run(tmp_path, case.programs(tmp_path, ranks=1))
    chaos = Chaos(run, batch=case.R, actors=case.ACTORS, seed=seed)
    most = Most(run)
    try:
        chaos.start()
        for kind in KINDS:
            run.note_belongings()
            blow = chaos.strike(kind)
            chaos.recover(blow)
            print(f"{kind}: {blow.seconds:.1f} s", flush=True)
        run.note_belongings()
        end(run)
        counts = account.check(run, batch=case.R)
        print(counts, f"{most.seen} programs at the same time", sep="\n")
        assert counts["trained"] == case.R * counts["steps"]
        assert run.leftovers() == [] and programs(run.temporary) == []
        assert most.seen >= AT_ONCE
        assert account.turns_trained(run) == {1, 2, 3}
    finally:
        most.close()
        run.close()
