"""Makes a draft one that a run accepts: what the schema refuses is left, with the schema's reason.

Runs in: a terminal. Hides pydantic's errors. Invariants: the reasons are the sentences with which a
start of a run would refuse the setting; after `settle`, `load_config` accepts the settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from async_grpo.algo.catalog import ESTIMATORS, POLICY_LOSSES
from async_grpo.config.checks import RuleError
from async_grpo.config.docs import options, settings, show
from async_grpo.config.load import ConfigError, resolve
from async_grpo.config.schema import Config
from async_grpo.config.unused import unused
from async_grpo.tasks.registry import HELD_OUT
from async_grpo.tools.migrate.draft import Draft, Kept

_NAMED = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)*)(?:: [^`]*)?`")
_CHOSEN = ["algorithm.adv_estimator", "algorithm.policy_loss", "rollout.rollout_batch_size"]
"""What others give way to, where a rule names both."""
_LONGEST = 1_000
"""Characters of a text; longer ones are no names of anything."""


_FILTER = "replay.filter_groups"
_MINI, _TOKENS = "learner.ppo_mini_batch_size", "learner.tokens_per_micro_batch"
_MODE = "algorithm.loss_agg_mode"


def settle(draft: Draft) -> Config:
    """Complete the draft, take out what is refused, and return what it amounts to."""
    for name in list(draft.kept):
        value = draft.kept[name].value
        if isinstance(value, str) and (len(value) > _LONGEST or not value.isprintable()):
            draft.leave(name, "longer than a name, or not printable")
    _complete(draft)
    while True:
        _drop_options(draft)
        _fit(draft)
        found = _first_problem(draft)
        if isinstance(found, Config):
            return found
        names, sentence = found
        if _MODE in names and _averages_responses(draft, sentence):
            continue
        kept = [name for name in names if name in draft.kept]
        if not kept:
            raise AssertionError(f"what is left is refused all the same: {sentence}")
        draft.leave(min(kept, key=_CHOSEN.count), sentence)
        _complete(draft)


def _drop_options(draft: Draft) -> None:
    """Leave options of what is not chosen."""
    for name in [name for name in draft.kept if name in options()]:
        setting, chosen, _ = name.rsplit(".", 2)
        known = draft.kept.get(setting)
        value = settings()[setting].default if known is None else known.value
        if value != chosen:
            draft.leave(name, f"an option of {chosen}, and `{setting}` is {value}")


def _complete(draft: Draft) -> None:
    """Fill in what a run needs and the file does not say."""
    where = "not in the file"
    needed: list[tuple[tuple[str, ...], Any, str]] = [
        (("run.name",), "migrated", where),
        (("run.dir",), "runs/{name}", where),
        (("run.total_steps", "run.epochs"), 500, f"{where}: learner steps to train"),
        (("model.path",), "path/to/the/model", f"{where}: directory, or name on the hub"),
    ]
    for names, value, note in needed:
        if not draft.kept.keys() & set(names):
            draft.kept[names[0]] = Kept(value, [], note)
    if "task.name" not in draft.kept:
        _guess_task(draft)


def _guess_task(draft: Draft) -> None:
    """Name a task by what the file's data is called, and rows to train."""
    given = draft.source.given.items()
    said = " ".join(f"{key} {value}".lower() for key, value in given if _DATA.search(key.lower()))
    found = next(((name, rows) for name, rows in _TASKS.items() if name in said), None)
    name, rows = found or ("jsonl", "rows.jsonl")
    how = "guessed from its data" if found else "not in the file"
    draft.put("task.name", name, f"{how}: a built-in task, or a class of yours (docs/tasks.md)")
    if "task.train" not in draft.kept:
        draft.put("task.train", rows, f"{how}: the rows to train")
        if found and "task.eval" not in draft.kept:
            draft.put("task.eval", HELD_OUT[name], f"{how}: the rows to evaluate")


_DATA = re.compile(r"data|file|env|reward")
_TASKS = {"gsm8k": "openai/gsm8k:main", "math": "DigitalLearningGmbH/MATH-lighteval"}
"""Built-in tasks that data is named after, and their rows."""


# ---- what has to fit together ----


def _fit(draft: Draft) -> None:
    """Change sizes that would be refused for each other, and say so."""
    _fit_filter(draft)
    kept = draft.kept
    batch, mini = _number(draft, "rollout.rollout_batch_size"), kept.get(_MINI)
    if mini is not None and _number(draft, _MINI) > 0 and 0 < batch < 10**6 and batch % mini.value:
        note = f"{mini.value} does not divide the batch of {batch} groups"
        sizes = range(1, min(mini.value, batch) + 1)
        _change(mini, max(size for size in sizes if batch % size == 0), note)
    longest = _number(draft, "rollout.prompt_length") + _number(draft, "rollout.response_length")
    if 0 < _number(draft, _TOKENS) < longest < 2**40:
        note = f"raised to the longest row, {longest} tokens"
        _change(kept.setdefault(_TOKENS, Kept(longest)), longest, note)
    most, every = _number(draft, "replay.max_staleness") + 1, kept.get("weight_sync.every_steps")
    if every is not None and _number(draft, "weight_sync.every_steps") > most:
        note = f"at most `replay.max_staleness` + 1 here, not {every.value}"
        _change(every, most, note)


def _averages_responses(draft: Draft, sentence: str) -> bool:
    """Give a loss with one ratio per response its aggregation; say whether that is a change."""
    loss = draft.kept.get("algorithm.policy_loss")
    if loss is None or not POLICY_LOSSES.require(loss.value).response_ratio:
        return False
    mode = draft.kept.setdefault(_MODE, Kept(None))
    if mode.value == "seq-mean-token-mean":
        return False
    _change(mode, "seq-mean-token-mean", sentence)
    return True


def _change(kept: Kept, value: Any, note: str) -> None:
    kept.value, kept.note = value, f"{kept.note}; {note}" if kept.note else note


def _fit_filter(draft: Draft) -> None:
    """Let a filter be, with estimators for which groups of equal rewards carry signal."""
    name, on = draft.kept.get("algorithm.adv_estimator"), draft.kept.get(f"{_FILTER}.enable")
    traits = ESTIMATORS.get(name.value) if name is not None else None
    if traits is None or traits.compares or on is None or on.value is not True:
        return
    why = f"with {name.value if name else ''} a group of equal rewards carries signal"
    if draft.kept.keys() & {f"{_FILTER}.accuracy_low", f"{_FILTER}.accuracy_high"}:
        draft.put(f"{_FILTER}.zero_variance", False, why)
    else:
        draft.leave(f"{_FILTER}.enable", why)


def _number(draft: Draft, name: str) -> int:
    known = draft.kept.get(name)
    value = settings()[name].default if known is None else known.value
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


# ---- what the schema says ----


def _first_problem(draft: Draft) -> Config | tuple[list[str], str]:
    """Return the configuration, or the settings that a refusal names, and its sentence."""
    try:
        config = Config.model_validate(draft.tree())
        for path, sentence in unused(config, before={}, overridden=()):
            return [".".join(path)], sentence
        resolve(config, now=datetime(2000, 1, 1))
    except ValidationError as error:
        return _refused(error)
    except ConfigError as error:
        return list(_names(str(error))), " ".join(str(error).split())
    except OSError as error:  # a name that no file can have
        return ["model.path", "task.train", "task.eval", "run.dir"], f"{error.strerror}"
    return config


def _refused(error: ValidationError) -> tuple[list[str], str]:
    problem = error.errors(include_url=False)[0]
    if problem["type"] == "value_error":
        rule = problem["ctx"]["error"]
        sentence = rule.sentences[0] if isinstance(rule, RuleError) else str(rule)
        return list(_names(sentence)), " ".join(sentence.split())
    parts = [str(part) for part in problem["loc"]]
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in settings() and not settings()[name].section:
            return [name], f"`{name}` allows {settings()[name].allowed}"
    raise AssertionError(f"an error about no setting: {show(problem)}")


def _names(sentence: str) -> Iterator[str]:
    """Find the settings that a sentence names, also those that it names without their section."""
    for named in _NAMED.findall(sentence):
        yield from (
            name
            for name, one in settings().items()
            if not one.section and (name == named or name.endswith(f".{named}"))
        )
        for name in options():
            setting, _, key = name.rsplit(".", 2)
            if named in (key, f"{setting}.{key}"):
                yield name
