"""Groups, plans and a slow reference for the learner's tests: rows one at a time through plain
Hugging Face attention, losses from formulas.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from async_grpo.algo.distill import REST
from async_grpo.config.schema import Config
from async_grpo.learner.backend.base import Backend
from async_grpo.learner.backend.deepspeed.backend import DeepspeedBackend
from async_grpo.learner.batching import PlanRow, RankPlan, RowKey, RowValue
from async_grpo.learner.learner import Learner
from async_grpo.learner.model import PolicyModel, load_model, model_class
from async_grpo.wire import codec
from tests.support import forkserver
from tests.support.machine_speed import slowness
from tests.support.processes import free_port

STEP = 3
LR, CLIP_NORM = 3e-3, 0.7
KL_COEF, ENTROPY_COEF, TEMPERATURE = 0.3, 0.05, 0.8
TEACHER_COEF, REWARD_COEF = 0.4, 0.7
# All parameters of the test model are below the default threshold, under which ZeRO-3 keeps whole
# copies.
SHARD_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


@dataclass
class Case:
    """A batch of groups, the planned rows of each optimizer update and their values, and their
    frames.
    """

    groups: dict[int, codec.Group]
    updates: list[list[PlanRow]]
    values: dict[RowKey, RowValue]

    def fetch(self, step: int, group_ids: Sequence[int]) -> np.ndarray:
        assert step == STEP
        return codec.pack_frames(
            [codec.encode_group(self.groups[group_id]) for group_id in group_ids]
        )

    def plan(self, splits: list[list[list[int]]]) -> RankPlan:
        """A rank's plan: per update its micro-batches as positions in the update's rows."""
        updates = tuple(
            tuple(tuple(rows[k] for k in part) for part in split)
            for rows, split in zip(self.updates, splits, strict=True)
        )
        ids = tuple(sorted({row.group_id for update in updates for part in update for row in part}))
        return RankPlan(STEP, ids, updates, epoch_updates=min(2, len(updates)))


def make_case(
    directory: str,
    *,
    n_groups: int = 3,
    rows: int = 4,
    n_updates: int = 1,
    vocab: int = 100,
    seed: int = 0,
) -> Case:
    """Random groups, sampled by a policy near the model in `directory`: mixed lengths and lags,
    rows of several turns, a row outside the loss.

    One update has all rows; more alternate between the two halves, so four updates are two epochs
    of two minibatches.
    """
    model = plain_model(directory)
    rng = np.random.default_rng(seed)
    groups = {}
    for group_id in range(10, 10 + n_groups):
        responses = []
        prompt = rng.integers(3, vocab, int(rng.integers(1, 9))).astype(np.int32)
        for index in range(rows):
            turns = [
                (int(rng.integers(0, 4)) if turn or index == 3 else 0, int(rng.integers(1, 9)))
                for turn in range(1 if index % 2 == 0 else 3)
            ]
            length, sampled = sum(map(sum, turns)), sum(count for _, count in turns)
            cut = int(rng.integers(0, sampled))
            spans = [codec.VersionSpan(STEP - 2, 0, cut)] if cut else []
            response = rng.integers(3, vocab, length).astype(np.int32)
            with torch.no_grad():
                logprobs = picked(row_distribution(model, prompt, response), response).numpy()
            places = np.flatnonzero(np.repeat([0, 1] * len(turns), np.ravel(turns)))
            noisy = logprobs[places] + rng.normal(0, 0.1, sampled)
            responses.append(
                codec.Row(
                    response_ids=response,
                    behavior_logprobs=np.minimum(noisy, 0).astype(np.float32),
                    segments=turns,
                    versions=[*spans, codec.VersionSpan(STEP - 1, cut, sampled)],
                    rewards={"score": 1.0},
                    verdict=1.0,
                    finish_reason="stop",
                )
            )
        groups[group_id] = codec.Group(group_id, 0, STEP - 2, "actor", [prompt], responses)
    planned, values = [], {}
    for group_id, group in groups.items():
        for index, row in enumerate(group.rows):
            values[group_id, index] = RowValue(float(rng.normal()))
            weight = 0.0 if index == 2 else float(rng.uniform(0.01, 0.05))
            planned.append(
                PlanRow(
                    group_id,
                    index,
                    len(group.prompts[0]),
                    len(row.response_ids),
                    weight,
                    len(row.behavior_logprobs),
                )
            )
    half = planned[: len(planned) // 2], planned[len(planned) // 2 :]
    return Case(
        groups, [planned] if n_updates == 1 else [half[k % 2] for k in range(n_updates)], values
    )


def split(rows: Sequence[int], parts: int) -> list[list[int]]:
    """Uneven micro-batches of the positions; some are empty if there are more parts than rows."""
    return [list(rows[part::parts]) for part in range(parts)]


def make_config(**changes: dict[str, Any]) -> Config:
    """A configuration that uses every term of the loss; `changes` by section."""
    values: dict[str, Any] = {
        "model": {"path": "unused"},
        "run": {"total_steps": 10},
        "rollout": {
            "prompt_length": 16,
            "response_length": 32,
            "temperature": TEMPERATURE,
            "rollout_batch_size": 4,
        },
        "replay": {"max_staleness": 1},
        "algorithm": {
            "anchor": "recomputed",
            "importance": {"level": "sequence", "upper": 2.0},
            "use_kl_loss": True,
            "kl_loss_coef": KL_COEF,
            "entropy_coef": ENTROPY_COEF,
            "clip_ratio": 0.2,
            "clip_schedule": "harmonic",
        },
        "learner": {
            "lr": LR,
            "grad_clip": CLIP_NORM,
            "weight_decay": 0.1,
            "zero_stage": 1,
            "tokens_per_micro_batch": 48,
        },
    }
    for section, change in changes.items():
        values[section] = {**values.get(section, {}), **change}
    return Config.model_validate(values)


def plain_model(directory: str, *, attention: str = "sdpa") -> torch.nn.Module:
    return (
        model_class(AutoConfig.from_pretrained(directory))
        .from_pretrained(directory, dtype=torch.float32, attn_implementation=attention)
        .train()
    )


def loaded(
    directory: str,
    *,
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    float32_head: bool = False,
) -> PolicyModel:
    """The product's model, as the learner loads it."""
    return load_model(
        directory,
        dtype=dtype,
        gradient_checkpointing=gradient_checkpointing,
        trust_remote_code=False,
        float32_head=float32_head,
    )


def row_distribution(
    model: torch.nn.Module, prompt: np.ndarray, response: np.ndarray
) -> torch.Tensor:
    """Log-softmax at the temperature, [L, V], of one row alone."""
    tokens = torch.tensor(np.concatenate([prompt, response])).long()[None]
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float() / TEMPERATURE, -1)


def picked(distribution: torch.Tensor, response: np.ndarray) -> torch.Tensor:
    return distribution.gather(-1, torch.tensor(response).long()[:, None])[:, 0]


def reference_losses(
    model: torch.nn.Module, frozen: torch.nn.Module, case: Case
) -> list[dict[str, float]]:
    """Train `model` on all updates of the case, token by token; returns loss and gradient norm
    before clipping of each update.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    rows = {(row.group_id, row.row): row for update in case.updates for row in update}
    with torch.no_grad():
        anchors = {
            key: picked(row_distribution(model, *_tokens(case, row)), _tokens(case, row)[1])
            for key, row in rows.items()
        }
        refs = {
            key: picked(row_distribution(frozen, *_tokens(case, row)), _tokens(case, row)[1])
            for key, row in rows.items()
        }
    history = []
    for update in case.updates:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for row in update:
            if row.weight:
                loss = loss + _row_loss(
                    model, case, row, anchors[row.group_id, row.row], refs[row.group_id, row.row]
                )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        history.append({"train/loss": loss.item(), "train/grad_norm": norm.item()})
    return history


def _tokens(case: Case, row: PlanRow) -> tuple[np.ndarray, np.ndarray]:
    group = case.groups[row.group_id]
    return group.prompts[0], group.rows[row.row].response_ids


def _row_loss(
    model: torch.nn.Module, case: Case, row: PlanRow, anchor: torch.Tensor, ref: torch.Tensor
) -> torch.Tensor:
    prompt, response = _tokens(case, row)
    if row.given:
        distribution = row_distribution(model, prompt, response)
        return -row.weight * picked(distribution, response).sum()
    group = case.groups[row.group_id]
    one, reward = group.rows[row.row], case.values[row.key].value
    before = sum(len(other.behavior_logprobs) for other in group.rows[: row.row])
    teacher, named = (group.planes.get(f"teacher_{what}") for what in ("logprobs", "ids"))
    distribution = row_distribution(model, prompt, response)
    current = picked(distribution, response)
    places, at = [], 0
    for context, sampled in one.segments:
        places += range(at + context, at + context + sampled)
        at += context + sampled
    behavior = dict(zip(places, one.behavior_logprobs.tolist(), strict=True))
    off = sum(float(anchor[t]) - behavior[t] for t in places)
    importance = min(math.exp(max(-20.0, min(20.0, off))), 2.0)
    total = torch.zeros(())
    for number, t in enumerate(places):
        version = next(
            span.policy_version for span in one.versions if span.start <= number < span.end
        )
        width = 0.2 / (1 + (STEP - 1 - version))
        ratio, advantage = torch.exp(current[t] - anchor[t]), reward
        if teacher is not None:
            said = float(teacher[before + number, 0])
            advantage = REWARD_COEF * reward
            if named is None:
                advantage += TEACHER_COEF * (said - current[t].item())
        clipped = torch.clamp(ratio, 1 - width, 1 + width)
        policy = -importance * torch.minimum(ratio * advantage, clipped * advantage)
        kl = torch.exp(ref[t] - current[t]) - 1 - (ref[t] - current[t])
        entropy = -(distribution[t].exp() * distribution[t]).sum()
        total = total + row.weight * (policy + KL_COEF * kl - ENTROPY_COEF * entropy)
        if teacher is not None and named is not None:
            q_others, p_others = 1 + REST, torch.ones(()) + REST
            for id_, q in zip(named[before + number], teacher[before + number, 1:], strict=True):
                logp = distribution[t, int(id_)]
                q_others, p_others = q_others - math.exp(q), p_others - logp.exp()
                total = total + row.weight * TEACHER_COEF * math.exp(q) * (float(q) - logp)
            others = q_others * (math.log(q_others) - p_others.log())
            total = total + row.weight * TEACHER_COEF * others
    return total


def set_rank(rank: int, world_size: int, port: int) -> None:
    """What the caller of a learner sets before it is built."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def run_ranks(main: Callable[..., None], *arguments: Any, seconds: float, ranks: int = 2) -> None:
    """`main(rank, *arguments)` in as many processes; the first failure is raised here."""
    forkserver.context()
    context = torch.multiprocessing.start_processes(
        forkserver.InThisEnvironment(main),
        arguments,
        nprocs=ranks,
        join=False,
        start_method="forkserver",
    )
    deadline = time.monotonic() + seconds * slowness()
    try:
        while not context.join(timeout=1.0, grace_period=2.0):
            assert time.monotonic() < deadline, f"the ranks did not finish within {seconds:g} s"
    finally:
        for process in context.processes:
            process.kill()


def write_neighbour(source: str, path: str) -> str:
    """The model in `source`, slightly changed: a reference policy whose KL is small but not
    zero.
    """
    model = plain_model(source)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


@contextmanager
def open_learner(
    config: Config,
    models: dict[str, str],
    case: Case,
    *,
    name: str = "plain",
    rank: int = 0,
    world: int = 1,
    port: int = 0,
    backend: Callable[..., Backend] = DeepspeedBackend,
) -> Iterator[Learner]:
    set_rank(rank, world, port or free_port())
    try:
        learner = Learner(
            config,
            model_dir=models[name],
            fetch=case.fetch,
            device="cpu",
            total_updates=10,
            backend=backend,
        )
    except BaseException:
        leave_group()  # what failed has no `close`
        raise
    try:
        yield learner
    finally:
        learner.close()


def leave_group() -> None:
    """Leave the process group that a failed learner joined, for torch and DeepSpeed."""
    import deepspeed

    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def copy_weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.published.named_weights()}


def assert_close(weights: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """AdamW divides by the size of a gradient entry, so entries near 0 magnify rounding: compare
    each tensor as a whole, then entries.
    """
    assert weights.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert (weights[key] - tensor).norm() <= 1e-4 * tensor.norm() + 1e-4, key
        torch.testing.assert_close(weights[key], tensor, rtol=0, atol=1e-3)


def bitwise(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one | other)


def train(learner: Learner, case: Case, splits: list[list[list[int]]]) -> list[dict[str, float]]:
    """One learner step; returns loss and gradient norm of each update, taken as differences of the
    sums.
    """
    assert learner.prepare(case.plan(splits)) == {}, "no KL in the reward"
    history, seen = [], {"train/loss": 0.0, "train/grad_norm": 0.0}
    with after_each_update(learner) as sums_of:
        learner.train(case.values, 0.0)
    for sums in sums_of:
        history.append({key: sums[key] - seen[key] for key in seen})
        seen = {key: sums[key] for key in seen}
    return history


@contextmanager
def after_each_update(learner: Learner) -> Iterator[list[dict[str, float]]]:
    """Collects the sums of the metrics after each update inside the block."""
    found: list[dict[str, float]] = []
    update = learner._update

    def noted(*arguments: Any) -> None:
        update(*arguments)
        sums = learner._metrics.to_wire()["sums"]
        found.append({name: values[0] for name, values in sums.items()})

    with mock.patch.object(learner, "_update", noted):
        yield found


def assert_history(history: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert len(history) == len(wanted)
    for got, want in zip(history, wanted, strict=True):
        assert got == pytest.approx(want, rel=1e-4, abs=1e-5)
