"""Rules that the tables of several systems share: names, directories, data, periods.

Runs in: a terminal. Hides which texts are names and paths here. Invariant: as of `rules`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from async_grpo.config.docs import show
from async_grpo.tools.migrate.rules import (
    Convert,
    KeyRule,
    Meant,
    Untranslatable,
    boolean,
    by,
    number,
    text,
    to,
    whole,
    words,
)
from async_grpo.tools.migrate.source import Source

LAYOUT_OF_OTHERS = "how memory is laid out there; here `learner.zero_stage` and `learner.deepspeed`"
A_PART = "a part of `task.train` and `task.eval`, behind the name and its configuration"
DATA_FILES = "how rows are read; a task knows its own (docs/tasks.md)"
SUMMED = (
    "in the reward of every token; estimators that compare groups sum it up before their baseline "
    "here"
)
PROCESSES = "how its processes are placed and started; `cluster` says that here"
_ROWS, _OTHER_FILES = (".jsonl", ".json"), (".parquet", ".csv", ".arrow", ".txt", ".tsv", ".py")
_CONFIGURED = {"openai/gsm8k": "openai/gsm8k:main"}
"""Data sets that have no configuration of the name `default`."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]*){0,2}")


def data(keys: str, ours: str, split: str = "", usual: str = "") -> KeyRule:
    """Take a data set that can be read here: a JSONL file, or a name on the hub. split: keys of its
    split there, one of which may be given; usual: the split that is taken there by default.
    """

    def change(value: Any) -> str:
        parts = value if isinstance(value, list) else [value]
        if len(parts) != 1:
            raise Untranslatable(f"{len(parts)} data sets; a run has one: join them into one file")
        name = text(parts[0])
        if name.endswith(_ROWS) or (_NAME.fullmatch(name) and not name.endswith(_OTHER_FILES)):
            return _CONFIGURED.get(name, name)
        raise Untranslatable(
            "rows are read from JSONL files and from data sets of the hub here (docs/tasks.md)"
        )

    def convert(value: Any, source: Source) -> Meant:
        name = to(keys, ours, change).convert(value, source).values[ours]
        part = next((source.find(key) for key in split.split() if source.has(key)), usual)
        own = "test" if ours == "task.eval" else "train"
        if part and part != own and not name.endswith(_ROWS) and name.count(":") < 2:
            name = f"{name}:{part}" if ":" in name else f"{name}:default:{part}"
        return Meant({ours: name})

    return KeyRule(keys, convert, ours)


def file_name(keys: str) -> KeyRule:
    """Take a name of a run, with `_` for what a directory's name should not have."""

    def convert(value: Any, source: Source) -> Meant:
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", text(value)).strip(".") or "migrated"
        return Meant({"run.name": name})

    return by(keys, convert)


def directory(keys: str) -> KeyRule:
    """Take a directory for what a run writes."""
    return to(keys, "run.dir", text, "everything that a run writes is in it")


def experiment(keys: str) -> KeyRule:
    """Take the name that groups runs in a tracker."""
    return to(keys, "tracking.experiment", text, "of MLflow here")


def mlflow_among(keys: str) -> KeyRule:
    """Say what becomes of a list of trackers."""

    def convert(value: Any, source: Source) -> Meant:
        names = value if isinstance(value, list) else re.split(r"[\s,]+", str(value))
        if "mlflow" in map(str, names):
            return Meant({"tracking.mlflow": True})
        raise Untranslatable("the tracker is MLflow here (`tracking.mlflow`)")

    return by(keys, convert)


def resume(keys: str) -> KeyRule:
    """Take what a start continues from."""

    def change(value: Any) -> str:
        known = {"auto": "auto", "true": "auto", "disable": "never", "false": "never"}
        meant = known.get(str(value).lower())
        if meant is None:
            raise Untranslatable(f"{show(value)} is of a checkpoint of another system")
        return meant

    return to(keys, "checkpoint.resume", change)


def schedule(keys: str) -> KeyRule:
    """Take a learning-rate schedule by its name in transformers."""
    table = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
    table |= {"constant_with_warmup": "constant"}
    to_a_share = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")

    def convert(value: Any, source: Source) -> Meant:
        if str(value) in to_a_share:
            return Meant({"learner.schedule": "cosine"}, "it falls to 0 here, to a share there")
        return words(keys, "learner.schedule", table).convert(value, source)

    return KeyRule(keys, convert, "learner.schedule")


def kl_word(keys: str) -> KeyRule:
    """Take the estimator of the KL in the loss."""
    table = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "kl": "kl", "abs": "abs", "mse": "mse"}
    table |= {"low_var_kl": "low_var_kl"}
    table |= {f"{theirs}+": f"{ours}+" for theirs, ours in table.items() if ours != "mse"}
    table |= {"mse+": "mse", "k2+": "mse"}
    return words(keys, "algorithm.kl_loss_type", table)


def adapters(rank: str, alpha: str, layers: str, switch: str = "") -> tuple[KeyRule, ...]:
    """Take LoRA's settings, where the rank is above 0 and the switch, if there is one, on."""
    names = [keys.split()[0].strip("^") for keys in (rank, switch) if keys]

    def on(source: Source) -> bool:
        used = not switch or str(source.find(names[1], False)).lower() in ("true", "yes")
        return used and source.number(names[0], 16 if switch else 0) > 0

    def setting(ours: str, change: Callable[[Any], Any]) -> Convert:
        def convert(value: Any, source: Source) -> Meant:
            if value is None or not on(source):
                raise Untranslatable("no adapters: the weights are trained")
            return Meant({ours: change(value)})

        return convert

    return (
        by(rank, setting("model.lora.rank", whole)),
        by(alpha, setting("model.lora.alpha", number)),
        by(layers, setting("model.lora.target_modules", _layers)),
    )


def _layers(value: Any) -> Any:
    return "all-linear" if value in ("all-linear", "all") else _listed(value)


def _listed(value: Any) -> list[str]:
    names = value if isinstance(value, list) else re.split(r"[\s,]+", text(value))
    return [text(name) for name in names]


def off_is_zero(value: Any) -> int:
    """Return a `top_k`, of which -1 is off elsewhere."""
    return max(0, whole(value))


def kl_in_loss(keys: str) -> KeyRule:
    """Take a coefficient of the KL in the loss, of which 0 is off."""

    def convert(value: Any, source: Source) -> Meant:
        if number(value) == 0:
            return Meant({"algorithm.use_kl_loss": False})
        return Meant(
            {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": number(value)},
            "of the KL to the reference, k3",
        )

    return by(keys, convert)


def precision(keys: str, dtype: str) -> KeyRule:
    """Take a switch for a compute type."""

    def convert(value: Any, source: Source) -> Meant:
        if not boolean(value):
            return Meant({}, "off there; `model.dtype` is auto here")
        return Meant({"model.dtype": dtype})

    return by(keys, convert)
