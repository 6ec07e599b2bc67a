"""`python -m async_grpo.evaluate SOURCE`: accuracy on held-out problems, with one engine.

Runs in: a process of its own, without Ray and without a learner; nothing is written. Hides how the
settings of a checkpoint's run are taken over. Exit code 2 with one sentence for what cannot be
evaluated, 4 where engine or verifiers end. Invariant: problems, prompts, sampling and scores are
those of a run's own evaluations, which the same code (`rollout.evaluator`) answers.

    SOURCE is a checkpoint or run directory   its run's settings; --task and overrides replace them
    SOURCE is a model                         --task says what is asked
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from async_grpo.algo.accuracy import metrics
from async_grpo.checkpoint import directory
from async_grpo.config.load import ConfigError, load_config
from async_grpo.config.schema import Config
from async_grpo.errors import EXIT_MEANING, FaultBudgetSpent, RunError, SetupError
from async_grpo.observe.console.console import Console
from async_grpo.preflight.model import look
from async_grpo.replay.rules import Verdict
from async_grpo.rollout.actor import RolloutActor
from async_grpo.rollout.engine import EngineError
from async_grpo.tasks.base import TaskError
from async_grpo.tasks.registry import HELD_OUT, create_task, held_out
from async_grpo.tasks.verifier import VerifierError
from async_grpo.weights.transport import Version, resolve_backend

SHOWN_BYTES = 4000


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what the engine and its libraries write to descriptors 1 and 2, dozens of lines;
    show the last of it if the block fails.
    """
    with tempfile.TemporaryFile() as kept:
        usual = os.dup(1), os.dup(2)
        for descriptor in (1, 2):
            os.dup2(kept.fileno(), descriptor)
        try:
            yield
        except BaseException:
            kept.seek(max(0, kept.seek(0, os.SEEK_END) - SHOWN_BYTES))
            os.write(usual[1], kept.read())
            raise
        finally:
            for descriptor, copy in zip((1, 2), usual, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m async_grpo.evaluate",
        description="Evaluate a checkpoint or a model on held-out problems, with one engine.",
    )
    source = "a checkpoint, a run directory (its newest checkpoint), or a model: directory or name"
    parser.add_argument("source", metavar="SOURCE", help=source)
    parser.add_argument("--task", help="the task to ask; of a checkpoint, the run's own otherwise")
    overrides = "settings: evaluation.max_samples=200 rollout.response_length=512"
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=overrides)
    parser.add_argument("--json", action="store_true", help="print the numbers as one JSON object")
    arguments = parser.parse_intermixed_args(argv)
    with open(os.dup(2 if arguments.json else 1), "w", buffering=1) as out:
        console = Console(out)
        try:
            config = settings(arguments.source, task=arguments.task, overrides=arguments.overrides)
            found = evaluate(config, console)
        except Exception as error:  # noqa: BLE001 - said, and the process ends
            code = _exit_code(error)
            if code == RunError.exit_code:
                traceback.print_exc()
            console.error(str(error))
            console.error(f"exit code {code}: {EXIT_MEANING[code]}")
            return code
        if arguments.json:
            print(json.dumps(found), flush=True)
        else:
            console.summary(f"evaluated {config.model.path}", rows(config, found))
    return 0


def _exit_code(error: Exception) -> int:
    """Return the code of an error; 1 for one that nobody foresaw."""
    if isinstance(error, RunError):
        return error.exit_code
    if isinstance(error, (ConfigError, TaskError)):
        return SetupError.exit_code
    if isinstance(error, (EngineError, VerifierError)):
        return FaultBudgetSpent.exit_code
    return RunError.exit_code


def settings(source: str, *, task: str | None, overrides: Sequence[str]) -> Config:
    """Put the settings of an evaluation together, the evaluated task as `task`. Raises ConfigError,
    SetupError.
    """
    place = Path(source).expanduser()
    is_run = (place / "checkpoints").is_dir() or (place / directory.MANIFEST).is_file()
    with tempfile.TemporaryDirectory(prefix="async_grpo-evaluate-") as scratch:
        if is_run:
            checkpoint = directory.find(place).absolute()
            run_dir = checkpoint.parent.parent
            base = run_dir / "config.yaml"
            model = str(checkpoint / directory.MODEL)
            if not base.is_file():
                raise SetupError(
                    f"{checkpoint} has no config.yaml of its run two folders above: evaluate "
                    f"{model} with --task"
                )
        else:
            run_dir, model = Path(scratch), source
            base = run_dir / "empty.yaml"
            base.write_text("", encoding="utf-8")
            if task is None and not place.exists() and place.is_absolute():
                raise SetupError(f"{source} does not exist: name a checkpoint, a run or a model")
            if task is None:
                raise SetupError(f"{source} is no checkpoint: say what is asked, --task gsm8k")
        given = [
            "run.total_steps=1",
            "run.epochs=null",
            "model.warm_start=null",
            "model.lora=null",
            f"model.path={json.dumps(model)}",
            f"run.dir={json.dumps(str(run_dir))}",  # where what the run has stored passes
        ]
        if task is not None:
            asked = {"name": task} | ({"eval": HELD_OUT[task]} if task in HELD_OUT else {})
            given += [f"task={json.dumps(asked)}", "evaluation.task=null"]
        config = load_config(base, [*given, *overrides])
    evaluation = config.evaluation.model_copy(update={"task": None})
    return config.model_copy(update={"task": config.evaluated_task, "evaluation": evaluation})


def evaluate(config: Config, console: Console) -> dict[str, float]:
    """Answer the held-out problems; the metrics `eval/...`. Raises SetupError, TaskError."""
    task = create_task(config.task, config.seed)  # which may have no training data
    total = held_out(config, task)
    if not total:
        raise SetupError(f"task {config.task.name} has no held-out problems: set task.eval")
    console.info(*(look(config, task, of_evaluation=True) or []))
    with _quiet():
        return asyncio.run(_answered(config, total, console))


async def _answered(config: Config, total: int, console: Console) -> dict[str, float]:
    import torch

    device, has_gpu = config.cluster.device, torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise SetupError(
            "`cluster.device` is cuda, and this machine has no GPU: say cluster.device=auto"
        )
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    actor = RolloutActor(
        config,
        actor_id="evaluation",
        queue=_NoQueue(),
        model_dir=str(config.model.path),
        device=device,
        cores=(),
    )
    label = Version(0, 0).label
    with console.phase("starting the engine"):
        await actor.start(
            backend=resolve_backend(config, device=device, colocated=False),
            label=label,
            only_evaluates=True,
        )
    try:
        started = time.perf_counter()
        with console.phase(f"evaluating on {total} held-out problems"):
            async with asyncio.timeout(config.evaluation.timeout_s) as deadline:
                outcomes, _ = await actor.evaluate(
                    indices=range(total), total=total, label=label, samples=0
                )
        seconds = time.perf_counter() - started
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise SetupError(
            f"the evaluation took longer than evaluation.timeout_s = "
            f"{config.evaluation.timeout_s:g} s: raise it, or lower evaluation.max_samples"
        ) from error
    finally:
        await actor.close()
    return metrics(outcomes, n=config.evaluation.n) | {"eval/seconds": seconds}


class _NoQueue:
    """Stands for the queue of an actor that takes no tickets."""

    async def acquire(self, *_: Any) -> None:
        raise AssertionError("an evaluation takes no tickets")

    async def put(self, *_: Any) -> list[Verdict]:
        raise AssertionError("an evaluation makes no groups")

    async def fail(self, *_: Any) -> None:
        raise AssertionError("an evaluation has no tickets to give back")


def rows(config: Config, found: dict[str, float]) -> list[tuple[str, str]]:
    """Say the numbers: (name, text)."""
    said = []
    for name in found:
        if f"{name}/low" in found:
            low, high = found[f"{name}/low"], found[f"{name}/high"]
            label = name.removeprefix("eval/").replace("_at_", "@").replace("_", ", ")
            said.append((label, f"{found[name]:.1%} (95 % interval {low:.1%} to {high:.1%})"))
    if not said:
        said.append(("accuracy", "none: the task gives no verdicts"))
    errors = found["eval/errors"]
    said.append(("held-out problems", f"{found['eval/problems']:,.0f} of task {config.task.name}"))
    said.append(("response length", f"{found['eval/response_length']:.1f} tokens, greedy"))
    if errors:
        said.append(("errors", f"{errors:,.0f} responses could not be scored, and count as wrong"))
    said.append(("seconds", f"{found['eval/seconds']:.1f}"))
    return said


if __name__ == "__main__":
    os._exit(main())  # vLLM's client cannot be finalised by an interpreter that ends
