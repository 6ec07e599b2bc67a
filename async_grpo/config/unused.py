"""Settings that have no effect, because the setting that they belong to is off.

Runs in: the driver. Hides which setting belongs to which. Invariant: one rule for all: a value that
differs from its default, while its owner is inactive, is refused with both named. Two things pass:
what the run that is continued has stored, and what a file says for an owner that the command line
turns off.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from async_grpo.algo.catalog import POLICY_LOSSES
from async_grpo.config.choice import Chosen
from async_grpo.config.docs import Setting, settings, show
from async_grpo.config.schema import Config
from async_grpo.config.transports import TRANSPORTS


@dataclass(frozen=True, slots=True)
class _Owned:
    """Keys (a section stands for all of its keys) that have an effect only where `active` holds,
    for example with `owner: wanted`.
    """

    keys: tuple[str, ...]
    owner: str
    wanted: str
    active: Callable[[Config], bool]


def _is_clipped(config: Config) -> bool:
    loss = config.algorithm.policy_loss.name
    clipped = POLICY_LOSSES.where(lambda traits: traits.clipped)
    return loss in clipped or loss not in POLICY_LOSSES.built_in


def _relayed(config: Config) -> bool:
    transport = TRANSPORTS.get(config.weight_sync.backend.name)
    return transport is None or transport.relayed


def _on(owner: str, *keys: str) -> _Owned:
    """Say that `keys` belong to the switch `owner`."""
    return _Owned(keys, owner, "true", lambda config: bool(value_of(config, owner)))


def _unlike(owner: str, idle: object, wanted: str, *keys: str) -> _Owned:
    """Say that `keys` have an effect where `owner` is not `idle`."""
    return _Owned(keys, owner, wanted, lambda config: value_of(config, owner) != idle)


OWNED = (
    _unlike("tasks", {}, "two or more", "replay.quota"),
    _unlike(
        "replay.difficulty.choose",
        "all",
        "window",
        "replay.difficulty.target",
        "replay.difficulty.width",
        "replay.difficulty.explore",
        "replay.difficulty.rates_from",
    ),
    _on("algorithm.use_kl_loss", "algorithm.kl_loss_coef", "algorithm.kl_loss_type"),
    _on("algorithm.dual_clip_loss", "algorithm.clip_ratio_c"),
    _on("algorithm.overlong_buffer.enable", "algorithm.overlong_buffer"),
    _on("algorithm.add_token_level_kl", "algorithm.kl_ctrl.kl_type", "algorithm.kl_ctrl.kl_coef"),
    _unlike(
        "algorithm.kl_ctrl.type",
        "fixed",
        "adaptive",
        "algorithm.kl_ctrl.target_kl",
        "algorithm.kl_ctrl.horizon",
    ),
    _unlike("algorithm.importance.level", "none", "token (or another)", "algorithm.importance"),
    _unlike(
        "algorithm.distill.teacher",
        None,
        "NAME (of `frozen`)",
        "algorithm.distill.coef",
        "algorithm.distill.reward_coef",
        "algorithm.distill.teacher_top_k",
        "algorithm.distill.teacher_prompt",
    ),
    _unlike("algorithm.sft_loss_coef", 0.0, "0.1 (or another)", "algorithm.sft_model"),
    _unlike("algorithm.opsm_delta", None, "0.5 (or another)", "algorithm.opsm_against"),
    _Owned(
        ("algorithm.clip_ratio",),
        "algorithm.policy_loss",
        "ppo_clip (or another loss with a clip interval)",
        _is_clipped,
    ),
    _Owned(  # the half-width of sides without their own
        ("algorithm.clip_ratio",),
        "algorithm.clip_ratio_low",
        "null (or clip_ratio_high)",
        lambda config: None in (config.algorithm.clip_ratio_low, config.algorithm.clip_ratio_high),
    ),
    _unlike("algorithm.gamma", 1.0, "0.99 (or another below 1)", "algorithm.gamma_per"),
    _unlike("rollout.repetition_times", None, "8 (or another count)", "rollout.repetition_length"),
    _on("replay.filter_groups.enable", "replay.filter_groups"),
    _on("replay.filter_groups.zero_variance", "replay.filter_groups.tolerance"),
    _on("replay.journal.enable", "replay.journal.fsync"),
    _Owned(
        tuple(f"model.warm_start.blur_{key}" for key in ("accuracy", "sampled_accuracy", "noise")),
        "model.warm_start.blur_max_steps",
        "60 (or another limit)",
        lambda config: (
            config.model.warm_start is None or config.model.warm_start.blur_max_steps > 0
        ),
    ),
    _Owned(("weight_sync.files",), "weight_sync.backend", "shared_memory", _relayed),
    _Owned(
        ("weight_sync.delta",),
        "weight_sync.backend",
        "shared_memory",
        lambda config: config.weight_sync.delta == "always" or _relayed(config),
    ),
    _unlike("evaluation.n", 0, "1 (or more)", "evaluation.temperature"),
    _on(
        "tracking.mlflow",
        "tracking.uri",
        "tracking.experiment",
        "tracking.offline_ok",
        "tracking.log_model_max_gb",
    ),
)


def unused(
    config: Config, *, before: Mapping[str, Any], overridden: Container[tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Find settings without effect: the path of each, and a sentence that names it and its owner.
    before: the stored settings of the run that is continued. overridden: paths of overrides.
    """
    for owned in OWNED:
        if owned.active(config):
            continue
        for setting in _keys(owned.keys):
            value = value_of(config, setting.name)
            passes = _stored(before, setting.path) == value or (
                tuple(owned.owner.split(".")) in overridden and setting.path not in overridden
            )
            if setting.name != owned.owner and not passes and value != setting.default:
                idle = show(value_of(config, owned.owner))
                yield (
                    setting.path,
                    (
                        f"`{setting.name}` is {show(value)}, which has no effect while "
                        f"`{owned.owner}` is {idle}: set `{owned.owner}: {owned.wanted}`, or leave "
                        "it out."
                    ),
                )


def value_of(config: Config, name: str) -> Any:
    """Return the value of a setting by its dotted name, a choice as a file writes it."""
    value = reduce(getattr, name.split("."), config)
    return value.written() if isinstance(value, Chosen) else value


def _keys(names: tuple[str, ...]) -> Iterator[Setting]:
    for setting in settings().values():
        inside = any(setting.name == name or setting.name.startswith(f"{name}.") for name in names)
        if inside and not setting.section:
            yield setting


def _stored(values: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    node: Any = values
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node
