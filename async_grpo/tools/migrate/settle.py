"""Makes a draft one that a run accepts: what the schema refuses is left, with the schema's reason.

Runs in: a terminal. Hides pydantic's errors. Invariants: the reasons are the sentences with which a
start of a run would refuse the setting; after `settle`, `load_config` accepts the settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime

from pydantic import ValidationError

from async_grpo.algo.catalog import ESTIMATORS, POLICY_LOSSES
from async_grpo.config.checks import RuleError
from async_grpo.config.docs import options, settings, show
from async_grpo.config.load import ConfigError, resolve
from async_grpo.config.schema import Config
from async_grpo.config.unused import unused
from async_grpo.tasks.registry import HELD_OUT
from async_grpo.tools.migrate.draft import Draft

_NAMED = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)*)(?:: [^`]*)?`")
_CHOSEN = ["algorithm.adv_estimator", "algorithm.policy_loss", "rollout.rollout_batch_size"]
"""What others give way to, where a rule names both."""
_LONGEST = 1_000
"""Characters of a text; longer ones are no names of anything."""


_FILTER = "replay.filter_groups"
_MINI, _TOKENS = "learner.ppo_mini_batch_size", "learner.tokens_per_micro_batch"
_STALE, _EVERY = "replay.max_staleness", "weight_sync.every_steps"
_MODE, _AVERAGE = "algorithm.loss_agg_mode", "seq-mean-token-mean"
_NEEDED = (
    (("run.name",), "migrated", ""),
    (("run.dir",), "runs/{name}", ""),
    (("run.total_steps", "run.epochs"), 500, ": learner steps to train"),
    (("model.path",), "path/to/the/model", ": directory, or name on the hub"),
)
"""What a run needs one of, and has where the file does not say it."""
_DATA = re.compile(r"data|file|env|reward")
_TASKS = {"gsm8k": "openai/gsm8k:main", "math": "DigitalLearningGmbH/MATH-lighteval"}
"""Built-in tasks that data is named after, and their rows."""


def settle(draft: Draft) -> Config:
    """Complete the draft, take out what is refused, and return what it amounts to."""
    for name in list(draft.kept):
        value = draft.kept[name].value
        if isinstance(value, str) and (len(value) > _LONGEST or not value.isprintable()):
            draft.leave(name, "longer than a name, or not printable")
    while True:
        _complete(draft)
        _drop_options(draft)
        _fit(draft)
        found = _first_problem(draft)
        if isinstance(found, Config):
            return found
        names, sentence = found
        loss = draft.kept.get("algorithm.policy_loss")
        of_responses = loss is not None and POLICY_LOSSES.require(loss.value).response_ratio
        if _MODE in names and of_responses and draft.value(_MODE) != _AVERAGE:
            draft.change(_MODE, _AVERAGE, sentence)
            continue
        kept = [name for name in names if name in draft.kept]
        if not kept:
            raise AssertionError(f"what is left is refused all the same: {sentence}")
        draft.leave(min(kept, key=_CHOSEN.count), sentence)


def _complete(draft: Draft) -> None:
    """Fill in what a run needs and the file does not say."""
    for names, value, what in _NEEDED:
        if not draft.kept.keys() & set(names):
            draft.put(names[0], value, f"not in the file{what}")
    if "task.name" in draft.kept:
        return
    given = draft.source.given.items()
    said = " ".join(f"{key} {value}".lower() for key, value in given if _DATA.search(key.lower()))
    found = next(((name, rows) for name, rows in _TASKS.items() if name in said), None)
    name, rows = found or ("jsonl", "rows.jsonl")
    how = "guessed from its data" if found else "not in the file"
    draft.put("task.name", name, f"{how}: a built-in task, or a class (docs/how-to/data.md)")
    if "task.train" not in draft.kept:
        draft.put("task.train", rows, f"{how}: the rows to train")
        if found:
            draft.put("task.eval", HELD_OUT[name], f"{how}: the rows to evaluate")


def _drop_options(draft: Draft) -> None:
    for name in [name for name in draft.kept if name in options()]:
        setting, chosen, _ = name.rsplit(".", 2)
        if draft.value(setting) != chosen:
            draft.leave(name, f"an option of {chosen}, and `{setting}` is {draft.value(setting)}")


def _fit(draft: Draft) -> None:
    """Change sizes that would be refused for each other, and say so."""
    _fit_filter(draft)
    batch, mini, tokens, stale, every, *lengths = (
        value if isinstance(value := draft.value(name), int) else 0
        for name in ("rollout.rollout_batch_size", _MINI, _TOKENS, _STALE, _EVERY,
                     "rollout.prompt_length", "rollout.response_length")
    )  # fmt: skip
    if mini > 0 and 0 < batch < 10**6 and batch % mini:
        sizes = range(1, min(mini, batch) + 1)
        note = f"{mini} does not divide the batch of {batch} groups"
        draft.change(_MINI, max(size for size in sizes if batch % size == 0), note)
    if 0 < tokens < sum(lengths) < 2**40:
        draft.change(_TOKENS, sum(lengths), f"the longest sequence has {sum(lengths)} tokens")
    if every > stale + 1:
        draft.change(_EVERY, stale + 1, f"at most `{_STALE}` + 1 here, not {every}")


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
