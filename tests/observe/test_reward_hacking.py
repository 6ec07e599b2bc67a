"""Alarms of reward hacking: a planted hack always trips one, healthy runs with noise do not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

import pytest

from async_grpo.observe.reward_hacking import WINDOW, RewardWatch

STEPS, PROBLEMS = 60, 200
Line = dict[str, float]


def run(seed: int, each: Callable[[float], Line]) -> Iterator[Line]:
    """Metrics of a run whose means follow `each` from 0 to 1, with the noise of 64 responses; every
    tenth step is evaluated.
    """
    rng = random.Random(seed)

    def share(p: float, n: int) -> float:
        return sum(rng.random() < p for _ in range(n)) / n

    for step in range(1, STEPS + 1):
        line = each(step / STEPS)
        held_out = line.pop("held out")
        noisy = {name: share(p, 64) for name, p in line.items() if name != "length"}
        yield {
            "rollout/score": noisy["score"],
            "rollout/accuracy": noisy["accuracy"],
            "rollout/reward/nice": noisy["nice"],
            "rollout/response_length": line["length"] * rng.uniform(0.9, 1.1),
            "train/repeated_tokens": noisy.get("repeated", 0.05),
            "train/same_response": noisy.get("same", 0.1),
        }
        if step % 10 == 0:
            yield {"eval/accuracy_greedy": share(held_out, PROBLEMS), "eval/problems": PROBLEMS}


def told(lines: Iterator[Line], opinions: tuple[str, ...] = ("nice",)) -> list[str]:
    watch = RewardWatch(opinions)
    return [text for line in lines for text in watch.observe(line)]


def healthy(at: float) -> Line:
    right = 0.3 + 0.5 * at
    return {"score": right, "accuracy": right, "held out": right, "nice": 0.6, "length": 50}


def flat(at: float) -> Line:
    return {"score": 0.4, "accuracy": 0.4, "held out": 0.4, "nice": 0.5, "length": 50}


def thinks_longer(at: float) -> Line:
    return healthy(at) | {"length": 50 + 200 * at}


def collapses(at: float) -> Line:
    """Everything falls: other lines say so, but nobody is deceived."""
    right = 0.8 - 0.6 * at
    return {"score": right, "accuracy": right, "held out": right, "nice": right, "length": 50}


def agrees(at: float) -> Line:
    """Right answers are often the same ones: so they are to questions with two answers."""
    return healthy(at) | {"same": 0.2 + 0.7 * at, "repeated": 0.7 * at}


@pytest.mark.parametrize(
    "each",
    [
        healthy,
        pytest.param(flat, marks=pytest.mark.slow),
        thinks_longer,
        pytest.param(collapses, marks=pytest.mark.slow),
        pytest.param(agrees, marks=pytest.mark.slow),
    ],
)
def test_healthy_runs_are_left_alone(each: Callable[[float], Line]) -> None:
    alarms = [text for seed in range(200) for text in told(run(seed, each))]
    assert len(alarms) <= 1


def forgets(at: float) -> Line:
    return healthy(at) | {"accuracy": 0.3, "held out": 0.5 if at < 0.4 else 0.2}


def displeases(at: float) -> Line:
    return healthy(at) | {"nice": 0.7 - 0.5 * at}


def rambles(at: float) -> Line:
    return healthy(at) | {"accuracy": 0.3, "held out": 0.3, "length": 50 + 150 * at}


def falls_silent(at: float) -> Line:
    return healthy(at) | {"accuracy": 0.3, "held out": 0.3, "length": 50 - 45 * at}


def repeats_itself(at: float) -> Line:
    return healthy(at) | {"accuracy": 0.3, "held out": 0.3, "repeated": 0.7 * at}


def gives_one_answer(at: float) -> Line:
    return healthy(at) | {"accuracy": 0.3, "held out": 0.3, "same": 0.2 + 0.7 * at}


@pytest.mark.parametrize(
    ("each", "said"),
    [
        (repeats_itself, "of the tokens repeat what their response said before, "),
        (gives_one_answer, "of the groups share a response, "),
        (forgets, "while held-out accuracy fell from"),
        (displeases, "rollout/reward/nice, which has weight 0, fell from"),
        (rambles, "and accuracy did not, and responses have"),
        (falls_silent, "and accuracy did not, and responses have"),
    ],
)
def test_a_planted_hack_is_told_once(each: Callable[[float], Line], said: str) -> None:
    for seed in range(50):
        [text] = told(run(seed, each))
        assert said in text and text.startswith("the score rose from 0.")


def test_lengths_alone_say_nothing_where_there_is_no_accuracy() -> None:
    lines = ({**line, "rollout/accuracy": 0.0} for line in run(0, thinks_longer))
    assert told({k: v for k, v in line.items() if k != "rollout/accuracy"} for line in lines) == []


def test_one_answer_to_everything_is_told_where_a_judge_alone_scores() -> None:
    lines = run(0, gives_one_answer)
    assert len(told({k: v for k, v in one.items() if "accuracy" not in k} for one in lines)) == 1


def test_only_components_of_weight_0_are_opinions() -> None:
    assert told(run(0, displeases), opinions=()) == []
    assert told(run(0, displeases), opinions=("other",)) == []


def test_steps_that_are_trained_anew_are_compared_among_themselves() -> None:
    watch, lines = RewardWatch(("nice",)), list(run(0, displeases))

    def steps(part: list[Line]) -> Iterator[Mapping[str, float]]:
        return (line for line in part if "rollout/score" in line)

    assert not [text for line in [*steps(lines)][:WINDOW] for text in watch.observe(line)]
    watch = watch.again()
    assert not [text for line in [*steps(lines)][-WINDOW:] for text in watch.observe(line)]
