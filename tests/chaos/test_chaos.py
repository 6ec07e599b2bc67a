"""Each fault once, in a run as its users start it: nothing that was completed is lost, nothing is
trained twice, nothing is left behind.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import account, case
from tests.chaos.__main__ import kinds_of, one_part, table
from tests.chaos.faults import KINDS, SHORT, Chaos, end
from tests.chaos.harness import Run

VOLLEYS = (
    ("kill rollout actor", "kill verifier", "hang verifier", "kill queue"),
    ("stop engine", "kill learner rank"),
    ("kill EngineCore", "stop learner rank"),
)
"""Faults of one volley strike one after the other, while the run still recovers from those before.
The driver is killed in `test_resume.py`, and in the long version.
"""

pytestmark = [pytest.mark.timeout(2400), pytest.mark.alone]


def story(home: Path) -> dict[str, Any]:
    """The run that the tests share: the run, its blows, and the account of its journal."""
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(10**6)))
    run = Run(home, case.settings(home, ranks=1))
    chaos = Chaos(run, batch=case.R, actors=case.ACTORS, seed=seed)
    print(f"CHAOS_SEED={seed}", flush=True)
    try:
        chaos.start()
        for volley in VOLLEYS:
            blows = []
            for kind in volley:
                run.note_belongings()
                blows.append(chaos.strike(kind))
            for blow in blows:
                chaos.recover(blow)
        run.note_belongings()
        end(run)
        print(*(f"{blow.kind}: {blow.seconds:.1f} s" for blow in chaos.blows), sep="\n")
        left, counts = run.leftovers(), account.check(run, batch=case.R)
        return {
            "seed": seed,
            "left": left,
            "counts": counts,
            "blows": [replace(blow, recovered=None) for blow in chaos.blows],
        }
    finally:
        run.close()


@pytest.fixture(scope="module")
def told(shared_run: dict[str, Any]) -> dict[str, Any]:
    print(f"CHAOS_SEED={shared_run['seed']}")
    return shared_run


def test_every_fault_struck_a_run_at_work_and_it_recovered(told):
    assert sorted(blow.kind for blow in told["blows"]) == sorted(SHORT)
    for blow in told["blows"]:
        assert (
            len(blow.moment.ready) >= case.R and blow.moment.at_gate and blow.seconds is not None
        ), blow


def test_nothing_completed_was_lost_and_nothing_trained_twice(told):
    counts = told["counts"]
    assert (
        counts["trained"] == case.R * counts["steps"]
        and counts["acknowledged"] >= counts["trained"] - case.R
    ), counts


def test_nothing_is_left(told):
    assert told["left"] == []


@pytest.mark.slow
def test_a_part_of_the_long_version(tmp_path):
    """All kinds, the full disk and MLflow too, one after the other, with two learner ranks; `make
    chaos` goes through many such parts.
    """
    out, seed = tmp_path / "chaos.jsonl", random.SystemRandom().randrange(10**6)
    assert one_part(kinds_of(1, seed), first=len(KINDS), seed=seed, out=out), out.read_text()
    rows = table(out).splitlines()
    assert f"| all | {len(KINDS)} | {len(KINDS)} | | |" in rows and len(rows) == len(KINDS) + 5, (
        rows
    )
