"""The settings that a start of a run has written down, in the form of now.

    before                                              now
    policy_loss: sapo  and  sapo: {tau_pos: 2.0}        policy_loss: {name: sapo, tau_pos: 2.0}
    adv_estimator: asymre  and  asymre_shift: -0.2      adv_estimator: {name: asymre, shift: -0.2}
    clip_schedule: {kind: harmonic, rate: 0.5}          clip_schedule: {name: harmonic, rate: 0.5}
    policy_loss: mine  and  options: {mine: {size: 2}}  policy_loss: {name: mine, size: 2}
    backend: nccl  and  senders: one                    backend: {name: nccl, senders: one}

Runs in: any process (imports what the settings import). Hides what options looked like while they
stood beside the setting that names what they belong to. Invariants: what a run has stored is
converted when it is read, so that the run goes on; what a user writes is answered with the form of
now; what had no effect is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from async_grpo.algo.catalog import ESTIMATORS, POLICY_LOSSES
from async_grpo.config import yaml12
from async_grpo.config.algorithm import rejection_rules

_LOSSES = ("sapo", "dppo", "opmd", "clip_cov", "kl_cov", "m2po")
"""Losses whose options had a section of their own."""


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings that a start of a run wrote down; nothing where they cannot be read."""
    try:
        return renewed(dict(yaml12.read(path.read_text(encoding="utf-8"))[0]))
    except (OSError, ValueError, TypeError):
        return {}


def renewed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, complete or not, in the form of now; those in it already as they are."""
    new = dict(settings)
    if isinstance(algorithm := settings.get("algorithm"), Mapping):
        new["algorithm"] = _algorithm(algorithm)
    options = _inside(settings, "algorithm", "options")
    custom = _inside(settings, "replay", "filter_groups", "custom")
    if options and isinstance(custom, str):
        replay = settings["replay"]
        groups = {**replay["filter_groups"], "custom": _chosen(custom, options.get(custom))}
        new["replay"] = {**replay, "filter_groups": groups}
    if isinstance(sync := settings.get("weight_sync"), Mapping) and "senders" in sync:
        new["weight_sync"] = _weight_sync(sync, settings)
    return new


def _algorithm(before: Mapping[str, Any]) -> dict[str, Any]:
    gone = {*_LOSSES, "asymre_shift", "options"}
    new = {key: value for key, value in before.items() if key not in gone}
    options = before.get("options") or {}
    loss, estimator = before.get("policy_loss"), before.get("adv_estimator")
    if isinstance(loss, str):
        own = before.get(loss) if loss in _LOSSES else options.get(loss)
        new["policy_loss"] = _chosen(loss, own)
    if isinstance(estimator, str):
        shift = {"shift": before["asymre_shift"]} if "asymre_shift" in before else None
        own = shift if estimator == "asymre" else options.get(estimator)
        new["adv_estimator"] = _chosen(estimator, own)
    if isinstance(schedule := before.get("clip_schedule"), Mapping) and "name" not in schedule:
        kind = schedule.get("kind", "constant")
        own = {key: value for key, value in schedule.items() if key != "kind"}
        new["clip_schedule"] = _chosen(kind, own if kind != "constant" else None)
    importance = before.get("importance")
    if isinstance(importance, Mapping) and isinstance(mode := importance.get("mode"), str):
        new["importance"] = {**importance, "mode": _chosen(mode, options.get(mode))}
    if isinstance(shapings := before.get("reward_shaping"), list):
        new["reward_shaping"] = [
            _chosen(one, options.get(one)) if isinstance(one, str) else one for one in shapings
        ]
    if "rejection" in before:
        new["rejection"] = rejection_rules(before["rejection"])
    return new


def _weight_sync(sync: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    new = {key: value for key, value in sync.items() if key != "senders"}
    backend, senders = sync.get("backend", "auto"), {"senders": sync["senders"]}
    elsewhere = (
        _inside(settings, "cluster", "device") == "cpu"
        or _inside(settings, "cluster", "layout") == "colocated"
    )
    meant = backend == "auto" and sync["senders"] != "auto" and not elsewhere
    if backend == "nccl" or meant:
        new["backend"] = _chosen("nccl", senders)
    return new


def _chosen(name: str, options: Mapping[str, Any] | None) -> str | dict[str, Any]:
    return {"name": name, **options} if options else name


def answers(settings: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Find the keys of before in what a user wrote: the path of each, and what to write now."""
    algorithm = _inside(settings, "algorithm")
    algorithm = algorithm if isinstance(algorithm, Mapping) else {}
    for name in (name for name in _LOSSES if name in algorithm):
        yield ("algorithm", name), _told("policy_loss", name, algorithm[name])
    if "asymre_shift" in algorithm:
        shift = {"shift": algorithm["asymre_shift"]}
        yield ("algorithm", "asymre_shift"), _told("adv_estimator", "asymre", shift)
    schedule = algorithm.get("clip_schedule")
    if isinstance(schedule, Mapping) and "kind" in schedule:
        own = {key: value for key, value in schedule.items() if key != "kind"}
        told = _told("clip_schedule", schedule["kind"], own)
        yield ("algorithm", "clip_schedule", "kind"), told
    if isinstance(options := algorithm.get("options"), Mapping):
        for name, own in options.items():
            told = f"`{_flow(name, own)}` where {name} is chosen"
            yield ("algorithm", "options", name), told
    sync = _inside(settings, "weight_sync")
    if isinstance(sync, Mapping) and "senders" in sync:
        told = f"`weight_sync.backend: {_flow('nccl', {'senders': sync['senders']})}`"
        yield ("weight_sync", "senders"), told


def _told(key: str, name: Any, options: Any) -> str:
    return f"`algorithm.{key}: {_flow(name, options)}`"


def _flow(name: Any, options: Any) -> str:
    """Return a choice as YAML on one line."""
    return yaml12.flow(_chosen(name, options if isinstance(options, Mapping) else None))


def digested(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices of a complete `algorithm` as settings by the names of before: digests that
    runs have stored were made of these.
    """
    loss, loss_options = _parts(algorithm["policy_loss"])
    estimator, own = _parts(algorithm["adv_estimator"])
    mode, mode_options = _parts(algorithm["importance"]["mode"])
    shapings = [_parts(one) for one in algorithm["reward_shaping"]]
    schedule, narrowing = _parts(algorithm["clip_schedule"])
    defaults = {name: asdict(POLICY_LOSSES.options(name, {})) for name in _LOSSES}
    if loss in defaults:
        defaults[loss] |= loss_options
    shift = asdict(ESTIMATORS.options("asymre", own if estimator == "asymre" else {}))["shift"]
    plugins = {loss: loss_options, estimator: own, mode: mode_options, **dict(shapings)}
    found = {
        "policy_loss": loss,
        "adv_estimator": estimator,
        "asymre_shift": shift,
        "importance.mode": mode,
        "reward_shaping": [name for name, _ in shapings],
        "clip_schedule.kind": schedule,
        "clip_schedule.rate": narrowing.get("rate", 1.0),
        "clip_schedule.floor": narrowing.get("floor", 0.0),
        "options": {
            name: options
            for name, options in plugins.items()
            if options and name not in (*_LOSSES, "asymre")
        },
    }
    found |= {f"{name}.{key}": v for name, one in defaults.items() for key, v in one.items()}
    return {f"algorithm.{name}": value for name, value in found.items()}


def _parts(choice: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(choice, str):
        return choice, {}
    return choice["name"], {key: value for key, value in choice.items() if key != "name"}


def _inside(values: Any, *path: str) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values
