"""Rules of frozen models and of the judges that ask them.

Runs in: any process. Invariant: as of `checks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from async_grpo.config.algorithm import LIVE
from async_grpo.config.frozen import FrozenModel
from async_grpo.config.operation import EngineConfig
from async_grpo.config.schema import Config
from async_grpo.config.section import Section
from async_grpo.config.vllm_keys import refused_arguments


def frozen_models(config: Config) -> Iterator[str]:
    """Find frozen models that nobody uses, or that cannot do what they are used for."""
    algorithm = config.algorithm
    used = [("algorithm.distill.teacher", name) for name in algorithm.distill.frozen]
    used += [("algorithm.sft_model", name) for name in [algorithm.sft_model] if name is not None]
    if LIVE in algorithm.distill.teachers:
        yield from _logprobs(config, "cluster.engine", config.cluster.engine)
    if LIVE in config.frozen:
        yield f"`frozen.{LIVE}` has the name of the policy: choose another."
    used += [(f"{key}.model", one.model) for key, one in config.judges.items()]
    for key, model in used:
        if model not in config.frozen:
            there = ", ".join(config.frozen) or "none"
            yield f"`{key}` is {model}, and `frozen` has no model of that name; there are: {there}."
    for name, one in config.frozen.items():
        yield from _frozen_model(config, name, one, [key for key, of in used if of == name])


def _frozen_model(config: Config, name: str, model: FrozenModel, used: list[str]) -> Iterator[str]:
    """Check one of them. used: the settings that name it."""
    kinds = {
        config.judges[key.removesuffix(".model")].kind
        if key.startswith("task")
        else key.rpartition(".")[2]: key
        for key in used
    }
    if len(kinds) > 1 and "reward_model" in kinds:
        yield (
            f"`frozen.{name}` is a reward model for `{kinds['reward_model']}` and generates for "
            "others: give each a model of its own."
        )
    if (model.path is None) == (model.url is None):
        yield f"`frozen.{name}` needs a `path`, or a `url` with `served_name`, and not both."
    elif model.url is not None:
        for kind in ("teacher", "sft_model", "reward_model"):
            if kind in kinds:
                yield (
                    f"`{kinds[kind]}` is {name}, which is behind an address: log-probs and scores "
                    "need an engine of the run; give it a `path`."
                )
        if not _is_plain(model.url):
            yield (
                f"`frozen.{name}.url` must be http:// or https://, a host and a path, without a "
                "password or a query (`api_key_env` names the variable with a key)."
            )
        for key in _changed(model, {"dtype", "context_length", "engine"}):
            yield f"`frozen.{name}.{key}` has no effect on a model at an address: remove it."
        if model.served_name is None:
            yield f"`frozen.{name}.served_name` is missing: the model's name at its address."
    else:
        for key in _changed(model, {"served_name", "api_key_env", "max_concurrency", "retries"}):
            yield f"`frozen.{name}.{key}` has no effect without `url`: remove it."
        if model.engine.sleep is True:
            yield f"`frozen.{name}.engine.sleep` is true, but a frozen model has no turn to wait."
        if "teacher" in kinds:
            yield from _logprobs(config, f"frozen.{name}.engine", model.engine)
        for argument, why in refused_arguments(model.engine.vllm):
            yield f"`frozen.{name}.engine.vllm.{argument}` {why}."
    if not used:
        yield (
            f"`frozen.{name}` is used by no setting: name it in `algorithm.distill.teacher`, "
            "`algorithm.sft_model` or `task.judges.NAME.model`, or remove it."
        )


def _logprobs(config: Config, key: str, engine: EngineConfig) -> Iterator[str]:
    most, top_k = engine.vllm.get("max_logprobs", 20), config.algorithm.distill.teacher_top_k
    if isinstance(most, int) and 0 <= most < top_k:
        yield (
            f"`{key}.vllm.max_logprobs` is {most}, below `algorithm.distill.teacher_top_k`, "
            f"{top_k}: remove it, or raise it."
        )


def _is_plain(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port_is_a_number = parts.port is None or parts.port > 0
    except ValueError:
        return False
    whole = parts.scheme in ("http", "https") and bool(parts.hostname) and port_is_a_number
    return whole and "@" not in parts.netloc and not parts.query and not parts.fragment


def _changed(section: Section, keys: set[str]) -> list[str]:
    """Return those of the keys that have another value than by default."""
    fields = type(section).model_fields
    default = {key: fields[key].get_default(call_default_factory=True) for key in keys}
    return sorted(key for key in keys if getattr(section, key) != default[key])


def judges(config: Config) -> Iterator[str]:
    """Find settings of a judge that contradict each other."""
    for key, judge in config.judges.items():
        kind = judge.kind
        of = {"pointwise": {"criteria", "scale"}, "reward_model": {"mean", "std", "clip"}}
        asked = {"prompt", "reasoning", "max_tokens"}
        others = set().union(*(keys for each, keys in of.items() if each != kind))
        if kind == "reward_model":
            others |= asked
        for one in _changed(judge, others):
            yield f"`{key}.{one}` has no effect on a judge of kind {kind}: remove it."
        if len({*judge.criteria, "reasoning"}) <= len(judge.criteria):
            yield f"`{key}.criteria` must be different words, and none of them `reasoning`."
        room = config.frozen[judge.model].context_length if judge.model in config.frozen else None
        if kind != "reward_model" and room is not None and judge.max_tokens >= room:
            yield (
                f"`{key}.max_tokens` is {judge.max_tokens}, which leaves no room for the question: "
                f"`frozen.{judge.model}.context_length` is {room}."
            )
        if judge.scale[0] >= judge.scale[1] or judge.scale[1] - judge.scale[0] > 100:
            yield f"`{key}.scale` is {judge.scale}: the lowest grade, then a higher one, 100 apart."
        if kind == "pairwise" and config.rollout.group_size < 2:
            yield f"`{key}` compares responses of a group: `rollout.group_size` must be at least 2."
        wanted = ("{first}", "{second}") if kind == "pairwise" else ("{response}",)
        if judge.prompt is not None and (lacks := [w for w in wanted if w not in judge.prompt]):
            yield f"`{key}.prompt` does not contain {' and '.join(lacks)}."
