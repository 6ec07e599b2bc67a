"""Faults in a run with a teacher: no group is lost, none trained twice, and none without what the
teacher says of each token.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.chaos import account, case
from tests.chaos.faults import OF_TEACHERS, Chaos, end
from tests.chaos.harness import Run
from tests.support.learners import plain_model

KINDS = (*OF_TEACHERS, "kill rollout actor", "kill queue")

pytestmark = [pytest.mark.timeout(1800), pytest.mark.alone, pytest.mark.slow]


def test_groups_wait_for_a_teacher_that_is_lost(tmp_path: Path) -> None:
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(10**6)))
    print(f"CHAOS_SEED={seed}", flush=True)
    run = Run(tmp_path, case.taught(tmp_path, ranks=1))
    chaos = Chaos(run, batch=case.R, actors=case.ACTORS, seed=seed)
    try:
        chaos.start()
        for kind in random.Random(seed).sample(KINDS, len(KINDS)):
            run.note_belongings()
            chaos.recover(chaos.strike(kind))
        run.note_belongings()
        end(run)
        counts = account.check(run, batch=case.R)
        counts["taught"] = account.taught(run, plain_model(str(tmp_path / "teacher")).eval())
        print(counts, *(f"{blow.kind}: {blow.seconds:.1f} s" for blow in chaos.blows), sep="\n")
        assert counts["trained"] == case.R * counts["steps"]
        assert counts["acknowledged"] >= counts["trained"] - case.R and counts["taught"] >= case.R
        assert run.leftovers() == []
    finally:
        run.close()
