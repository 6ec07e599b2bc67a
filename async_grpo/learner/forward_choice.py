"""Which forward pass is right for a model: found by trying, not by a list of names.

Runs in: learner ranks, and whoever looks at a model before a run. A few short rows go through the
passes of `model`, the cheapest first, until one equals the model's own forward pass, which takes
the rows one at a time with transformers' plain attention:

    configuration -> small copy (`copies`) -> alone == packed ? -> packed
                                              alone == rows ?   -> rows
                                              else              -> NoForwardPass, which names both

On the copy all is float32, so that right and wrong are far apart: rounding moves log-probs by less
than 1e-5, the smallest error that was seen by 5e-3. `confirm` repeats it with the loaded weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from async_grpo.errors import SetupError
from async_grpo.learner import copies
from async_grpo.learner.attention import ATTENTION, heads_of, needs_logits
from async_grpo.learner.model import (
    ForwardPass,
    NoLanguageModel,
    PolicyModel,
    model_class,
    without_dropout,
)
from async_grpo.learner.packing import PackedRow, pack, response_row
from async_grpo.learner.team import IndivisibleError, check_heads
from async_grpo.runtime.text import raised

PASSES = (
    ForwardPass("packed", ATTENTION, "plain"),
    ForwardPass("packed", ATTENTION, "own"),
    ForwardPass("rows", "sdpa", "plain"),
    ForwardPass("rows", "sdpa", "own"),
    ForwardPass("rows", "eager", "plain"),
    ForwardPass("rows", "eager", "own"),
)
"""Passes to try, the cheapest first."""
ALONE = tuple(ForwardPass("alone", attention, "own") for attention in ("eager", "sdpa"))
BOUND = 1e-4
"""Largest difference of log-probs of a copy, in nats."""
LOADED_BOUND, HALF_BOUND = 1e-3, 0.2
"""Largest mean difference of log-probs of a loaded model, in float32 and in half precision: layers
and large logits add rounding, which is why copies are tried.
"""
RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What transformers raises for configurations that make no model, for packages that it lacks, and
for arguments and attention that a model does not know.
"""
_WAYS = {"packed": "packed", "rows": "padded"}
_LENGTHS = (5, (6, 3)), (7, (4,)), (2, (2, 6)), (8, (6, 6, 5)), (30, (9,))
"""Prompts, and the responses to each: longer than windows and chunks of copies, in several buckets.
"""


class NoForwardPass(SetupError, ValueError):
    """No forward pass of ours gives the log-probs of the model's own."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The cheapest pass that is right. alone: what it was compared with; needs_logits: whether its
    attention is computed by none of the kernels; unchecked: why no copy could be tried, or "".
    """

    forward_pass: ForwardPass
    alone: ForwardPass = ALONE[0]
    needs_logits: bool = False
    unchecked: str = ""


def choose(directory: str | PretrainedConfig, *, trust_remote_code: bool) -> Choice:
    """Choose the pass for a model by its configuration alone. Raises NoForwardPass, or
    NoLanguageModel.
    """
    config = (
        AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        if isinstance(directory, str)
        else directory
    )
    auto = model_class(config)
    named = {"trust_remote_code": trust_remote_code}
    failed: Exception | None = None
    why = ""
    for small in copies.candidates(config):
        for alone in ALONE:
            try:
                policy = _copy(small, auto, named, alone).eval()
                expected = _logprobs(policy, [[row] for row in rows(small)])
            except NoLanguageModel:
                raise
            except RAISED as error:
                failed, why = error, raised(error, most=120)
                continue
            if np.isfinite(expected).all():
                make = partial(_copy, small, auto, named)
                right = _first_right(expected, rows(small), config.model_type, make)
                return replace(right, alone=alone)
            why = "its log-probs are no numbers"
    if not isinstance(failed, copies.TooLarge):  # of the whole model, which came last
        raise NoForwardPass(
            f"{config.model_type} cannot be trained: its own forward pass fails ({why}). Train "
            "another model"
        )
    return Choice(PASSES[0], unchecked=why)


def confirm(
    logprobs: Callable[[ForwardPass, list[PackedRow]], list[np.ndarray]],
    choice: Choice,
    *,
    config: PretrainedConfig,
    exact: bool,
    agree: Callable[[float], float] = lambda value: value,
) -> Choice:
    """Compare with the loaded model, beginning with the pass of `choice`; where no copy was tried,
    continue with the others. Every rank makes the same calls. Raises NoForwardPass.

    logprobs(pass, rows): of the responses to `rows`, each [L]; config: of the model; exact: whether
    in float32;
    agree(value): the same on every rank.
    """
    tried = rows(config)
    expected = np.concatenate(logprobs(choice.alone, tried))
    found: dict[ForwardPass, float | str] = {}
    passes = PASSES[PASSES.index(choice.forward_pass) :]
    for one in passes if choice.unchecked else passes[:1]:
        needs_logits()
        apart = np.abs(np.concatenate(logprobs(one, tried)) - expected)
        difference = agree(float(apart.mean()))
        if difference <= (LOADED_BOUND if exact else HALF_BOUND):
            return replace(choice, forward_pass=one, needs_logits=needs_logits())
        found[one] = difference
    raise NoForwardPass(_sentence(config.model_type, found))


def check_shared(choice: Choice, config: PretrainedConfig, *, size: int) -> None:
    """Check that teams of ranks can share the rows of a model: where a token meets others in our
    attention alone. Raises IndivisibleError.
    """
    if size == 1:
        return
    if choice.forward_pass.rows != "packed":
        raise IndivisibleError(
            f"learner.sequence_parallel is {size}, but {config.model_type} has layers that need a "
            "whole sequence on one rank (a recurrence, or attention of its own): set it to 1, or "
            "train another model"
        )
    check_heads(heads_of(config).count, size)


def rows(config: PretrainedConfig) -> list[PackedRow]:
    """Make the rows that are tried, of tokens and lengths that the model has."""
    random = np.random.default_rng(3)
    ids, longest = copies.limits(config)
    made = []
    for length, responses in _LENGTHS:
        prompt = random.integers(ids.start, ids.stop, length)
        made += [
            response_row(prompt, random.integers(ids.start, ids.stop, response))
            for response in responses
            if length + response <= longest
        ]
    return made


def _first_right(
    expected: np.ndarray,
    tried: list[PackedRow],
    kind: str,
    make: Callable[[ForwardPass], PolicyModel],
) -> Choice:
    found: dict[ForwardPass, float | str] = {}
    for one in PASSES:
        needs_logits()
        try:
            difference = float(np.abs(_logprobs(make(one).train(), [tried]) - expected).max())
        except RAISED as error:
            found[one] = raised(error, most=120)
            continue
        if difference <= BOUND:
            return Choice(one, needs_logits=needs_logits())
        found[one] = difference
    raise NoForwardPass(_sentence(kind, found))


def _copy(
    small: PretrainedConfig, auto: Any, named: dict[str, Any], forward_pass: ForwardPass
) -> PolicyModel:
    hf = copies.build(small, auto, attn_implementation=forward_pass.attention, **named)
    without_dropout(hf)
    return PolicyModel(hf, float32_head=False, forward_pass=forward_pass)


def _logprobs(policy: PolicyModel, packs: list[list[PackedRow]]) -> np.ndarray:
    """Log-probs of all responses' tokens, row by row."""
    device = next(policy.parameters()).device
    return np.concatenate([values for chunk in packs for values in by_row(policy, chunk, device)])


def by_row(
    policy: Callable[..., tuple[Tensor, Tensor | None]],
    chunk: list[PackedRow],
    device: torch.device,
) -> Iterator[np.ndarray]:
    """Yield the log-probs of each row of a pack. policy: the model, or what runs it there."""
    packed = pack(chunk, device)
    with torch.no_grad():
        values = policy(packed, 1.0, False)[0].float().cpu().numpy()
    ends = np.cumsum([len(chunk[index][2]) for index in packed.order])
    parts = dict(zip(packed.order, np.split(values, ends[:-1]), strict=True))
    yield from (parts[index] for index in range(len(chunk)))


def _sentence(kind: str, found: dict[ForwardPass, float | str]) -> str:
    """Say how near each way of computing rows came. found: nats, or what was raised."""
    if any(what != what for what in found.values()):
        return (
            f"{kind} cannot be trained: the log-probs of its own forward pass are not finite "
            "numbers, so its weights are broken. Train another model"
        )
    told = []
    for way in dict.fromkeys(one.rows for one in found):
        results = [what for one, what in found.items() if one.rows == way]
        apart = [what for what in results if isinstance(what, float)]
        near = f"{min(apart):.2g} nats from it" if apart else results[0]
        told.append(f"{_WAYS[way]}: {near}")
    return (
        f"{kind} cannot be trained: sequences that are computed together do not get the log-probs "
        f"of the model's own forward pass ({'; '.join(told)}). Train another model"
    )
