"""One engine without a run: whose settings count, and how it starts and ends.

Runs in: a process of its own, without Ray and without a learner.

    SOURCE is a checkpoint or run directory   its run's settings; --task and overrides replace them
    SOURCE is a YAML                          its settings, and its model, made by a run if need be
    SOURCE is a model                         --task says what is asked
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from async_grpo.config.command_line import RUNS
from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent, SetupError
from async_grpo.observe.console.console import Console
from async_grpo.observe.console.status_file import STATUS, newest_run
from async_grpo.rollout.engine.base import EngineError
from async_grpo.rollout.host import EngineHost
from async_grpo.run.checkpoint import directory
from async_grpo.run.preflight.model import known_model, positions
from async_grpo.tasks.mixture import create_tasks
from async_grpo.tasks.registry import HELD_OUT
from async_grpo.tasks.verifier import VerifierError
from async_grpo.weights.transport import Version, resolve_backend

LABEL = Version(0, 0).label
"""Of the weights that such an engine has."""
SHOWN_BYTES = 4000
CHAT_TOKENS, CHAT_TURNS = 4096, 1000
"""What a person may talk with a model alone, at most."""


@contextmanager
def quiet() -> Iterator[None]:
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


def settings(
    source: str, *, task: str | None, overrides: Sequence[str], by_hand: bool = False
) -> Config:
    """Put the settings of an evaluation together, the evaluated task as `task`. by_hand: with a
    model alone a person may talk to it, without a task. Raises ConfigError, SetupError.
    """
    chat: list[str] = []
    place = Path(source).expanduser()
    if place == RUNS:
        place = newest_run(place)
    marks = (STATUS, "checkpoints", directory.MANIFEST)
    is_run = any(os.path.exists(place / name) for name in marks)
    if place == RUNS and not is_run:
        raise SetupError(f"there is no run in {RUNS}: name a checkpoint, a run or a model")
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
        elif place.suffix in (".yaml", ".yml") and place.is_file():
            run_dir, base, model = Path(scratch), place, _model_of(place, overrides)
        else:
            run_dir, model = Path(scratch), source
            base = run_dir / "empty.yaml"
            base.write_text("", encoding="utf-8")
            if task is None and not place.exists() and place.is_absolute():
                raise SetupError(f"{source} does not exist: name a checkpoint, a run or a model")
            if by_hand:
                task, half = task or "arithmetic", min(CHAT_TOKENS, positions(source)) // 2
                chat = [f"rollout={{prompt_length: {half}, response_length: {half}}}"]
                chat.append(f"rollout.max_turns={CHAT_TURNS}")
            if task is None:
                raise SetupError(f"{source} is no checkpoint: say what is asked, --task gsm8k")
        given = [
            "run.total_steps=1",
            "run.epochs=null",
            "model.warm_start=null",
            "model.lora=null",
            "cluster.layout=auto",  # no learner shares the engine's GPU
            "weight_sync={backend: auto, delta: auto, files: null, lora: merged}",
            "learner.routing_replay=off",
            f"model.path={json.dumps(model)}",
            f"run.dir={json.dumps(str(run_dir))}",  # where what the run has stored passes
        ]
        if task is not None:
            asked = {"name": task} | ({"eval": HELD_OUT[task]} if task in HELD_OUT else {})
            given += [f"task={json.dumps(asked)}", "evaluation.task=null", "tasks={}"]
        config = load_config(base, [*given, *chat, *overrides])
    if config.evaluation.task is None:
        return config
    evaluation = config.evaluation.model_copy(update={"task": None})
    other = {"task": config.evaluated_task, "tasks": {}, "evaluation": evaluation}
    return config.unchecked_copy(update=other)


@asynccontextmanager
async def actor_alone(config: Config, console: Console, *, name: str) -> AsyncIterator[EngineHost]:
    """Have an engine's host inside, on this machine. Raises SetupError, and FaultBudgetSpent where
    engine or verifiers end.
    """
    import torch

    device, has_gpu = config.cluster.device, torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise SetupError(
            "`cluster.device` is cuda, and this machine has no GPU: say cluster.device=auto"
        )
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    actor = EngineHost(
        config, actor_id=name, model_dir=str(config.model.path), device=device, cores=()
    )
    try:
        with console.phase("starting the engine"):
            await actor.start(
                backend=resolve_backend(config, device=device, colocated=False), label=LABEL
            )
        try:
            yield actor
        finally:
            await actor.close()
    except (EngineError, VerifierError) as error:
        raise FaultBudgetSpent(str(error)) from error


def _model_of(file: Path, overrides: Sequence[str]) -> str:
    """Return the model of a YAML, which a run may have made. Raises ConfigError, SetupError."""
    config = load_config(file, overrides)
    if config.model.path is not None:
        return config.model.path
    made = known_model(config, create_tasks(config))
    if made is None:
        raise SetupError(f"the model of {file} is made by its first run: run it before")
    return made
