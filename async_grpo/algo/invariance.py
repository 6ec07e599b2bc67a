"""Which normalisation of rewards no advantage shows.

Runs in: any process (plain Python: the settings read it). Hides how the traits of an estimator and
the switches behind it decide. Invariant: statistics of the whole step, and of all steps so far, are
one number for all rewards of a step; those of a group one for all of the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_grpo.algo.catalog import EstimatorTraits

Levels = frozenset[str | None]
"""Whose mean or deviation; None is no one's."""
NONE: Levels = frozenset({None})
STEP: Levels = NONE | {"batch", "running"}
EVERY: Levels = STEP | {"group"}
_BY_STEP = {"batch": STEP, "batch_centered": EVERY, "batch_raw": NONE}
"""Whose mean a deviation over the step does not show."""


def norm_levels(
    reward_norm: str | Mapping[Any, str] | None, shift: bool, scale: bool
) -> tuple[str | None, str | None]:
    """Find whose mean is subtracted, and whose deviation is divided by. Raises ValueError for a
    level or a key that does not exist, and a mapping beside `shift` or `scale`.
    """
    if isinstance(reward_norm, Mapping):
        if reward_norm.keys() - {"mean", "std"} or shift or scale:
            raise ValueError(
                f"reward_norm is {dict(reward_norm)}; a mapping has mean and std alone, "
                "without reward_shift and reward_scale"
            )
        found = [reward_norm.get("mean", "none"), reward_norm.get("std", "none")]
    elif reward_norm is None and not shift and not scale:
        return None, None
    else:
        level = "batch" if reward_norm is None else reward_norm
        found = [level if shift or not scale else "none", level if scale or not shift else "none"]
    for level in found:
        if level not in ("none", "group", "batch", "running"):
            raise ValueError(f"reward_norm is {level!r}; choose group, batch, running or null")
    mean, std = (None if level == "none" else level for level in found)
    return mean, std


def unseen_levels(
    traits: EstimatorTraits,
    *,
    norm_by_std: bool,
    std_level: str,
    gamma: float,
    whiten: bool | str,
    masked: bool,
    kl: bool,
    clip: bool,
) -> tuple[Levels, Levels]:
    """Return whose mean subtracted from the rewards, and whose deviation dividing them, leave the
    advantages as they are (up to the EPSILON beside a deviation). `masked`: whether some rows may
    leave the loss; `kl`, `clip`: whether normalised rewards pay for a KL, or are clipped; the
    others as in `compute_advantages`.
    """
    if clip:
        return NONE, NONE
    # over all tokens, the mean of a baseline that weighs by length is 0: there is none to keep
    kept = whiten == "keep_mean" and (masked or not traits.lengths)
    whitened = bool(whiten or traits.whitens) and not kept
    scored = traits.scale == "vanishes" and (norm_by_std or not traits.divides)
    mean = EVERY if traits.shift == "vanishes" else NONE
    std = EVERY if scored else NONE
    if scored and traits.std_levels and std_level != "group":
        std = STEP
        mean = EVERY if whitened else _BY_STEP[std_level]  # whitening replaces the divisor
    if whitened:
        std |= STEP if traits.scale else NONE
        mean |= STEP if traits.shift == "follows" else NONE
    return NONE if gamma != 1 else mean, NONE if kl else std
