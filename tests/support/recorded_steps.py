"""Learner steps on recorded groups, as the loop makes them, without Ray and engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from async_grpo.algo.metrics import MetricSums
from async_grpo.config.schema import Config
from async_grpo.learner.learner import Learner
from async_grpo.run.planning import RowMath
from async_grpo.wire import codec
from async_grpo.wire.kept import KeptSets
from tests.support.learners import picked, plain_model, row_distribution, set_rank
from tests.support.processes import free_port

WEIGHTS = {"correct": 1.0, "format": 0.2}
"""Reward components of the recorded rows, and their weights."""


def record(config: Config, directory: str, step: int) -> list[bytes]:
    """The frames of one learner step: responses that the model in `directory` may have sampled,
    with its own log-probs, nearly.
    """
    policy, rng = plain_model(directory), np.random.default_rng(step)
    oldest = step - 1 - min(config.replay.max_staleness, step - 1)
    frames = []
    for group_id in range(10 * step, 10 * step + config.rollout.rollout_batch_size):
        prompt = rng.integers(3, 100, int(rng.integers(2, 8))).astype(np.int32)
        roles = ["train"] * config.rollout.group_size + ["baseline"] * (
            config.algorithm.adv_estimator.name == "remax"
        )
        rows = []
        for index, role in enumerate(roles):
            length = int(rng.integers(2, config.rollout.response_length + 1))
            response = rng.integers(3, 100, length).astype(np.int32)
            with torch.no_grad():
                logprobs = picked(
                    row_distribution(policy, prompt, response), response
                ).numpy() + rng.normal(0, 0.05, length)
            spans = [codec.VersionSpan(oldest, 0, 1), codec.VersionSpan(step - 1, 1, length)]
            right = float(index % 2 == group_id % 2)
            rows.append(
                codec.Row(
                    response_ids=response,
                    behavior_logprobs=np.minimum(logprobs, 0).astype(np.float32),
                    segments=[(0, length)],
                    versions=spans if oldest < step - 1 else [codec.VersionSpan(oldest, 0, length)],
                    rewards={"correct": right, "format": rng.random()},
                    verdict=right,
                    finish_reason="length" if length == config.rollout.response_length else "stop",
                    role=role,
                )
            )
        times = {"queued": 0.0, "first_token": 0.5, "done": 1.0, "scored": 1.5}
        group = codec.Group(group_id, 1, oldest, "actor", [prompt], rows, times)
        if config.algorithm.distill.teacher is not None:
            tokens = sum(len(row.behavior_logprobs) for row in rows)
            top_k = config.algorithm.distill.teacher_top_k
            said = np.log(rng.dirichlet(np.ones(top_k + 2), tokens)[:, : 1 + top_k])
            group.planes["teacher_logprobs"] = said.astype(np.float32)
            if top_k:
                ids = np.tile(np.arange(top_k, dtype=np.int32), (tokens, 1))
                group.planes["teacher_ids"] = ids
        if config.rollout.most_kept:
            tokens = [(row.role, token) for row in rows for token in row.response_ids.tolist()]
            sets = [[*{token, *range(3, 9)}] if role == "train" else [] for role, token in tokens]
            group.planes |= KeptSets.of(sets).planes
        frames.append(codec.encode_group(group))
    return frames


@contextmanager
def two_steps(config: Config, directory: str) -> Iterator[tuple[Learner, list[dict[str, float]]]]:
    """A learner of the model in `directory` that has made two steps, and the metrics of each: all
    finite, with a gradient, and weights that moved.
    """
    set_rank(0, 1, free_port())
    learner = Learner(
        config,
        model_dir=directory,
        fetch=lambda *_: codec.pack_frames([]),
        device="cpu",
        total_updates=2 * config.updates_per_step,
    )
    try:
        before = {key: tensor.clone() for key, tensor in learner.published.named_weights()}
        rows, found = RowMath(config, WEIGHTS), []
        for step in (1, 2):
            metrics = train_step(learner, rows, record(config, directory, step), step)
            assert all(np.isfinite(value) for value in metrics.values()), metrics
            assert metrics["train/grad_norm"] > 0
            found.append(metrics)
        assert learner.updates == 2 * config.updates_per_step
        moved = [
            float((new - before[key]).abs().max()) for key, new in learner.published.named_weights()
        ]
        assert max(moved) > 1e-5
        yield learner, found
    finally:
        learner.close()


def train_step(
    learner: Learner, rows: RowMath, frames: Sequence[bytes], step: int
) -> dict[str, float]:
    """One learner step as the loop makes it; its metrics."""
    metas = [codec.decode_meta(frame) for frame in frames]
    batch = codec.Batch(step, tuple(metas))
    by_id = {meta.group_id: frame for meta, frame in zip(metas, frames, strict=True)}
    learner._fetch = lambda _, group_ids: codec.pack_frames(
        [by_id[group_id] for group_id in group_ids]
    )
    [plan], kl_coef = rows.plans(batch), rows.kl_coef
    values, metrics = rows.values(batch, learner.prepare(plan))
    return metrics | MetricSums.from_wire(learner.train(values, kl_coef)).means()
