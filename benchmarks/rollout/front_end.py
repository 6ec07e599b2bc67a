"""What a token costs the process with the event loop: `python -m benchmarks.rollout.front_end
[--responses 64 256] [--smoke] [--out JSON] [--docs FILE]`.

Two engines of one tiny model in this process, which take turns with the same seeded requests: one
with vLLM's own scheduler, which sends every token, and one with ours. CPU seconds of this process
and of the two EngineCores, not wall-clock time: a model of any size and a GPU of any speed cost the
event loop the same. `--smoke` shows that it runs.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import psutil

from async_grpo.config.schema import Config
from async_grpo.rollout.engine.base import Sampling
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from benchmarks.harness import (
    Part,
    Report,
    add_smoke,
    aim,
    apart,
    arguments_of,
    machine,
    quiet,
    spread,
)
from benchmarks.tails import TailModel

AIM_US, GROUP, PROMPT, TIMEOUT_S = 20.0, 8, list(range(5, 29)), 500.0
MODEL = TailModel("tiny", 64, 2, 128, mean=None)
HEADER = [
    (
        "| responses | tokens each | front end, CPU us a token: vLLM's scheduler | ours | ratio | "
        "EngineCore: vLLM's | ours | responses with the same tokens and log-probs |"
    ),
    "|---|---|---|---|---|---|---|---|",
]


@dataclass(frozen=True)
class Load:
    """Responses at the same time, and the tokens of each."""

    responses: int
    tokens: int


@dataclass(frozen=True)
class Found:
    """CPU microseconds per token, turn by turn, and of how many responses both gave the same."""

    bare: list[float]
    ours: list[float]
    bare_core: list[float]
    ours_core: list[float]
    same: int
    compared: int

    @property
    def ratios(self) -> list[float]:
        """Ours over vLLM's, turn by turn."""
        return [ours / bare for ours, bare in zip(self.ours, self.bare, strict=True)]


async def measure(model: str, load: Load, turns: int) -> Found:
    """Start both engines and let them take turns, in a process of its own."""
    found: dict[str, list[float]] = {"bare": [], "ours": [], "bare_core": [], "ours_core": []}
    same = 0
    async with _engine(model, load, ours=False) as bare, _engine(model, load, ours=True) as ours:
        for number in range(turns + 1):
            given, order = {}, [("bare", *bare), ("ours", *ours)]
            for name, engine, core in order if number % 2 else order[::-1]:
                own, theirs = time.process_time(), _seconds(core)
                given[name] = await _turn(engine, load, number)
                count = load.responses * load.tokens / 1e6
                own, theirs = time.process_time() - own, _seconds(core) - theirs
                if number:  # the first warms up
                    found[name].append(own / count)
                    found[f"{name}_core"].append(theirs / count)
            same += sum(one == other for one, other in zip(*given.values(), strict=True))
    return Found(**found, same=same, compared=(turns + 1) * load.responses)


@asynccontextmanager
async def _engine(
    model: str, load: Load, *, ours: bool
) -> AsyncIterator[tuple[VllmEngine, psutil.Process]]:
    config = Config.model_validate(
        {
            "model": {"path": model, "dtype": "float32"},
            "run": {"total_steps": 1},
            "rollout": {"prompt_length": len(PROMPT), "response_length": load.tokens},
            "cluster": {"engine": {"max_num_seqs": load.responses}},
        }
    )
    before = set(psutil.Process().children())
    usual = patch("async_grpo.rollout.engine.vllm.scheduler.HeldOutputs", None)
    with nullcontext() if ours else usual:
        engine = await VllmEngine.start(
            config,
            model_dir=model,
            device="cpu",
            backend="shared_memory",
            stop_token_ids=[],
            label="v0.0",
            seed=1,
        )
    try:
        new = set(psutil.Process().children()) - before
        yield engine, max(new, key=lambda one: one.memory_info().rss)  # beside multiprocessing's
    finally:
        engine.close()


async def _turn(engine: VllmEngine, load: Load, number: int) -> list[tuple[bytes, bytes]]:
    """Tokens and log-probs of every response."""
    groups = await asyncio.gather(
        *[
            engine.generate(
                [*PROMPT, 5 + group],
                Sampling(GROUP, load.tokens, 1.0, seed=number * load.responses + group),
            )
            for group in range(load.responses // GROUP)
        ]
    )
    return [(one.token_ids.tobytes(), one.logprobs.tobytes()) for group in groups for one in group]


def _seconds(process: psutil.Process) -> float:
    used = process.cpu_times()
    return used.user + used.system


def part(load: Load, found: Found) -> Part:
    """Table, aims and values of one load."""
    core = [f"{statistics.median(one):.0f}" for one in (found.bare_core, found.ours_core)]
    line = (
        f"| {load.responses} | {load.tokens} | {spread(found.bare, '.1f')} | "
        f"{spread(found.ours, '.1f')} | {spread(found.ratios)} | {' | '.join(core)} | "
        f"{found.same} of {found.compared} |"
    )
    us = statistics.median(found.ours)
    what = f"{AIM_US:.0f} us of the front end per token, {load.responses} responses"
    return (
        [*HEADER, line],
        [aim(what, f"{us:.1f}", met=us <= AIM_US and found.same == found.compared)],
        asdict(found) | {"load": asdict(load)},
    )


def main(argv: list[str] | None = None) -> None:
    parser = arguments_of("rollout.front_end", "What a token costs the process with the loop.")
    parser.add_argument("--responses", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    add_smoke(parser)
    arguments = parser.parse_args(argv)
    smoke = arguments.smoke
    loads = [Load(16, 40)] if smoke else [Load(n, arguments.tokens) for n in arguments.responses]
    report = Report("rollout.front_end", machine("vllm", "torch"))
    with tempfile.TemporaryDirectory(prefix="front-end-") as temporary:
        model = MODEL.write(Path(temporary) / MODEL.name)
        for load in loads:
            turns = 2 if smoke else arguments.turns
            found = apart(measure, model, load, turns, limit_s=TIMEOUT_S)
            report.keep(str(load.responses), part(load, found))
    report.end(arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    quiet()
    main()
