"""What changes from one version of the weights to the next, and what sending only that costs:
`python -m benchmarks.weight_sync.versions [--model DIRECTORY] [--groups 4] [--dtype bfloat16]
[--lr 1e-6] [--versions 20] [--save DIRECTORY] [--out FILE]`.

    learner    DeepSpeed with the optimizer of a run (in bfloat16 with float32 master weights) makes
               a step for every version and copies the published weights into a flat buffer
    delta      is encoded against the buffer of the version before
    receiver   has version 0, and applies every delta; it never sees another buffer

The steps are those of policy gradients: rows of the task, responses in groups of which some are
right and most are answers to other problems, random advantages, the clipped loss with the policy's
own log-probabilities. Without `--model` the model is the warm start of configs/quickstart.yaml;
with it, rows are the sums of examples/real_model. `--save` writes a file of every version.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoTokenizer

from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.learner.batching import PlanRow, RowValue, make_rank_plans
from async_grpo.tasks.chat import prompt_ids, solved_ids
from async_grpo.tasks.registry import load_task, problem_index
from async_grpo.weights import delta
from async_grpo.weights.layout import Layout
from async_grpo.wire import codec
from benchmarks.harness import (
    REAL_MODEL,
    ROOT,
    Part,
    Report,
    aim,
    arguments_of,
    free_port,
    kilobytes,
    machine,
    memory_level,
    quiet,
    rank_environment,
    spread,
)
from benchmarks.vs_trl.workloads import model_of

HEADER = [
    "| model | dtype | lr | versions | MB | elements changed | delta, of all bytes | encode s "
    "| CPU s | apply s | CPU s | peak MB, encode / apply |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
]


class Spent(NamedTuple):
    """Seconds, and CPU seconds."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Step:
    """From one version to the next. changed: share of the elements; nbytes: of the delta."""

    changed: float
    nbytes: int
    encode: Spent
    apply: Spent


@dataclass(frozen=True)
class Found:
    """All versions. peaks: resident memory in MB of the last delta, to encode and to apply."""

    nbytes: int
    steps: list[Step]
    peaks: tuple[float, float]


class Updates:
    """A learner, and the rows of its steps."""

    def __init__(self, config: Config, model: str) -> None:
        from async_grpo.learner.learner import Learner

        self._config, self._task = config, load_task(config.task, config.seed)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._frames: Any = None
        rank_environment(0, 1, free_port())
        self.learner = Learner(
            config,
            model_dir=model,
            fetch=lambda step, group_ids: self._frames,
            device="cpu",
            total_updates=config.run.total_steps or 1,
        )

    def step(self, number: int) -> None:
        """Make a learner step, the `number`th from 1 on."""
        size = self._config.rollout.rollout_batch_size
        groups = self._groups(number, range(number * size, (number + 1) * size))
        self._frames = codec.pack_frames([codec.encode_group(group) for group in groups])
        total = sum(len(row.response_ids) for group in groups for row in group.rows)
        rows = [
            PlanRow(
                group.group_id,
                place,
                len(group.prompts[0]),
                len(row.response_ids),
                1 / total,
                len(row.response_ids),
            )
            for group in groups
            for place, row in enumerate(group.rows)
        ]
        budget = self._config.micro_batch_tokens
        [plan] = make_rank_plans(number, [rows], ranks=1, token_budget=budget, epoch_updates=1)
        rewards = np.random.default_rng(number).normal(size=(size, len(groups[0].rows)))
        advantages = (rewards - rewards.mean(1, keepdims=True)).ravel()
        pairs = zip(rows, advantages, strict=True)
        self.learner.prepare(plan)
        self.learner.train({row.key: RowValue(float(value)) for row, value in pairs}, 0.0)

    def _groups(self, step: int, group_ids: Sequence[int]) -> list[codec.Group]:
        """Return groups as the queue would, sampled from the learner's own policy."""
        answered = [self._answered(group_id) for group_id in group_ids]
        pairs = [(prompt, answer) for prompt, answers in answered for answer in answers]
        behavior = iter(self.learner.logprobs(pairs))
        return [
            codec.Group(
                group_id,
                1,
                step - 1,
                "actor",
                [np.array(prompt, np.int32)],
                [row_of(answer, next(behavior), step - 1) for answer in answers],
            )
            for group_id, (prompt, answers) in zip(group_ids, answered, strict=True)
        ]

    def _answered(self, group_id: int) -> tuple[list[int], list[list[int]]]:
        """Tokens of a problem, of its own answer, and of those of the problems that follow it."""
        task, seed, tokenizer = self._task, self._config.seed, self._tokenizer
        problems = [
            task.train(problem_index(seed, task.fingerprint, group_id + place, len(task)))
            for place in range(self._config.rollout.group_size)
        ]
        ends = [tokenizer.eos_token_id]
        answers = [solved_ids(tokenizer, one.prompt, str(one.reference), ends) for one in problems]
        return prompt_ids(tokenizer, problems[0].prompt), answers


def row_of(answer: list[int], logprobs: np.ndarray, version: int) -> codec.Row:
    """A response of a policy version."""
    return codec.Row(
        response_ids=np.array(answer, np.int32),
        behavior_logprobs=logprobs,
        segments=[(0, len(answer))],
        versions=[codec.VersionSpan(version, 0, len(answer))],
        rewards={"correct": 0.0},
        verdict=0.0,
        finish_reason="stop",
    )


def spent(work: Callable[[], Any]) -> tuple[Any, Spent]:
    """What the work returns, and what it cost."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, Spent(time.perf_counter() - wall, time.process_time() - cpu)


def peak_mb(work: Callable[[], object]) -> float:
    """Resident peak of the work above the level before."""
    level = memory_level()
    work()
    return (kilobytes("/proc/self/status", "VmHWM") - level) / 1024


def measure(updates: Updates, count: int, save: Path | None) -> Found:
    """Make the versions. Raises RuntimeError for a receiver with other bits at the end."""
    published = updates.learner.published
    layout = Layout(published.weight_metadata())
    [itemsize] = {entry.dtype.itemsize for entry in layout.entries}
    elements = sum(entry.nbytes for entry in layout.entries) // itemsize
    word = np.dtype(f"u{itemsize}")
    before, now = (torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2))
    layout.fill(now, published.named_weights())
    received, found = now.numpy().copy(), []
    for number in range(count + 1):
        if number:
            before, now = now, before
            updates.step(number)
            layout.fill(now, published.named_weights())
            found.append(between(before.numpy(), now.numpy(), received, elements, word))
            print(f"version {number}: {found[-1]}", file=sys.stderr, flush=True)
        if save is not None:
            np.save(save / f"{number:04}.npy", now.numpy())
    if not np.array_equal(received, now.numpy()):
        raise RuntimeError(f"after {count} deltas the receiver does not have the learner's bits")
    changed = delta.encode(before.numpy(), now.numpy())
    peaks = (
        peak_mb(lambda: delta.encode(before.numpy(), now.numpy())),
        peak_mb(lambda: delta.apply(changed, before.numpy())),
    )
    return Found(layout.nbytes, found, peaks)


def between(
    before: np.ndarray, now: np.ndarray, received: np.ndarray, elements: int, word: np.dtype
) -> Step:
    """Bring the receiver from one version to the next. word: of an element."""
    changed = int(np.count_nonzero(before.view(word) != now.view(word))) / elements
    encoded, encoding = spent(lambda: delta.encode(before, now))
    _, applying = spent(lambda: delta.apply(encoded, received))
    return Step(changed, encoded.nbytes, encoding, applying)


def config_of(arguments: Namespace) -> Config:
    """The run whose learner makes the versions."""
    settings = [
        f"model.dtype={arguments.dtype}",
        f"learner.lr={arguments.lr}",
        f"run.total_steps={arguments.versions}",
        "cluster.device=cpu",
    ]
    if arguments.model is None:
        return load_config(str(ROOT / "configs" / "quickstart.yaml"), settings)
    subprocess.run([sys.executable, f"{REAL_MODEL}/make_rows.py"], cwd=ROOT, check=True)
    size = arguments.groups
    settings += [f"rollout.rollout_batch_size={size}", f"rollout.group_size={size}"]
    settings += [f"model.path={arguments.model}"]
    return load_config(str(ROOT / REAL_MODEL / "smollm2_sums.yaml"), settings)


def part(arguments: Namespace, found: Found) -> Part:
    """Table, aim and values."""
    steps, nbytes = found.steps, found.nbytes
    name = arguments.model.name if arguments.model else "quickstart"

    def column(of: Callable[[Step], float], digits: str = ".3f") -> str:
        return spread([of(step) for step in steps], digits)

    line = (
        f"| {name} | {arguments.dtype} | {arguments.lr:g} | {len(steps)} | {nbytes / 2**20:,.1f} "
        f"| {column(lambda one: one.changed, '.2%')} "
        f"| {column(lambda one: one.nbytes / nbytes, '.2%')} "
        f"| {column(lambda one: one.encode.wall)} | {column(lambda one: one.encode.cpu)} "
        f"| {column(lambda one: one.apply.wall)} | {column(lambda one: one.apply.cpu)} "
        f"| {found.peaks[0]:,.0f} / {found.peaks[1]:,.0f} |"
    )
    reached = aim(f"the learner's bits after {len(steps)} deltas, {name}", "equal", met=True)
    return [*HEADER, line], [reached], asdict(found)


def main(argv: list[str] | None = None) -> None:
    parser = arguments_of("weight_sync.versions", "What changes from version to version.")
    parser.add_argument("--model", type=Path, help="directory of a model with a chat template")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--versions", type=int, default=20)
    parser.add_argument("--groups", type=int, default=4, help="of a step, and responses of each")
    parser.add_argument("--save", type=Path, help="where a file of every version goes")
    arguments = parser.parse_args(argv)
    if arguments.save is not None:
        arguments.save.mkdir(parents=True, exist_ok=True)
    report = Report("weight_sync.versions", machine("torch", "deepspeed", "numpy"))
    config = config_of(arguments)
    updates = Updates(config, model_of(config))
    try:
        found = measure(updates, arguments.versions, arguments.save)
    finally:
        updates.learner.close()
    report.keep("versions", part(arguments, found))
    report.end(arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    quiet()
    main()
