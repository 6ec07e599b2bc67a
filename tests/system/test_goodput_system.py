"""A real run whose tokens and seconds are counted twice: by engines and driver, and from the groups
that arrived.
"""

from __future__ import annotations

from typing import Any

import pytest

from async_grpo.replay.ledger import State
from async_grpo.replay.token_ledger import PLACES
from async_grpo.runtime.time_ledger import ENGINE_CAUSES, LEARNER_CAUSES
from tests.support.recorded_run import STEPS

pytestmark = [pytest.mark.timeout(280), pytest.mark.alone]


def places(line: dict) -> dict[str, int]:
    return {place: int(line[f"goodput/{place}"]) for place in PLACES}


def test_every_line_adds_up_to_the_token(counted_run: dict[str, Any]) -> None:
    lines = [line for line in counted_run["metrics"] if "goodput/generated" in line]
    assert len(lines) == STEPS + 1, "one per step, and one at the end"
    for line in lines:
        assert sum(places(line).values()) == line["goodput/generated"] > 0
        assert line["goodput/share"] == pytest.approx(
            line["goodput/trained"] / line["goodput/generated"]
        )


def test_what_the_engine_sampled_is_what_became_of_groups_probes_and_evaluations(
    counted_run: dict[str, Any],
) -> None:
    last, told = counted_run["metrics"][-1], counted_run["report"].tokens
    found = places(last)
    assert told.sampled == last["goodput/generated"], (
        "vLLM counted them one by one; the queue knows the groups that arrived"
    )
    requests = {
        purpose: int(dict(counted_run["report"].counters)[f"sampled_{purpose}"])
        for purpose in ("rollouts", "probes", "evaluated")
    }
    assert sum(requests.values()) == told.sampled, (
        "the same, request by request, those that were aborted at the end too"
    )
    assert (
        (found["probes"], found["evaluated"]) == (told.probes, told.evaluated)
        and told.probes > 0
        and told.evaluated > 0
    )
    evaluated = [line for line in counted_run["metrics"] if "eval/problems" in line]
    assert len(evaluated) == len(counted_run["evaluations"]) > 2, "beside training too"
    history, in_groups = (
        counted_run["history"],
        {"trained": 0, "masked": 0, "baseline": 0, "rejected": 0, "unused": 0},
    )
    assert history.unlisted == {}, "none is older than the first segment"
    for group_id, record in history.groups.items():
        meta = history.meta(group_id)
        for row in meta.rows if meta is not None else ():
            trained = "masked" if row.finish_reason == "length" else "trained"
            place = {State.TRAINED: trained, State.REJECTED: "rejected"}.get(record.state, "unused")
            in_groups["baseline" if row.role == "baseline" else place] += row.length
    in_groups["unused"] += requests["rollouts"] - sum(
        in_groups.values()
    )  # what was under way when the run was stopped, if anything was
    assert in_groups == {place: found[place] for place in in_groups}, (
        "the groups in the journal, row by row"
    )
    assert min(found[place] for place in ("trained", "masked", "baseline", "rejected")) > 0
    assert {place for place, tokens in found.items() if tokens} <= {
        *in_groups,
        "probes",
        "evaluated",
    }, "nothing is held, lost or under way"


def test_the_seconds_of_learner_and_engine_add_up_to_the_time_that_passed(
    counted_run: dict[str, Any],
) -> None:
    learner = counted_run["learner"]
    assert set(learner) == set(LEARNER_CAUSES)
    assert sum(learner.values()) == pytest.approx(counted_run["wall"], rel=0.02)
    assert (
        min(
            learner[cause]
            for cause in ("working", "idle", "weight_sync", "checkpointing", "evaluating")
        )
        > 0
    )
    last = counted_run["metrics"][-1]
    engine = {cause: last[f"time/engine/{cause}"] for cause in ENGINE_CAUSES}
    assert counted_run["engine_times"] == {"actor-0": engine}
    assert sum(engine.values()) == pytest.approx(counted_run["engine_wall"], rel=0.02), (
        "from the first evaluation to the last word"
    )
    assert counted_run["engine_wall"] == pytest.approx(counted_run["wall"], rel=0.1)
    assert min(engine[cause] for cause in ("working", "paused", "evaluating")) > 0
