"""The DeepSpeed learner beside a bare PyTorch loop, in one process, on the same packed batches.

Runs in: a process of its own per model and ZeRO stage, which `benchmarks.learner` starts. Both
sides have the same initial weights, rows and micro-batches, one thread, and take turns, so that
they meet the same machine. The bare loop is what one would write by hand: the Hugging Face model on
the packed tokens with the same attention, its own head on the tokens that count, a clipped loss,
clipped gradients, AdamW. Its batches are packed before the clock runs; the learner unpacks frames,
packs, and computes its metrics while it does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from async_grpo.config.schema import Config
from async_grpo.learner.attention import of_rows
from async_grpo.learner.batching import PlanRow, RankPlan, RowValue, make_rank_plans
from async_grpo.learner.packing import PackedRow
from async_grpo.wire import codec
from benchmarks.harness import free_port, kilobytes, memory_level, rank_environment
from benchmarks.tails import PROMPT_TOKENS

LR, CLIP_NORM, BETAS = 1e-6, 1.0, (0.9, 0.95)
TIMEOUT_S = 900.0
STEP = 1


@dataclass(frozen=True)
class Work:
    """What an update trains: groups of responses with geometric lengths; budget: tokens per
    micro-batch.
    """

    groups: int = 8
    group_size: int = 8
    mean: float = 70.0
    longest: int = 256
    budget: int = 2_048
    vocabulary: int = 3_000


@dataclass(frozen=True)
class Turn:
    """One step of each side: seconds, and CPU seconds."""

    ours: float
    bare: float
    ours_cpu: float
    bare_cpu: float


@dataclass(frozen=True)
class ArmResult:
    """One model and stage (None: the bare loop beside itself, which shows what the method cannot
    see).

    tokens: of prompts and responses per step. padding: share of the positions of linear layers and
    head that hold no token; attention_padding: of attention's. peaks: MB above the level before
    each side was built, of its first steps. apart: largest difference between the log-probs of
    packed rows and of the same rows alone.
    """

    stage: int | None
    parameters: int
    tokens: int
    micro_batches: int
    turns: list[Turn]
    padding: float
    attention_padding: float
    peak_mb: float
    bare_peak_mb: float
    apart: float

    @property
    def ratios(self) -> list[float]:
        """Our tokens/s over the bare loop's, turn by turn."""
        return [turn.bare / turn.ours for turn in self.turns]

    @property
    def cpu_ratios(self) -> list[float]:
        """The same in CPU time, which other processes disturb less."""
        return [turn.bare_cpu / turn.ours_cpu for turn in self.turns]


class Batch:
    """The groups of one update, as a learner gets them and as plain arrays."""

    def __init__(self, work: Work, *, seed: int = 0) -> None:
        draw, lengths = np.random.default_rng(seed), random.Random(seed)
        self.groups: dict[int, codec.Group] = {}
        for group_id in range(work.groups):
            rows = []
            for _ in range(work.group_size):
                length = min(work.longest, 1 + int(lengths.expovariate(1 / (work.mean - 1))))
                rows.append(
                    codec.Row(
                        response_ids=draw.integers(3, work.vocabulary, length).astype(np.int32),
                        behavior_logprobs=np.full(length, -np.log(work.vocabulary), np.float32),
                        segments=[(0, length)],
                        versions=[codec.VersionSpan(STEP - 1, 0, length)],
                        rewards={"correct": 1.0},
                        verdict=1.0,
                        finish_reason="stop",
                    )
                )
            prompt = draw.integers(3, work.vocabulary, lengths.randint(*PROMPT_TOKENS)).astype(
                np.int32
            )
            self.groups[group_id] = codec.Group(group_id, 1, STEP - 1, "actor", [prompt], rows)
        total = sum(len(row.response_ids) for group in self.groups.values() for row in group.rows)
        rows = [
            PlanRow(
                group_id,
                index,
                len(group.prompts[0]),
                len(row.response_ids),
                1 / total,
                len(row.response_ids),
            )
            for group_id, group in self.groups.items()
            for index, row in enumerate(group.rows)
        ]
        [self.plan] = make_rank_plans(
            STEP, [rows], ranks=1, token_budget=work.budget, epoch_updates=1
        )
        self.values = {row.key: RowValue(float(draw.normal())) for row in rows}
        self.frames = codec.pack_frames(
            [codec.encode_group(group) for group in self.groups.values()]
        )
        self.tokens = sum(row.prompt_length + row.length for row in rows)

    def fetch(self, step: int, group_ids: object) -> codec.Buffer:
        """What the queue would answer."""
        return self.frames

    def tokens_of(self, row: PlanRow) -> PackedRow:
        """Prompt, response, and places of the sampled tokens in it."""
        group = self.groups[row.group_id]
        one = group.rows[row.row]
        return group.prompts[one.prompt], one.response_ids, one.sampled


class Bare:
    """The loop that one would write by hand."""

    def __init__(self, model: str, batch: Batch) -> None:
        from transformers import AutoModelForCausalLM

        from async_grpo.learner.attention import ATTENTION
        from async_grpo.learner.packing import pack

        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation=ATTENTION
        ).train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True
        )
        self._batches = []
        for planned in batch.plan.updates[0]:
            packed = pack([batch.tokens_of(row) for row in planned], torch.device("cpu"))
            ordered = [planned[position] for position in packed.order]
            behavior = np.concatenate(
                [batch.groups[row.group_id].rows[row.row].behavior_logprobs for row in ordered]
            )
            spread = [
                np.full((2, row.length), [[batch.values[row.key].value], [row.weight]], np.float32)
                for row in ordered
            ]
            advantages, weights = torch.from_numpy(np.concatenate(spread, axis=1))
            self._batches.append((packed, torch.from_numpy(behavior), advantages, weights))

    def step(self) -> None:
        """One optimizer update."""
        for packed, behavior, advantages, weights in self._batches:
            with of_rows(packed.layout):
                logits = self._model(
                    input_ids=packed.input_ids,
                    position_ids=packed.position_ids,
                    use_cache=False,
                    logits_to_keep=packed.predictors,
                ).logits[0]
            logprobs = torch.log_softmax(logits, -1).gather(-1, packed.targets[:, None])[:, 0]
            ratio = torch.exp(logprobs - behavior)
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            (loss * weights).sum().backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()


class Ours:
    """The learner, as a learner rank drives it."""

    def __init__(
        self, model: str, batch: Batch, work: Work, stage: int, settings: dict[str, Any]
    ) -> None:
        """settings: more of the section `learner`."""
        from async_grpo.learner.learner import Learner

        self._batch = batch
        config = Config.model_validate(
            {
                "model": {"path": model, "dtype": "float32"},
                "run": {"total_steps": 1},
                "rollout": {
                    "prompt_length": PROMPT_TOKENS[1],
                    "response_length": work.longest,
                    "rollout_batch_size": work.groups,
                    "group_size": work.group_size,
                },
                "learner": {
                    "zero_stage": stage,
                    "lr": LR,
                    "grad_clip": CLIP_NORM,
                    "weight_decay": 0.0,
                    "betas": list(BETAS),
                    "tokens_per_micro_batch": work.budget,
                    **settings,
                },
            }
        )
        self.learner = Learner(
            config, model_dir=model, fetch=batch.fetch, device="cpu", total_updates=10**6
        )

    def step(self) -> None:
        """One learner step with one optimizer update."""
        self.learner.prepare(self._batch.plan)
        self.learner.train(self._batch.values, 0.0)


def run_arm(
    model: str, work: Work, stage: int | None, turns: int, settings: dict[str, Any]
) -> ArmResult:
    """Measure one arm, in a process of its own."""
    rank_environment(0, 1, free_port())
    batch = Batch(work)
    import deepspeed  # noqa: F401 - before the level of memory is taken, as in a learner rank

    ours, peak_mb = _built(
        lambda: Bare(model, batch) if stage is None else Ours(model, batch, work, stage, settings)
    )
    bare, bare_peak_mb = _built(lambda: Bare(model, batch))
    found = []
    for number in range(turns):
        sides = {"ours": ours, "bare": bare}
        measured = {
            name: _timed(sides[name].step)
            for name in (("ours", "bare") if number % 2 else ("bare", "ours"))
        }
        found.append(
            Turn(measured["ours"][0], measured["bare"][0], measured["ours"][1], measured["bare"][1])
        )
    padding, attention_padding = padding_of(batch.plan, batch)
    parameters = sum(parameter.numel() for parameter in bare._model.parameters())
    apart = 0.0
    if isinstance(ours, Ours):
        apart = _apart(ours, batch)
        ours.learner.close()
    return ArmResult(
        stage,
        parameters,
        batch.tokens,
        len(batch.plan.updates[0]),
        found,
        padding,
        attention_padding,
        peak_mb,
        bare_peak_mb,
        apart,
    )


def _built(build: Callable[[], Bare | Ours]) -> tuple[Bare | Ours, float]:
    """One side after its first two steps, and the resident peak meanwhile above the level before,
    in MB.
    """
    level = memory_level()
    side = build()
    side.step()
    side.step()
    return side, (kilobytes("/proc/self/status", "VmHWM") - level) / 1024


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def padding_of(plan: RankPlan, batch: Batch) -> tuple[float, float]:
    """Shares of positions without a token: in the linear layers, which see the packed tokens, and
    in attention, which sees buckets of rows.
    """
    from async_grpo.learner.packing import pack

    needed = computed = tokens = positions = 0
    for planned in plan.updates[0]:
        packed = pack([batch.tokens_of(row) for row in planned], torch.device("cpu"))
        prompts = {row.group_id: row.prompt_length for row in planned}
        needed += sum(prompts.values()) + sum(row.length - 1 for row in planned)
        computed += packed.input_ids.numel()
        tokens += sum(row.prompt_length + row.length - 1 for row in planned)
        positions += packed.layout.positions
    return 1 - needed / computed, 1 - tokens / positions


def _apart(ours: Ours, batch: Batch) -> float:
    """Log-probs of all rows, packed as the learner packs them, against each row alone."""
    rows = [batch.tokens_of(row) for row in batch.plan.rows.values()]
    pairs = [(prompt.tolist(), response.tolist()) for prompt, response, _ in rows]
    packed = ours.learner.logprobs(pairs)
    alone: list[np.ndarray] = [ours.learner.logprobs([pair])[0] for pair in pairs]
    return max(float(np.abs(one - other).max()) for one, other in zip(packed, alone, strict=True))
