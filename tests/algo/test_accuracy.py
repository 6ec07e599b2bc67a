"""Estimators against slow enumerations, and answers of an actor with a fake engine."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from async_grpo.algo.accuracy import (
    ProblemOutcome,
    mean_interval,
    metrics,
    pass_at_k,
    powers_of_two,
    wilson,
)
from async_grpo.config.schema import Config
from async_grpo.rollout.engine.base import Completion, EngineError, Sampling
from async_grpo.rollout.evaluator import EngineEvaluator, PromptTooLong
from async_grpo.rollout.posed import PosedTask
from async_grpo.tasks.base import Problem, Score, TaskError
from async_grpo.tasks.registry import held_out, load_task
from async_grpo.tasks.verifier import VerifierError


def outcome(right: int, *, greedy: bool = False, judged: int = 1) -> ProblemOutcome:
    return ProblemOutcome(
        greedy=greedy, right=right, judged=judged, errors=0, greedy_tokens=2, sampled_tokens=8
    )


# ---- estimators ----


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            samples = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(samples, k))
                assert pass_at_k(n, c, k) == pytest.approx(
                    sum(map(any, subsets)) / len(subsets), abs=1e-12
                ), (n, c, k)
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5), "no overflow where the numbers are large"
    for wrong in ((4, 5, 1), (4, 2, 5), (4, 2, 0)):
        with pytest.raises(ValueError, match="samples of which"):
            pass_at_k(*wrong)
    assert (
        list(powers_of_two(1)) == [1]
        and list(powers_of_two(9)) == [1, 2, 4, 8]
        and list(powers_of_two(0)) == []
    )


def test_pass_at_k_is_unbiased() -> None:
    """Exactly: the expectation over all outcomes of n samples is 1 - (1 - p)^k, which the plug-in
    estimate is not.
    """
    n, p = 6, 0.3
    weight = {c: math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)}
    for k in (1, 2, 4):
        assert sum(weight[c] * pass_at_k(n, c, k) for c in weight) == pytest.approx(
            1 - (1 - p) ** k, abs=1e-12
        )
    plugged_in = sum(weight[c] * (1 - (1 - c / n) ** 4) for c in weight)
    assert abs(plugged_in - (1 - (1 - p) ** 4)) > 0.01


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (1, 1000, 0.000177, 0.005642),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilsons_interval_has_its_known_values(
    right: int, total: int, low: float, high: float
) -> None:
    """The last is Newcombe's example (1998), the others follow from the formula's roots: (p - x)^2
    = z^2 x (1 - x) / n.
    """
    assert wilson(right, total) == (
        pytest.approx(low, abs=2e-4 if total < 500 else 2e-6),
        pytest.approx(high, abs=2e-4 if total < 500 else 2e-6),
    )
    for end in wilson(right, total):
        if 0 < end < 1:
            assert (right / total - end) ** 2 == pytest.approx(
                1.959964**2 * end * (1 - end) / total, rel=1e-4
            )


def test_the_interval_of_a_mean_is_agresti_and_coulls_for_shares_and_covers_otherwise() -> None:
    for right, total in ((0, 20), (7, 20), (20, 20)):
        middle, count = (right + 1.959964**2 / 2) / (total + 1.959964**2), total + 1.959964**2
        half = 1.959964 * math.sqrt(middle * (1 - middle) / count)
        assert mean_interval([1.0] * right + [0.0] * (total - right)) == pytest.approx(
            (max(0, middle - half), min(1, middle + half)), abs=1e-6
        )
    low, high = mean_interval([1.0] * 1000)
    assert 0.995 < low < 1.0 == high, "problems that are all alike do not make it certain"
    random.seed(1)
    kinds, covered = (0.0, 0.25, 0.5, 1.0), 0
    for _ in range(2000):
        low, high = mean_interval(random.choices(kinds, (5, 2, 2, 1), k=60))
        covered += low <= 0.25 <= high
    assert 0.94 <= covered / 2000 <= 0.97


def test_metrics_of_outcomes() -> None:
    found = metrics([outcome(0), outcome(4, greedy=True), outcome(1, greedy=True), outcome(2)], n=4)
    assert (found["eval/problems"], found["eval/errors"], found["eval/tokens"]) == (4, 0, 40)
    assert (found["eval/response_length"], found["eval/response_length_sampled"]) == (2, 2)
    assert found["eval/accuracy_greedy"] == 0.5 and found["eval/pass_at_1"] == pytest.approx(7 / 16)
    assert (
        found["eval/pass_at_2"] == pytest.approx((0 + 1 + 3 / 6 + 5 / 6) / 4)
        and found["eval/pass_at_4"] == 0.75
    )
    for name in ("accuracy_greedy", "pass_at_1", "pass_at_2", "pass_at_4"):
        assert (
            0 <= found[f"eval/{name}/low"] < found[f"eval/{name}"] < found[f"eval/{name}/high"] <= 1
        )
    assert not any("pass" in name or "sampled" in name for name in metrics([outcome(0)], n=0))
    unjudged = metrics([outcome(0, judged=0)] * 3, n=2)
    assert unjudged["eval/problems"] == 3 and not any(
        "accuracy" in name or "pass" in name for name in unjudged
    )


def test_mlflow_takes_the_names() -> None:
    from mlflow.utils.validation import _validate_metric_name

    for name in metrics([outcome(1)], n=2):
        _validate_metric_name(name)


def test_the_summary_is_short() -> None:
    from async_grpo.run.summary import _accuracy

    def rows(**evaluation: Any) -> dict[str, str]:
        n = evaluation.get("n", 1)
        results = [
            (step, metrics([outcome(right, greedy=step > 0)] * 8, n=n))
            for step, right in ((0, 0), (50, n))
        ]
        return dict(_accuracy(SimpleNamespace(config=config(**evaluation), evaluations=results)))

    greedy, problems = (
        ("held-out accuracy, greedy", "0.0% -> 100.0% after step 50"),
        ("held-out problems", "8, none of them in training"),
    )
    sampled = ("held-out accuracy, sampled", "0.0% -> 100.0% after step 50")
    assert list(rows().items()) == [greedy, sampled, problems]
    assert list(rows(n=0).items()) == [greedy, problems]
    assert list(rows(n=6)) == [
        "held-out accuracy, greedy",
        "held-out accuracy, sampled",
        "held-out pass@4",
        "held-out problems",
    ]
    assert rows(task={"name": "arithmetic"})["held-out problems"] == "8, of task arithmetic"


# ---- answers ----


class Held:
    """A task whose second problem is too long."""

    weights: ClassVar[dict[str, float]] = {"correct": 1.0}

    def evaluation(self, n: int) -> list[Problem]:
        return [
            Problem(text, number) for number, text in enumerate(("ask", "asks far too much", "and"))
        ][:n]


class Parts:
    """Engine and verifiers: the greedy response is `g`, samples are `0`, `1`, ...; a response is
    right if the problem's number says so.
    """

    max_num_seqs = 5

    def __init__(self, labels: tuple[str, ...] = ("v0.3",)) -> None:
        self.labels, self.asked, self.running, self.most = labels, [], 0, 0
        self.closed = False

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, *, purpose: str
    ) -> list[Completion]:
        self.asked.append(sampling)
        self.running += sampling.n
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= sampling.n
        spans = [(label, index, index + 1) for index, label in enumerate(self.labels)]
        return [
            Completion(
                np.array([ord("g") if sampling.temperature == 0 else ord("0") + index], np.int32),
                np.zeros(1, np.float32),
                spans,
                "stop",
                0.0,
            )
            for index in range(sampling.n)
        ]

    async def score_many(self, items: list[tuple[str, Any]]) -> list[Score | VerifierError]:
        table = {("g", 0): 1.0, ("0", 0): 1.0, ("2", 0): 1.0, ("1", 2): 1.0}
        return [
            VerifierError("crash")
            if item == ("3", 2)
            else Score({"correct": 1.0}, table.get(item, 0.0))
            for item in items
        ]

    async def start(self) -> None: ...

    async def close(self) -> None:
        self.closed = True


def config(**evaluation: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": 2},
            "model": {"path": "m"},
            "rollout": {"prompt_length": 4, "response_length": 8, "temperature": 0.7},
            "evaluation": evaluation,
        }
    )


def answers(parts: Parts, settings: Config, indices: list[int], pool: Any = None) -> Any:
    def encode(problem: Problem) -> list[int]:
        if len(problem.prompt) > 4:
            raise PromptTooLong(f"a prompt has {len(problem.prompt)} tokens")
        return [1]

    async def scenario() -> Any:
        one = EngineEvaluator(
            settings,
            engine=parts,
            task=Held(),
            posed={
                "": PosedTask(settings, Held(), make_verifiers=lambda: parts, start_player=None)
            },
            pose=lambda own, task: PosedTask(
                own, task, make_verifiers=lambda: pool(own.task), start_player=None
            ),
            encode=encode,
            text=lambda c: "".join(map(chr, c.token_ids)),
        )
        try:
            return await one.answer(indices=indices, total=3, label="v0.3", samples=2)
        finally:
            await one.close()

    return asyncio.run(scenario())


def test_every_problem_has_a_greedy_response_and_n_samples() -> None:
    parts = Parts()
    outcomes, rows = answers(parts, config(n=4), [0, 1, 2])
    assert outcomes == [
        ProblemOutcome(greedy=True, right=2, judged=5, errors=0, greedy_tokens=1, sampled_tokens=4),
        ProblemOutcome(
            greedy=False, right=0, judged=0, errors=5, greedy_tokens=0, sampled_tokens=0
        ),
        ProblemOutcome(
            greedy=False, right=1, judged=4, errors=1, greedy_tokens=1, sampled_tokens=4
        ),
    ]
    assert (
        sorted((one.n, one.temperature, one.max_tokens) for one in parts.asked)
        == [(1, 0.0, 8)] * 2 + [(4, 0.7, 8)] * 2
    )
    assert (
        [row["response"] for row in rows] == ["g", ""]
        and rows[0]["correct"] == 1.0
        and "17 tokens" in rows[1]["error"]
    )
    assert parts.closed is False, "the verifiers of the task that is trained are not closed here"


def test_temperature_and_the_number_of_samples_are_settings_and_the_engine_is_not_flooded() -> None:
    parts = Parts()
    answers(parts, config(n=2, temperature=1.5), [0] * 50)
    assert {(one.n, one.temperature) for one in parts.asked} == {(1, 0.0), (2, 1.5)}
    assert 6 <= parts.most <= 10, "twice what the engine generates at the same time"
    greedy = Parts()
    outcomes, _ = answers(greedy, config(n=0), [0, 2])
    assert {one.n for one in greedy.asked} == {1} and [one.right for one in outcomes] == [0, 0]


def test_a_response_of_other_weights_is_refused() -> None:
    with pytest.raises(
        EngineError, match=r"the evaluation of v0\.3 got tokens that v0\.4 has sampled"
    ):
        answers(Parts(labels=("v0.3", "v0.4")), config(), [0])


def test_another_task_brings_problems_and_verifiers_of_its_own() -> None:
    started = []

    class Pool(Parts):
        def __init__(self, settings: Any) -> None:
            super().__init__()
            started.append((settings, self))

    settings = config(task={"name": "arithmetic", "options": {"max_digits": 1}})
    parts = Parts()
    outcomes, rows = answers(parts, settings, [0, 2], Pool)
    [(other, pool)] = started
    assert len(outcomes) == 2 and rows[0]["prompt"].endswith("=") and pool.closed
    assert (other.options, other.verifier) == ({"max_digits": 1}, settings.task.verifier)
    assert (
        held_out(settings, load_task(settings.task, 0))
        < 100
        < held_out(config(), load_task(settings.task, 0))
    )
    with pytest.raises(TaskError, match=r"evaluation\.task: task gsm8k has no held-out problems"):
        held_out(config(task={"name": "gsm8k"}), load_task(settings.task, 0))


def test_a_task_that_is_only_evaluated_needs_no_training_data(tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    assert (
        held_out(
            config(task={"name": "jsonl", "eval": str(file)}),
            load_task(
                Config.model_validate({"run": {"total_steps": 1}, "model": {"path": "m"}}).task, 0
            ),
        )
        == 2
    )
