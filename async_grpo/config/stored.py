"""The settings that a start of a run has written down, in the form of now.

    before                                              now
    policy_loss: sapo  and  sapo: {tau_pos: 2.0}        policy_loss: {name: sapo, tau_pos: 2.0}
    adv_estimator: asymre  and  asymre_shift: -0.2      adv_estimator: {name: asymre, shift: -0.2}
    clip_schedule: {kind: harmonic, rate: 0.5}          clip_schedule: {name: harmonic, rate: 0.5}
    policy_loss: mine  and  options: {mine: {size: 2}}  policy_loss: {name: mine, size: 2}
    backend: nccl  and  senders: one                    backend: {name: nccl, senders: one}
    early_stopping: {metric: replay/lag_mean}           {metric: replay/staleness_mean}
    callbacks: {metric_stream: ...}                     metrics.jsonl has every line

Runs in: any process (imports what the settings import). Hides what options looked like while they
stood beside the setting that names what they belong to. Invariants: what a run has stored is
converted when it is read, so that the run goes on; what a user writes is answered with the form of
now; what had no effect is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from async_grpo import old_names
from async_grpo.algo.catalog import ESTIMATORS, POLICY_LOSSES
from async_grpo.config import yaml12
from async_grpo.config.algorithm import rejection_rules
from async_grpo.config.transports import TRANSPORTS, Senders

_LOSSES = ("sapo", "dppo", "opmd", "clip_cov", "kl_cov", "m2po")
"""Losses whose options had a section of their own."""
_STOPPING, _STREAM = ("run", "callbacks", "early_stopping"), "metric_stream"
[_PUSHES] = (name for name, one in TRANSPORTS.items() if one.options is Senders)
"""The transport that `weight_sync.senders` was about."""


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings that a start of a run wrote down; nothing where they cannot be read."""
    try:
        return renewed(dict(yaml12.read(path.read_text(encoding="utf-8"))[0]))
    except (OSError, ValueError, TypeError):
        return {}


def renewed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, complete or not, in the form of now; those in it already as they are, also
    with keys of before beside them.
    """
    new, options = dict(settings), _inside(settings, "algorithm", "options")
    algorithm, sync = settings.get("algorithm"), settings.get("weight_sync")
    if isinstance(algorithm, Mapping):
        new["algorithm"] = _algorithm(algorithm)
    custom = _inside(settings, "replay", "filter_groups", "custom")
    if isinstance(custom, str) and _inside(options, custom):
        replay = settings["replay"]
        groups = {**replay["filter_groups"], "custom": _chosen(custom, _inside(options, custom))}
        new["replay"] = {**replay, "filter_groups": groups}
    if isinstance(sync, Mapping) and isinstance(sync.get("backend", "auto"), str):
        new["weight_sync"] = _weight_sync(sync, settings)
    engine = _inside(settings, "cluster", "engine")
    if isinstance(engine, Mapping) and engine.get("kv_cache_gb", "") is None:
        new["cluster"] = {**settings["cluster"], "engine": {**engine, "kv_cache_gb": "auto"}}
    if isinstance(callbacks := _inside(settings, "run", "callbacks"), Mapping):
        kept = {name: copy.copy(one) for name, one in callbacks.items() if name != _STREAM}
        new["run"] = {**settings["run"], "callbacks": kept}
        if isinstance(metric := _inside(kept, "early_stopping", "metric"), str):
            kept["early_stopping"]["metric"] = old_names.metric(metric)
    return new


def _algorithm(before: Mapping[str, Any]) -> dict[str, Any]:
    new, options = dict(before), before.get("options")
    loss, estimator = before.get("policy_loss", "ppo_clip"), before.get("adv_estimator", "grpo")
    if isinstance(loss, str):
        own = before.get(loss) if loss in _LOSSES else _inside(options, loss)
        new = {key: value for key, value in new.items() if key not in _LOSSES}
        if "policy_loss" in before:
            new["policy_loss"] = _chosen(loss, own)
    if isinstance(estimator, str):
        shift = new.pop("asymre_shift", None)
        own = _inside(options, estimator)
        if estimator == "asymre":
            own = None if shift is None else {"shift": shift}
        if "adv_estimator" in before:
            new["adv_estimator"] = _chosen(estimator, own)
    schedule = before.get("clip_schedule")
    if isinstance(schedule, Mapping) and "kind" in schedule and "name" not in schedule:
        own = {key: value for key, value in schedule.items() if key != "kind"}
        kind = schedule["kind"]
        new["clip_schedule"] = kind if kind == "constant" else _chosen(kind, own)
    importance = before.get("importance")
    if isinstance(importance, Mapping) and isinstance(mode := importance.get("mode"), str):
        new["importance"] = {**importance, "mode": _chosen(mode, _inside(options, mode))}
    if isinstance(shapings := before.get("reward_shaping"), list):
        new["reward_shaping"] = [
            _chosen(one, _inside(options, one)) if isinstance(one, str) else one for one in shapings
        ]
    if "rejection" in before:
        new["rejection"] = rejection_rules(before["rejection"])
    new.pop("options", None)
    return new


def _weight_sync(sync: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    new = {key: value for key, value in sync.items() if key != "senders"}
    senders = sync.get("senders", "auto")
    on_gpus = _inside(settings, "cluster", "device") == "cuda"
    apart = _inside(settings, "cluster", "layout") == "split"
    meant = sync.get("backend", "auto") == "auto" and senders != "auto" and on_gpus and apart
    if "senders" in sync and (sync.get("backend") == _PUSHES or meant):
        new["backend"] = _chosen(_PUSHES, {"senders": senders})
    return new


def _chosen(name: Any, options: Any) -> Any:
    return {"name": name, **options} if isinstance(options, Mapping) and options else name


def answers(settings: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Find the keys of before in what a user wrote: the path of each, and what to do about it."""
    algorithm = _inside(settings, "algorithm")
    algorithm = algorithm if isinstance(algorithm, Mapping) else {}
    for name in (name for name in _LOSSES if name in algorithm):
        told = _told(algorithm, "policy_loss", name, algorithm[name])
        yield ("algorithm", name), told
    if "asymre_shift" in algorithm:
        shift = {"shift": algorithm["asymre_shift"]}
        yield ("algorithm", "asymre_shift"), _told(algorithm, "adv_estimator", "asymre", shift)
    schedule = algorithm.get("clip_schedule")
    if isinstance(schedule, Mapping) and "kind" in schedule:
        new = _algorithm({"clip_schedule": schedule})["clip_schedule"]
        told = f"Write `algorithm.clip_schedule: {yaml12.flow(new)}`"
        yield ("algorithm", "clip_schedule", "kind"), told
    if "options" in algorithm:
        options = algorithm["options"]
        for name, own in options.items() if isinstance(options, Mapping) else ():
            told = f"Write `{yaml12.flow(_chosen(name, own))}` where {name} is chosen"
            yield ("algorithm", "options", str(name)), told
        yield ("algorithm", "options"), "Leave it out"
    sync = _inside(settings, "weight_sync")
    if isinstance(sync, Mapping) and "senders" in sync:
        senders = {"senders": sync["senders"]}
        told = _told(sync, "backend", _PUSHES, senders, section="weight_sync")
        yield ("weight_sync", "senders"), told if senders["senders"] != "auto" else "Leave it out"
    metric = _inside(settings, *_STOPPING, "metric")
    if isinstance(metric, str) and (now := old_names.metric(metric)) != metric:
        yield (*_STOPPING, "metric"), f"Write `metric: {now}`"


def _told(
    around: Mapping[str, Any], key: str, name: str, options: Any, *, section: str = "algorithm"
) -> str:
    """Say what to write for the options of `name`, which `key` chooses, or something else."""
    chosen = around.get(key, name)
    if isinstance(chosen, str) and chosen not in (name, "auto"):
        return f"Leave it out: it belongs to {name}, and `{section}.{key}` is {chosen}"
    return f"Write `{section}.{key}: {yaml12.flow(_chosen(name, options))}`"


def idle(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Find what `renewed` leaves out of settings because it has no effect: name of before, value;
    without what is a default.
    """
    algorithm = _inside(settings, "algorithm")
    if not isinstance(algorithm, Mapping):
        return
    for name in (name for name in _LOSSES if algorithm.get("policy_loss") != name):
        defaults, given = asdict(POLICY_LOSSES.options(name, {})), algorithm.get(name)
        for key, value in given.items() if isinstance(given, Mapping) else ():
            if defaults.get(key) != value:
                yield f"algorithm.{name}.{key}", value
    shift = algorithm.get("asymre_shift")
    if shift not in (None, -0.1) and algorithm.get("adv_estimator") != "asymre":
        yield "algorithm.asymre_shift", shift


def digested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices of complete settings by the names of before: digests that runs have
    stored were made of these. Different choices give different ones.
    """
    algorithm = settings["algorithm"]
    loss, loss_options = _parts(algorithm["policy_loss"])
    estimator, own = _parts(algorithm["adv_estimator"])
    mode, mode_options = _parts(algorithm["importance"]["mode"])
    shapings = [_parts(one) for one in algorithm["reward_shaping"]]
    schedule, narrowing = _parts(algorithm["clip_schedule"])
    custom, custom_options = _parts(settings["replay"]["filter_groups"]["custom"] or "")
    defaults = {name: asdict(POLICY_LOSSES.options(name, {})) for name in _LOSSES}
    if loss in defaults:
        defaults[loss] |= loss_options
    shift = asdict(ESTIMATORS.options("asymre", own if estimator == "asymre" else {}))["shift"]
    options: dict[str, Any] = {}
    for place, name, given in (
        ("policy_loss", loss, {} if loss in defaults else loss_options),
        ("adv_estimator", estimator, {} if estimator == "asymre" else own),
        ("importance.mode", mode, mode_options),
        *((f"reward_shaping.{index}", *one) for index, one in enumerate(shapings)),
        ("custom", custom, custom_options),
    ):
        if given:
            options[f"{place}: {name}" if options.get(name, given) != given else name] = given
    found = {
        "policy_loss": loss,
        "adv_estimator": estimator,
        "asymre_shift": shift,
        "importance.mode": mode,
        "reward_shaping": [name for name, _ in shapings],
        "clip_schedule.kind": schedule,
        "clip_schedule.rate": narrowing.get("rate", 1.0),
        "clip_schedule.floor": narrowing.get("floor", 0.0),
        "options": options,
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
