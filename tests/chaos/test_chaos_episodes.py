"""Faults in a run of episodes: no group is lost, none trained twice, no environment left open."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.chaos import account, case
from tests.chaos.faults import Chaos, end
from tests.chaos.harness import Run

KINDS = ("kill verifier", "hang verifier", "kill rollout actor", "kill queue")
"""Of verifiers that are environments here."""

pytestmark = [pytest.mark.timeout(1200), pytest.mark.alone, pytest.mark.slow]


def test_episodes_survive_what_responses_survive(tmp_path: Path) -> None:
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(10**6)))
    print(f"CHAOS_SEED={seed}", flush=True)
    run = Run(tmp_path, case.episodes(tmp_path, ranks=1))
    chaos = Chaos(run, batch=case.R, actors=case.ACTORS, seed=seed)
    try:
        chaos.start()
        blows = []
        for kind in KINDS:
            run.note_belongings()
            blows.append(chaos.strike(kind))
        for blow in blows:
            chaos.recover(blow)
        run.note_belongings()
        end(run)
        counts = account.check(run, batch=case.R) | account.environments_closed(run)
        print(counts, *(f"{blow.kind}: {blow.seconds:.1f} s" for blow in blows), sep="\n")
        assert counts["trained"] == case.R * counts["steps"]
        assert counts["acknowledged"] >= counts["trained"] - case.R
        assert run.leftovers() == []
        assert account.turns_trained(run) == {1, 2, 3}
    finally:
        run.close()
