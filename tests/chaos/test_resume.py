"""A driver that is killed while it saves, again and again: the same command goes on, and the run is
the one that was never interrupted.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from async_grpo.replay.history import read_history
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.weights.transport import parse_label
from tests.chaos.harness import Entry, Run
from tests.chaos.watched import ACCESS
from tests.support.models import write_model

EVERY, R, KILLS = 2, 3, 1
STEPS_PER_START = 2 * EVERY
"""A start completes one checkpoint and dies in the next one."""
START_S, RUN_S = 500.0, 300.0
REPEATED = re.compile(
    r"learner steps (\d+) to (\d+) are trained again from their recorded batches; the "
    r"weights are the same bits at (\d+) of (\d+)"
)
RESUMED = re.compile(r"resumed (\S+)(?: \S+)? at step (\d+) of")


def settings(model: str, steps: int) -> dict[str, Any]:
    """Synchronous and seeded; one response at a time, since the last bits of an engine's log-probs
    depend on what else is in its batch.
    """
    return {
        "seed": 11,
        "run": {"name": "resume", "total_steps": steps},
        "model": {"path": model},
        "rollout": {
            "rollout_batch_size": R,
            "group_size": 4,
            "prompt_length": 16,
            "response_length": 10,
        },
        "replay": {"max_staleness": 0},
        "learner": {"lr": 1e-3, "schedule": "linear", "tokens_per_micro_batch": 4096},
        "checkpoint": {"every_steps": EVERY, "keep": 1},
        "evaluation": {"before": False, "max_samples": 2},
        "tracking": {"mlflow": False},
        "weight_sync": {"self_check": False},
        "cluster": {"rollout_actors": {"min": 1, "max": 1}, "engine": {"max_num_seqs": 1}},
    }


def interrupted(run: Run, points: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Kill the driver at one point of each checkpoint in turn; what each start began with and said.
    The last one comes to the end.
    """
    starts = []
    for number, point in enumerate([*points, None]):
        found = checkpoint.latest(run.dir)
        told: dict[str, Any] = {
            "found": None if found is None else checkpoint.verify(found)["step"],
            "point": point,
        }
        run.start(
            **(
                {}
                if point is None
                else {ACCESS: f"{point[0]} {STEPS_PER_START * (number + 1)} {point[1]}"}
            )
        )
        code = run.ends(START_S + RUN_S)
        assert code == (0 if point is None else -9), (
            f"start {number + 1}, {point}: exit code {code}\n{run.text()[-4000:]}"
        )
        run.wait_until_gone()
        told |= {"text": run.text(), "digests": dict(read_history(run.dir / "journal").live)}
        starts.append(told)
    return starts


def accesses(run: Run, step: int) -> list[tuple[str, int, Entry]]:
    """Every access to the files of this checkpoint in the order of time, as (role, number in that
    role, entry).
    """
    counted: dict[str, int] = {}
    found = []
    driver = next(run.side.having("driver")).pid
    for entry in (entry for entry in run.side.having("access") if entry.values[0] == step):
        role = "driver" if entry.pid == driver else "rank"
        counted[role] = counted.get(role, -1) + 1
        found.append((role, counted[role], entry))
    return found


def last_point(run: Run) -> list[tuple[str, int]]:
    """When everything is there but the name."""
    seen = accesses(run, STEPS_PER_START)
    [renamed] = [one for one in seen if one[2].values[1] == "os.rename"]
    return [renamed[:2]]


def spread_points(run: Run, count: int) -> list[tuple[str, int]]:
    """From the first access to the last one, evenly."""
    seen = accesses(run, STEPS_PER_START)
    return [seen[round(index * (len(seen) - 1) / (count - 1))][:2] for index in range(count)]


def staged_weights(run: Run) -> dict[int, set[str]]:
    """Policy version -> digests of the weights that any start of the run made for it."""
    found: dict[int, set[str]] = {}
    for entry in run.side.having("staged"):
        found.setdefault(parse_label(entry.values[0]).step, set()).add(entry.values[1])
    return found


def losses(run: Run) -> dict[int, float]:
    rows = map(json.loads, (run.dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def tell(home: Path, kills: int) -> dict[str, Any]:
    """The run without interruption, and the one whose driver is killed in so many checkpoints."""
    model, steps = (
        write_model(home / "model", positions=64, ends=False),
        STEPS_PER_START * kills + EVERY,
    )
    whole, cut = (Run(home, settings(model, steps), name=name) for name in ("whole", "cut"))
    try:
        whole.start(**{ACCESS: "note"})
        whole.wait(
            lambda: any(entry.values[0] > STEPS_PER_START for entry in whole.side.having("access")),
            START_S,
            "the checkpoints of a start, and a further one",
        )
        points = last_point(whole) if kills == KILLS else spread_points(whole, kills)
        starts = interrupted(cut, points)  # beside the rest of the other one
        cut.side.poll()
        left = cut.leftovers()
        assert whole.ends(START_S + RUN_S) == 0, whole.text()[-4000:]
        whole.side.poll()
        return {"whole": whole, "cut": cut, "left": left, "starts": starts, "steps": steps}
    finally:
        whole.close()
        cut.close()


def story(home: Path) -> dict[str, Any]:
    """The run that the tests of this module share."""
    return tell(home, KILLS)


@pytest.fixture(scope="module", params=[KILLS, pytest.param(20, marks=pytest.mark.slow)])
def both(
    request: pytest.FixtureRequest,
    shared_run: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    return (
        shared_run
        if request.param == KILLS
        else tell(tmp_path_factory.mktemp("resume"), request.param)
    )


pytestmark = pytest.mark.timeout(3600)


def test_every_start_goes_on_from_the_newest_complete_checkpoint(both):
    for number, told in enumerate(both["starts"]):
        resumed = RESUMED.search(told["text"])
        if told["found"] is None:
            assert resumed is None or "the journal" in resumed[0], told["text"]
        else:
            assert (
                f"resumed {checkpoint.path_for(both['cut'].dir, told['found'])} at step"
                in told["text"]
            ), f"start {number + 1}: {told['text']}"
    found = [told["found"] or 0 for told in both["starts"]]
    assert found == sorted(found) and found[-1] > 0, found
    assert checkpoint.latest(both["cut"].dir) == checkpoint.path_for(both["cut"].dir, both["steps"])
    assert both["left"] == []


def test_lost_steps_come_out_bit_for_bit(both):
    rolled = 0
    for before, after in zip(both["starts"], both["starts"][1:], strict=False):
        newest, begun = max(before["digests"], default=0), after["found"] or 0
        repeated = [tuple(map(int, match)) for match in REPEATED.findall(after["text"])]
        assert all(same == compared for _, _, same, compared in repeated), after["text"]
        if newest > begun:
            [(first, last, _, compared)] = repeated
            assert first == begun + 1 and last >= newest and compared >= newest - begun, after[
                "text"
            ]
            rolled += compared
        staged = staged_weights(both["cut"])
        assert before["digests"] and all(
            staged[version] == {digest} for version, digest in before["digests"].items()
        ), "also those repeated later"
    assert rolled >= EVERY * (len(both["starts"]) - 1) // 2, rolled


def test_the_state_is_what_was_saved(both):
    entries = [entry.values for entry in both["cut"].side.having("state")]
    saved: dict[int, set[tuple[str, ...]]] = {}
    for what, step, *digests in entries:
        if what == "saved":
            saved.setdefault(step, set()).add(tuple(digests))
    loaded = [(step, tuple(digests)) for what, step, *digests in entries if what == "loaded"]
    assert len(loaded) == sum(told["found"] is not None for told in both["starts"])
    assert all(digests in saved[step] for step, digests in loaded), (loaded, saved)
    assert {step: len(digests) for step, digests in saved.items()} == dict.fromkeys(saved, 1), (
        "a step that is trained again is saved as it was"
    )


def test_the_trajectory_is_that_of_the_run_without_interruption(both):
    staged = staged_weights(both["whole"])
    assert set(staged) == set(range(both["steps"] + 1)) and staged_weights(both["cut"]) == staged
    assert (
        losses(both["cut"]) == losses(both["whole"]) and len(losses(both["cut"])) == both["steps"]
    )
    whole, cut = (
        {
            values[1]: values[2]
            for entry in both[name].side.having("state")
            if (values := entry.values)[0] == "saved"
        }
        for name in ("whole", "cut")
    )
    killed_at = {STEPS_PER_START * (n + 1) for n in range(len(both["starts"]) - 1)}
    assert set(whole) - set(cut) <= killed_at, "a step that is trained again is not saved again"
    assert cut == {step: whole[step] for step in cut} and max(cut) == max(whole) == both["steps"], (
        "weights, optimizer and schedule after every step at which both saved"
    )
