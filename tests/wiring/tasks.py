"""The settings of tasks and of the warm start: problems as the driver reads them, and a model
taught for a moment.
"""

from __future__ import annotations

import asyncio
import json
import os
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors.torch import load_file

from async_grpo.config.frozen import Judge
from async_grpo.config.schema import Config
from async_grpo.contrib.warm_start import cache as warm_start_cache
from async_grpo.contrib.warm_start import model as warm_start_model
from async_grpo.contrib.warm_start.cache import warm_start
from async_grpo.rollout.engine.base import Completion
from async_grpo.rollout.evaluator import EngineEvaluator
from async_grpo.rollout.posed import PosedTask
from async_grpo.tasks.base import TaskError
from async_grpo.tasks.mixture import load_tasks, parts_of, reward_weights
from async_grpo.tasks.registry import held_out
from async_grpo.tasks.verifier import VerifierPool
from tests.support.wiring import Wire, workplace


@cache
def rows(name: str, count: int, bad: int = 0) -> str:
    """A JSONL file with problems of its own, some of them malformed."""
    path = workplace() / f"{name}.jsonl"
    good = [{"prompt": f"{name} {index}?", "answer": str(index)} for index in range(count)]
    path.write_text("\n".join(map(json.dumps, [*good, *[{"prompt": ""}] * bad])))
    return str(path)


def posed(config: Config) -> Any:
    """The problems that are trained and evaluated, and the weights of their rewards."""
    try:
        task = load_tasks(config)
        problems = [task.train(index).prompt for index in range(min(8, len(task)))]
        found = held_out(config, task)
    except TaskError as error:
        return str(error)
    return [problems, task.fingerprint, reward_weights(config, task), found, _asked(config, task)]


def _asked(config: Config, task: Any) -> list[Any]:
    """What an engine is asked at an evaluation."""
    asked: list[Any] = []

    class Parts:
        max_num_seqs = 256

        async def generate(self, prompt: Any, *_: Any, **__: Any) -> list[Completion]:
            asked.append(prompt)
            raise TaskError("enough")

    def pose(own: Config, one: Any) -> PosedTask:
        return PosedTask(
            own, one, make_verifiers=lambda: VerifierPool(own.task, seed=0), start_player=None
        )

    evaluator = EngineEvaluator(
        config,
        engine=Parts(),
        task=task,
        posed={own.posed: pose(own, one) for own, one in parts_of(config, task)},
        pose=pose,
        encode=lambda problem: [problem.prompt, problem.reference],
        text=str,
    )
    try:
        asyncio.run(evaluator.answer(indices=[0], total=1, label="v0.0", samples=0))
    except TaskError:
        return asked[:1]
    raise AssertionError("the engine was not asked")


def taught(config: Config) -> list[Any]:
    """The report and the weights of a model that was warm-started for a few steps, as if its
    accuracy were always the same; and whether it lies under the user's home.
    """
    home = workplace()
    right = warm_start_model.Accuracy(greedy=0.4, sampled=0.2)
    with (
        mock.patch.dict(os.environ, HOME=str(home)),
        mock.patch.object(warm_start_model, "measure", lambda *_: right),
        mock.patch.object(warm_start_model, "_CHECK_EVERY", 5),
        mock.patch.object(warm_start_model, "_CHECK_PROBLEMS", 4),
    ):
        directory = Path(warm_start(config, progress=lambda _: None))
        assert warm_start_cache.is_cached(directory)
    report = json.loads((directory / "warm_start.json").read_text())
    weights = load_file(directory / "model.safetensors")
    sizes = {name: (list(one.shape), float(one.abs().sum())) for name, one in weights.items()}
    shape = json.loads((directory / "config.json").read_text())
    del report["seconds"]
    return [report, sizes, shape["num_attention_heads"], directory.is_relative_to(home)]


OF_ROWS = {"name": "jsonl", "train": rows("own", 6)}
DATA = {"task.name": "jsonl", "task.train": rows("train", 6), "task.eval": rows("eval", 5)}
OTHER = {"evaluation.task.name": "jsonl", "evaluation.task.eval": rows("other", 4)}
SMALL = {
    "model.warm_start.hidden_size": 64,
    "model.warm_start.intermediate_size": 32,
    "model.warm_start.heads": 2,
    "model.warm_start.layers": 1,
    "model.warm_start.batch_size": 4,
    "model.warm_start.max_steps": 3,
    "model.warm_start.blur_max_steps": 3,
}
HARD = SMALL | {
    "model.warm_start.blur_accuracy": 0.5,
    "model.warm_start.blur_sampled_accuracy": 0.1,
}


def _warm(key: str, value: Any, given: dict[str, Any] = HARD) -> Wire:
    return Wire(f"model.warm_start.{key}", value, taught, given)


WIRES = [
    Wire("task.train", rows("others", 6), posed, DATA),
    Wire("task.eval", rows("evals", 7), posed, DATA),
    Wire("task.layout", "verl", posed, DATA),
    Wire("task.columns", {"prompt": "answer"}, posed, DATA),
    Wire("task.streaming", True, posed, DATA),
    Wire("task.options", {"match": "contains"}, posed, DATA),
    Wire("task.rewards", {"format": 2.0}, posed),
    Wire("task.judges", {"nice": Judge(model="critic")}, posed, unchecked=True),
    Wire("task.max_bad_fraction", 0.5, posed, {**DATA, "task.train": rows("bad", 6, 2)}),
    Wire("tasks", {"own": OF_ROWS, "sums": {}}, posed),
    Wire("evaluation.max_samples", 3, posed),
    Wire("evaluation.task", {"name": "jsonl", "eval": rows("other", 4)}, posed),
    Wire("evaluation.task.name", "jsonl", posed, OTHER, against="arithmetic"),
    Wire("evaluation.task.eval", rows("third", 3), posed, OTHER),
    Wire("evaluation.task.options", {"max_digits": 1}, posed),
    Wire("evaluation.task.layout", "verl", posed, OTHER),
    Wire("evaluation.task.columns", {"prompt": "answer"}, posed, OTHER),
    Wire("seed", 3, taught, HARD),
    _warm("hidden_size", 192),
    _warm("intermediate_size", 64),
    _warm("layers", 3),
    _warm("heads", 1),
    _warm("experts", 4),
    _warm("tie_embeddings", True),
    _warm("batch_size", 8),
    _warm("lr", 1e-4),
    _warm("max_steps", 2, HARD | {"model.warm_start.target_accuracy": 0.3}),
    _warm("target_accuracy", 0.3, HARD | {"model.warm_start.max_steps": 8}),
    _warm("blur_accuracy", 0.1, SMALL),
    _warm("blur_sampled_accuracy", 0.1, SMALL),
    _warm("blur_noise", 0.9),
    _warm("blur_max_steps", 2),
    _warm("cache_dir", str(workplace())),
]
