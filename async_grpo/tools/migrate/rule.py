"""What becomes of a key of another system: the words of the systems' tables.

Runs in: a terminal. Hides how values of others are read for a setting of ours (`_WORDS`, `_READ`),
and how that is found: where a rule names none, it is what `answers.PEERS` says of the key, or the
only setting of its name. Invariant: a converter returns what the key sets here, or the reason for
which it sets nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from async_grpo.config.docs import options, settings, show
from async_grpo.tools.migrate.answers import PEERS, answer, matches
from async_grpo.tools.migrate.source import TRUE, Source

Settings = Mapping[str, Any]
Outcome = Settings | tuple[Settings, str] | str
"""What a key sets here, that with a note on what changes, or why it sets nothing."""
Convert = Callable[[Any, Source], Outcome]
"""From the value of a key, and the file around it."""
Condition = Callable[[Source], bool]


@dataclass(frozen=True)
class KeyRule:
    """What becomes of the keys that match one of the patterns (`answers.matches`)."""

    keys: str
    convert: Convert
    ours: str = ""
    """The setting, where it is always the same one."""

    def outcome(self, value: Any, source: Source) -> tuple[Settings, str]:
        """Return what the key sets, and the note; nothing, and the reason."""
        try:
            found = self.convert(value, source)
        except Untranslatable as reason:
            return {}, str(reason)
        if isinstance(found, str):
            return {}, found
        return found if isinstance(found, tuple) else (found, "")

    def unless(self, holds: Condition, reason: str) -> KeyRule:
        """Leave the keys, for this reason, in a file of which the condition holds."""
        return by(self.keys, lambda value, source: (
            reason if holds(source) else self.convert(value, source)))  # fmt: skip

    def when(self, holds: Condition, reason: str) -> KeyRule:
        """Leave the keys, for this reason, in a file of which the condition does not hold."""
        return self.unless(lambda source: not holds(source), reason)


@dataclass(frozen=True)
class Peer:
    """Another system. option: its word for `--from`; signs: keys by which a file of its is known;
    programs: parts of what starts it; implied: what it does where the file says nothing, and which
    its configuration here has to say, with the reason.
    """

    name: str
    option: str
    programs: tuple[str, ...]
    rules: tuple[KeyRule, ...]
    implied: Callable[[Source], Iterable[tuple[Settings, str]]]
    signs: str

    def marks(self, source: Source) -> int:
        """Count the signs by which the file is one of this system."""
        signs = self.signs.split()
        found = sum(any(matches(sign, key) for key in source.given) for sign in signs)
        return found + 10 * any(part in source.program for part in self.programs)

    def rule(self, key: str) -> KeyRule | None:
        """Return the first rule that is about the key."""
        return next((rule for rule in self.rules if matches(rule.keys, key)), None)


def given(*keys: str) -> Condition:
    """Return the condition that one of the keys has a value."""
    return lambda source: source.has(*keys)


def on(*keys: str) -> Condition:
    """Return the condition that one of the keys is true."""
    return lambda source: source.on(*keys)


# ---- values, read strictly: what is none raises Untranslatable, which says so ----

FALSE = ("false", "no", "off", "0", "none")


class Untranslatable(Exception):
    """The value has no counterpart; the text says why."""


def boolean(value: Any) -> bool:
    """Return a boolean, also of text. Raises Untranslatable."""
    if (word := str(value).lower()) not in TRUE + FALSE:
        raise Untranslatable(f"{show(value)} is not true or false")
    return word in TRUE


def number(value: Any) -> float:
    """Return a finite number, also of text. Raises Untranslatable."""
    if not isinstance(value, bool):
        try:
            result = float(value)
        except (TypeError, ValueError, OverflowError):
            result = math.nan
        if math.isfinite(result):
            return value if isinstance(value, int | float) else result
    raise Untranslatable(f"{show(value)} is not a number")


def whole(value: Any) -> int:
    """Return an integer. Raises Untranslatable."""
    result = number(value)
    if result != int(result):
        raise Untranslatable(f"{show(value)} is not an integer")
    return int(result)


def natural(value: Any) -> int:
    """Return an integer, 0 for those below, which elsewhere mean never or all."""
    return max(0, whole(value))


def pair(value: Any) -> tuple[float, float]:
    """Return two numbers of a list, or of `lo_hi`. Raises Untranslatable."""
    parts = value.split("_") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise Untranslatable(f"{show(value)} is not a pair of numbers")
    return number(parts[0]), number(parts[1])


def text(value: Any) -> str:
    """Return a text. Raises Untranslatable."""
    if not isinstance(value, str) or not value.strip():
        raise Untranslatable(f"{show(value)} is not a text")
    return value.strip()


def texts(value: Any) -> list[str]:
    """Return the texts of a list, or of one text with commas or spaces. Raises Untranslatable."""
    parts = value if isinstance(value, list) else re.split(r"[\s,]+", text(value))
    return [text(part) for part in parts]


def groups_of(rows: float, group_size: float) -> int:
    """Return how many groups so many rows are, at least 1; parts of groups count as one."""
    return max(1, math.ceil(rows / max(1, group_size)))


# ---- rules of any kind ----


def by(keys: str, convert: Convert) -> KeyRule:
    """Leave it to a converter."""
    return KeyRule(keys, convert)


def none(keys: str, reason: str) -> KeyRule:
    """Keys without counterpart, and the reason."""
    return by(keys, lambda value, source: reason)


def left(table: str) -> tuple[KeyRule, ...]:
    """Rows of `keys -- reason`; a line that is indented goes on with the one before."""
    rows = (row.partition(" -- ") for row in re.split(r"\n(?=\S)", table.strip()))
    return tuple(none(keys, " ".join(reason.split())) for keys, _, reason in rows)


def answered(keys: str) -> KeyRule:
    """Keys that a start of a run answers with what to do (`answers.ANSWERS`)."""
    return by(keys, lambda value, source: spoken(keys.split()[0].strip("^*."), value))


def spoken(key: str, value: Any) -> str:
    """Return what a start of a run says about an unknown key, "" for nothing special."""
    return answer(key.split("."), value).partition(": ")[2].removesuffix(".")


def words(keys: str, ours: str, table: Mapping[str, Any], note: str = "") -> KeyRule:
    """Take what the table has for their word: ours, or several settings, in a tuple with a note;
    behind `- ` it is a reason.
    """

    def convert(value: Any, source: Source) -> Outcome:
        meant = table.get(str(value).lower())
        if meant is None:
            return f"no counterpart of {show(value)} is here; known are {', '.join(table)}"
        meant, said = meant if isinstance(meant, tuple) else (meant, note)
        if isinstance(meant, str) and meant.startswith("- "):
            return meant.removeprefix("- ")
        return meant if isinstance(meant, Mapping) else {ours: meant}, said

    return KeyRule(keys, convert, ours)


def same(keys: str, ours: str = "", note: str = "") -> KeyRule:
    """Take a value as what it is for our setting."""
    name = ours or home(keys.split()[0].removeprefix("^"))
    if name in _WORDS:
        return words(keys, name, _WORDS[name], note)
    said = note or _NOTES.get(name, "")
    read = _READ.get(name) or _typed((settings() | options())[name].allowed)

    def convert(value: Any, source: Source) -> Outcome:
        if value is None:
            return "null there: what is not set here has our default"
        return {name: read(value)}, said

    return KeyRule(keys, convert, name)


def to(keys: str, ours: str, change: Callable[[Any], Any], note: str = "") -> KeyRule:
    """Take what `change` makes of the value."""
    return by(keys, lambda value, source: ({ours: change(value)}, note))


def alike(keys: str) -> tuple[KeyRule, ...]:
    """Take each `key` as the setting that it is by its name, each `key=ours` as ours."""
    pairs = (key.partition("=") for key in keys.split())
    return tuple(same(key, ours) for key, _, ours in pairs)


@cache
def home(key: str) -> str:
    """Return our setting for a key of theirs: of `answers.PEERS`, or the only one of its name."""
    leaf = key.rpartition(".")[2]
    known = settings().items()
    found = [name for name, one in known if name.rpartition(".")[2] == leaf and not one.section]
    if leaf not in PEERS and len(found) != 1:
        raise LookupError(f"{key} has no single equivalent: name the setting")
    return PEERS.get(leaf) or found[0]


# ---- how a setting of ours is read ----


def _typed(allowed: str) -> Callable[[Any], Any]:
    """Return a reader of values for a setting, by what it allows."""
    readers = {"true or false": boolean, "an integer": whole, "a number": number}
    found = next((read for kind, read in readers.items() if allowed.startswith(kind)), None)
    return found or (_numbers if "each a number" in allowed else lambda value: value)


def _numbers(value: Any) -> Any:
    return [number(part) for part in value] if isinstance(value, list) else number(value)


def _file_name(value: Any) -> str:
    """Return a name of a run, with `_` for what a directory's name should not have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text(value)).strip(".") or "migrated"


def _mlflow_among(value: Any) -> bool:
    if "mlflow" not in (value if isinstance(value, list) else re.split(r"[\s,]+", str(value))):
        raise Untranslatable("trackers are `tracking.mlflow` and `tracking.also` here")
    return True


def _continued(value: Any) -> str:
    known = {"auto": "auto", "true": "auto", "disable": "never", "false": "never"}
    if (word := str(value).lower()) not in known:
        raise Untranslatable(f"{show(value)} is of a checkpoint of another system")
    return known[word]


_KL = {"kl": "kl", "k1": "kl", "abs": "abs", "mse": "mse", "k2": "mse", "low_var_kl": "low_var_kl",
       "k3": "low_var_kl"}  # fmt: skip
_TO_A_SHARE = ("cosine", "it falls to 0 here, to a share there")
_HALF = "- learner and engines compute in bfloat16 or float32"
_WORDS: Mapping[str, Mapping[str, Any]] = {
    "algorithm.kl_ctrl.kl_type": _KL,
    "algorithm.kl_loss_type": _KL | {
        f"{theirs}+": ours if ours == "mse" else f"{ours}+" for theirs, ours in _KL.items()},
    "learner.schedule": {
        "constant": "constant", "linear": "linear", "cosine": "cosine",
        "constant_with_warmup": "constant", "cosine_with_min_lr": _TO_A_SHARE,
        "cosine_warmup_with_min_lr": _TO_A_SHARE},
    "model.dtype": {
        "auto": "auto", "bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32",
        "fp32": "float32", "float16": _HALF, "fp16": _HALF},
}  # fmt: skip
"""Our setting -> words of others for its values."""
_READ: Mapping[str, Callable[[Any], Any]] = {
    "run.name": _file_name, "run.dir": text, "tracking.experiment": text,
    "tracking.mlflow": _mlflow_among, "checkpoint.resume": _continued,
    "checkpoint.every_steps": natural, "evaluation.every_steps": natural, "rollout.top_k": natural,
}  # fmt: skip
_NOTES = {
    "run.dir": "everything that a run writes is in it",
    "tracking.experiment": "of MLflow here",
    "rollout.rollout_batch_size": "prompts, which are groups",
}


# ---- rules that several systems share ----

LAYOUT = "how memory is laid out there; here `learner.zero_stage` and `learner.deepspeed`"
A_PART = "a part of `task.train` and `task.eval`, behind the name and its configuration"
_PAGE = "docs/how-to/data.md"
DATA_FILES = f"how rows are read; a task knows its own ({_PAGE})"
SUMMED = (
    "in the reward of every token; estimators that compare groups sum it up before their baseline "
    "here"
)
NO_CRITIC = "- it needs a critic, and there is none here: grpo is used instead"
COMPONENTS: Settings = {
    "algorithm.adv_estimator": "raw", "algorithm.whiten_advantages": True,
    "task.rewards_norm": "group",
}  # fmt: skip
"""Each component of a reward normalised by itself."""
PROCESSES = "how its processes are placed and started; `cluster` says that here"
_ROWS, _OTHER_FILES = (".jsonl", ".json"), (".parquet", ".csv", ".arrow", ".txt", ".tsv", ".py")
_CONFIGURED = {"openai/gsm8k": "openai/gsm8k:main"}
"""Data sets that have no configuration of the name `default`."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]*){0,2}")


def data(keys: str, ours: str, split: str = "", usual: str = "") -> KeyRule:
    """Take data that can be read as it is: a JSONL file, or a name on the hub. split: keys of its
    split there, one of which may be given; usual: the split that is taken there by default.
    """

    def convert(value: Any, source: Source) -> Outcome:
        parts = value if isinstance(value, list) else [value]
        if len(parts) != 1:
            return f"{len(parts)} data sets; a run has one: join them into one file"
        name = text(parts[0])
        rows, hub = name.endswith(_ROWS), _NAME.fullmatch(name) and not name.endswith(_OTHER_FILES)
        if not rows and not hub:
            return f"name the rows as `{ours}`, with `task.layout` for their columns ({_PAGE})"
        name = _CONFIGURED.get(name, name)
        part = next((source.find(key) for key in split.split() if source.has(key)), usual)
        own = "test" if ours == "task.eval" else "train"
        if part and part != own and not rows and name.count(":") < 2:
            name = f"{name}:{part}" if ":" in name else f"{name}:default:{part}"
        return {ours: name}

    return KeyRule(keys, convert, ours)


def adapters(rank: str, alpha: str, layers: str, switch: str = "") -> tuple[KeyRule, ...]:
    """Take LoRA's settings, where the rank is above 0 and the switch, if there is one, on."""

    def used(source: Source) -> bool:
        switched = not switch or source.on(switch.strip("^"))
        return switched and source.number(rank.strip("^"), 16 if switch else 0) > 0

    def layer_names(value: Any) -> Any:
        return "all-linear" if value in ("all-linear", "all") else texts(value)

    rules = (
        to(rank, "model.lora.rank", whole),
        to(alpha, "model.lora.alpha", number),
        to(layers, "model.lora.target_modules", layer_names),
    )
    return tuple(one.when(used, "no adapters: the weights are trained") for one in rules)


def if_true(keys: str, found: Settings, off: str = "off") -> KeyRule:
    """Set all of these where the value is true."""
    return by(keys, lambda value, source: found if boolean(value) else off)


def betas(first: str, second: str) -> KeyRule:
    """Take Adam's two numbers, 0.9 and 0.999 where one is not given."""
    names = [key.strip("^") for key in (first, second)]
    return by(f"{first} {second}", lambda value, source: {
        "learner.betas": [source.number(names[0], 0.9), source.number(names[1], 0.999)]
    })  # fmt: skip


def rows(keys: str, longest: Callable[[Source], float]) -> KeyRule:
    """Take a micro-batch in rows as so many tokens of the longest sequence."""

    def convert(value: Any, source: Source) -> Outcome:
        row = longest(source)
        found = {"learner.tokens_per_micro_batch": int(whole(value) * row)}
        return found, f"sequences there, tokens here: x {row:g}, the longest sequence"

    return by(keys, convert)


def share_of_steps(keys: str, updates: Callable[[Source], float]) -> KeyRule:
    """Take a warm-up that is a share of all updates. updates: how many these are, 0 for what the
    file does not say.
    """

    def convert(value: Any, source: Source) -> Outcome:
        if number(value) and updates(source) <= 0:
            return "a share of all steps; set it in updates, in `learner.warmup_steps`"
        found = {"learner.warmup_steps": math.ceil(round(number(value) * updates(source), 6))}
        return found, "a share of all steps there, updates here"

    return by(keys, convert)


def importance(**found: Any) -> dict[str, Any]:
    """Return settings of `algorithm.importance`."""
    return {f"algorithm.importance.{name}": value for name, value in found.items()}


def interval(source: Source, low: str, high: str, both: str = "") -> Settings:
    """Return the clip interval: each side by its key, else that of both (of low), else 0.2."""
    width = source.number(both or low, 0.2)
    sides = {"low": source.number(low, width), "high": source.number(high, width)}
    return {f"algorithm.clip_ratio_{side}": found for side, found in sides.items()}


def clip(keys: str, high: str = "") -> KeyRule:
    """Take the width of the clip interval, its lower side alone where `high` is given."""

    def convert(value: Any, source: Source) -> Outcome:
        sides = ("low",) if high and source.has(high) else ("low", "high")
        return {f"algorithm.clip_ratio_{side}": number(value) for side in sides}

    return by(keys, convert)


def dual_clip(keys: str, note: str = "") -> KeyRule:
    """Take a cap of the loss of negative advantages, null for none."""

    def convert(value: Any, source: Source) -> Outcome:
        if value is None:
            return {"algorithm.dual_clip_loss": False}
        return {"algorithm.dual_clip_loss": True, "algorithm.clip_ratio_c": number(value)}, note

    return by(keys, convert)


def ratio_level(
    keys: str, response: str, found: Callable[[Source], Settings], note: str = ""
) -> KeyRule:
    """Take the level of the ratio. response: their word for one ratio per response; found: the
    clip interval that it has then, and what else.
    """

    def convert(value: Any, source: Source) -> Outcome:
        if str(value) == response:
            said = note + spoken(keys.strip("^"), value)
            return {"algorithm.policy_loss": "gspo", **found(source)}, said
        table = {"token": "- the losses have the ratio of tokens", response: ""}
        return words(keys, "algorithm.policy_loss", table).convert(value, source)

    return by(keys, convert)
