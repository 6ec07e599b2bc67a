"""Which deadlines of a configuration are too short for its model, by arithmetic, on GPUs.

Runs in: the driver. The rates are those of slow parts that people do have, so a deadline that
passes is long enough, and one that does not may still be.
"""

from __future__ import annotations

from collections.abc import Iterator

from async_grpo.config.schema import Config
from async_grpo.run.preflight.memory import Shape, element_bytes, size_text
from async_grpo.weights.transport import sending_ranks

STAGE_BYTES_S, SEND_BYTES_S = 1e9, 1e9
"""Bytes a second: weights into pinned memory that is allocated meanwhile; a network of 10 Gbit."""
LEARNER_FLOPS_S = 100e12
"""Operations a second of a learner rank in bfloat16: a third of an A100's, a tenth of an H100's."""
TOKEN_S = 0.03
"""Seconds for one token of a response in a full engine of a large model."""
FORWARD, BACKWARD = 2, 4
"""Operations per parameter and token."""


def step_seconds(config: Config, shape: Shape) -> tuple[float, float]:
    """Estimate the longest a learner step takes: for its groups, and for the learner, if all
    responses have full length.
    """
    rollout, algorithm = config.rollout, config.algorithm
    tokens = rollout.rollout_batch_size * rollout.group_size
    tokens *= rollout.longest_row
    again = FORWARD if config.learner.recomputes else 0
    passes = (FORWARD + BACKWARD + again) * config.learner.ppo_epochs
    first = algorithm.anchor == "recomputed" or config.records_routes
    passes += FORWARD * (algorithm.uses_reference + first)
    trained = passes * shape.parameters * tokens / config.learner.ranks / LEARNER_FLOPS_S
    return TOKEN_S * rollout.response_length, trained


def too_short(config: Config, shape: Shape) -> Iterator[str]:
    """Compare deadlines with estimates: a sentence for each that may not do."""
    deadlines, nbytes = (
        config.weight_sync.deadlines,
        shape.parameters * element_bytes(config, "cuda"),
    )
    weights = f"{size_text(nbytes)} of weights may take"
    senders = sending_ranks(config.weight_sync, ranks=config.learner.ranks, nbytes=nbytes)
    stage, send = nbytes / senders / STAGE_BYTES_S, nbytes / SEND_BYTES_S
    if stage > deadlines.stage_s:
        yield (
            f"`weight_sync.deadlines.stage_s` is {deadlines.stage_s:g}, and copying {weights} "
            f"{stage:,.0f} s on a slow machine: raise it"
        )
    if send > deadlines.acknowledge_s:
        yield (
            f"`weight_sync.deadlines.acknowledge_s` is {deadlines.acknowledge_s:g}, and sending "
            f"{weights} {send:,.0f} s over 10 Gbit/s: raise it"
        )
    limit, (sampled, trained) = config.watchdog.step_timeout_s, step_seconds(config, shape)
    if sampled + trained > limit:
        yield (
            f"`watchdog.step_timeout_s` is {limit:g}, and a step of responses of full length may "
            f"take {sampled:,.0f} s in the engines and {trained:,.0f} s in "
            f"{config.learner.ranks} learner rank{'s' * (config.learner.ranks > 1)}: raise it"
        )
    longest = config.rollout.longest_group_s
    if TOKEN_S * config.rollout.response_length > longest:
        yield (
            f"`rollout.group_timeout_s` is {longest:g}, and a response of "
            f"{config.rollout.response_length:,} tokens may take {sampled:,.0f} s: raise it, or "
            "leave it out"
        )
