"""Rules that span several settings.

Runs in: any process (imports what the settings import). Hides which traits decide what belongs
together. Invariant: each rule yields one sentence that names the keys, their values and what is
allowed; a configuration that passes can be trained as far as its numbers tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from async_grpo.config.algorithm_checks import ALGORITHM_RULES
from async_grpo.config.deepspeed_keys import unknown_keys
from async_grpo.config.frozen_checks import frozen_models, judges
from async_grpo.config.plugins import check_plugins
from async_grpo.config.schema import REFUSED_DEEPSPEED_KEYS, UNBOUNDED_ORDERS, Config, FilterGroups
from async_grpo.config.section import Section
from async_grpo.config.transports import TRANSPORTS, Transport, automatic
from async_grpo.config.vllm_keys import SPECULATION, refused_arguments

_ABSENT = object()
_DECIDED_BY = {
    "train_batch_size": "rollout.rollout_batch_size",
    "train_micro_batch_size_per_gpu": "learner.tokens_per_micro_batch",
    "gradient_accumulation_steps": "learner.ppo_mini_batch_size",
    "optimizer": "learner.lr, learner.betas and learner.weight_decay",
    "scheduler": "learner.schedule and learner.warmup_steps",
    "gradient_clipping": "learner.grad_clip",
    **dict.fromkeys(("bf16", "bfloat16", "fp16"), "model.dtype"),
    "zero_optimization.stage": "learner.zero_stage",
    "sequence_parallel_size": "learner.sequence_parallel",
}
"""The setting that a user of a refused DeepSpeed key is looking for."""
WITHOUT_ROUTES = (
    "`learner.routing_replay` is r3, and on CPU vLLM does not say which experts it took: use r2."
)
HEAD_SIZES = (32, 64, 96, 128, 256)
"""Head sizes that vLLM supports on CPU as well as on GPU."""
_LARGEST = 2**53
"""Larger integers do not survive floats, and integers of 64 bits not the wire."""


class RuleError(ValueError):
    """The rules that a configuration breaks; `str(error)` is the first sentence."""

    def __init__(self, sentences: list[str]) -> None:
        super().__init__(sentences[0])
        self.sentences = tuple(sentences)


def check(config: Config) -> None:
    """Raise RuleError with a sentence for every rule that `config` breaks, SettingError for a name
    or an option that no plugin has.
    """
    known = check_plugins(config)
    run = (_sizes, _run, _tasks, _trained, _batches, _staleness, _partial)
    sentences = [sentence for rules in run for sentence in rules(config)]
    sentences += [sentence for rules in ALGORITHM_RULES for sentence in rules(config, known)]
    operation = (_learner, _evaluation, _tracking, _cluster, frozen_models, judges)
    sentences += [sentence for rules in operation for sentence in rules(config)]
    if sentences:
        raise RuleError(sentences)


def _sizes(section: Section, prefix: str = "") -> Iterator[str]:
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, Section):
            yield from _sizes(value, f"{prefix}{key}.")
        elif isinstance(value, int) and value > _LARGEST:
            yield (
                f"`{prefix}{key}` is an integer of {len(str(value))} digits; allowed is at most "
                f"2^53 = {_LARGEST}."
            )


def _run(config: Config) -> Iterator[str]:
    run, model = config.run, config.model
    if (run.total_steps is None) == (run.epochs is None):
        both = "both are" if run.epochs is not None else "neither is"
        yield f"Set exactly one of `run.total_steps` and `run.epochs`; {both} set."
    if "PYTHONPATH" in config.env_vars:
        yield "`task.env_vars` names PYTHONPATH; the task's code has that of the run: remove it."
    if run.name in (".", ".."):
        yield (
            f"`run.name` is {run.name}, which is not a name; allowed are letters, digits, `.`, "
            "`_` and `-`."
        )
    if (model.path is None) == (model.warm_start is None):
        both = "both are (set the other to null)" if model.path is not None else "neither is"
        yield (
            "Set exactly one of `model.path` (a model to load) and `model.warm_start` (a small "
            f"one to build, `{{}}` for its defaults); {both}."
        )
    if model.warm_start is not None:
        hidden, heads = model.warm_start.hidden_size, model.warm_start.heads
        if hidden % heads or hidden // heads not in HEAD_SIZES:
            yield (
                f"`model.warm_start.hidden_size` is {hidden} and `model.warm_start.heads` is "
                f"{heads}: hidden_size / heads must be one of the head sizes that the engines' "
                f"attention has everywhere: {', '.join(map(str, HEAD_SIZES))}."
            )


def _tasks(config: Config) -> Iterator[str]:
    """Find what one of several tasks cannot have for itself."""
    rollout, common = config.rollout, config.replay.filter_groups
    if config.task.streaming and config.task.train is None and not config.tasks:
        yield "`task.streaming` is set, and `task.train` is not: leave it out."
    for name, one in config.tasks.items():
        key, steps = f"tasks.{name}", [pair[0] for pair in one.weights if len(pair) == 2]
        if (
            steps[:1] != [0]
            or steps != sorted({int(step) for step in steps})
            or any(len(pair) != 2 or pair[1] < 0 for pair in one.weights)
        ):
            yield (
                f"`{key}.weight` is {one.weight}: a number above 0, or pairs of a learner step, "
                "from 0 on and rising, and a weight."
            )
            return
        for size in ("group_size", "response_length"):
            own, most = getattr(one, size), getattr(rollout, size)
            if own is not None and own > most:
                yield f"`{key}.{size}` is {own}; the most is `rollout.{size}`, {most}."
        if one.response_length is not None and config.algorithm.overlong_buffer.enable:
            yield (
                f"`{key}.response_length` is set, and `algorithm.overlong_buffer` is for one "
                "length: leave one of the two out."
            )
        if one.group_size == 1 and rollout.group_size > 1:
            yield f"`{key}.group_size` is 1: a group has responses to compare, at least 2."
        if one.rewards_norm != config.task.rewards_norm:
            yield f"`{key}.rewards_norm` is for all tasks: set `task.rewards_norm`."
        if one.verifier.on_error != config.task.verifier.on_error:
            yield f"`{key}.verifier.on_error` is for all tasks: set `task.verifier.on_error`."
        for limit in ("retire_at", "max_num_gen_batches") if one.filter_groups else ():
            own = getattr(one.filter_groups, limit)
            if own != FilterGroups.model_fields[limit].default:
                yield f"`{key}.filter_groups.{limit}` is for all tasks: set it in `replay`."
        if one.teacher is not None and one.teacher not in config.algorithm.distill.teachers:
            yield (
                f"`{key}.teacher` is {one.teacher}, which `algorithm.distill.teacher` does not "
                "name."
            )
    for start in sorted({start for one in config.tasks.values() for start, _ in one.weights}):
        held = [
            [w for step, w in one.weights if step <= start][-1] for one in config.tasks.values()
        ]
        if not any(held):
            yield f"All weights of `tasks` are 0 at step {start:g}: one of them must be above 0."
    chooses = config.replay.difficulty.choose != "all"
    if config.tasks and chooses and config.replay.quota == "issued":
        yield (
            "`replay.difficulty.choose` passes problems over, so that issued groups cannot have "
            "the shares of `tasks`: set `replay.quota: trained`."
        )
    rests = any(weight == 0 for one in config.tasks.values() for _, weight in one.weights)
    if config.replay.quota == "trained" and rests:
        yield (
            "`replay.quota` is trained, so no weight of `tasks` can be 0: nothing could follow a "
            "lost group of that task."
        )
    yield from _curriculum(config)
    if config.tasks and common.retire_at is not None:
        yield (
            "`replay.filter_groups.retire_at` takes problems out, so that `tasks` cannot have "
            "their shares: use `replay.difficulty` with `replay.quota: trained`."
        )


def _curriculum(config: Config) -> Iterator[str]:
    later = {name: set(one.after) for name, one in config.tasks.items() if one.after}
    for name, others in later.items():
        if unknown := sorted(others - set(config.tasks)):
            yield f"`tasks.{name}.after` names {unknown[0]}, and `tasks` has none of that name."
    reached, waiting = set(config.tasks) - set(later), dict(later)
    while ready := [name for name, others in waiting.items() if others <= reached]:
        reached |= {*ready}
        waiting = {name: others for name, others in waiting.items() if name not in ready}
    if waiting and not any(others - set(config.tasks) for others in waiting.values()):
        yield f"`tasks.{next(iter(waiting))}.after` waits for tasks that wait for it."
    if later and not config.evaluation.every_steps:
        yield "`tasks.NAME.after` needs evaluations: set `evaluation.every_steps`."
    if later and config.replay.quota == "trained":
        yield "`tasks.NAME.after` leaves tasks out, so `replay.quota` cannot be trained."


def _trained(config: Config) -> Iterator[str]:
    model = config.model
    for pattern in model.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"`model.freeze` has {pattern!r}, which is no regular expression: {error}."
    if model.lora is None and config.weight_sync.lora == "adapter":
        yield "`weight_sync.lora` is adapter, but `model.lora` is not set: set it, `{}` will do."
    if config.weight_sync.lora == "adapter" and config.replay.on_stale != "wait":
        yield (
            f"`weight_sync.lora` is adapter and `replay.on_stale` is {config.replay.on_stale}, but "
            "responses that go on beyond the bound would keep their adapters: set "
            "`replay.on_stale` to wait, or `weight_sync.lora` to merged."
        )
    if model.lora is not None and model.router == "frozen":
        yield (
            "`model.router` is frozen and `model.lora` is set, but with adapters all weights stay "
            "as they are: leave `model.router` out."
        )
    if model.lora is not None and model.freeze:
        yield (
            "`model.freeze` and `model.lora` are both set, but with adapters all weights stay as "
            "they are: leave one out, or choose `model.lora.target_modules`."
        )
    if model.lora is not None and model.reference_refresh_steps:
        yield (
            f"`model.reference_refresh_steps` is {model.reference_refresh_steps}, but with "
            "`model.lora` the reference is a model that no update changes: set it to 0, or train "
            "without adapters."
        )


def _batches(config: Config) -> Iterator[str]:
    rollout, learner = config.rollout, config.learner
    if rollout.rollout_batch_size % config.mini_batch_groups:
        yield (
            f"`rollout.rollout_batch_size` is {rollout.rollout_batch_size}, which is not a "
            f"multiple of `learner.ppo_mini_batch_size` {config.mini_batch_groups} (both count "
            "groups)."
        )
    if rollout.longest_row < rollout.prompt_length + rollout.response_length:
        yield (
            f"`rollout.context_length` is {rollout.context_length}, less than "
            f"`rollout.response_length` {rollout.response_length}, which is a part of it: raise it."
        )
    if rollout.longest_row > config.micro_batch_tokens:
        yield (
            f"`learner.tokens_per_micro_batch` is {learner.tokens_per_micro_batch}, but one "
            f"response may need {rollout.longest_row_in_words} tokens: make it shorter, or give at "
            f"least {config.longest_share} where the model's context is as long."
        )
    yield from _cut_sampling(config)


def _cut_sampling(config: Config) -> Iterator[str]:
    """Find what does not go with sampling from a part of the vocabulary."""
    rollout, arguments = config.rollout, config.cluster.engine.vllm
    if not rollout.most_kept:
        return
    given = rollout.model_dump(include={"top_p", "top_k", "min_p"}, exclude_defaults=True)
    cut = " and ".join(f"`rollout.{name}` is {value:g}" for name, value in given.items())
    if config.algorithm.distill.teacher is not None:
        yield (
            f"{cut}, but a teacher (`algorithm.distill.teacher`) scores over all tokens, so its "
            "log-probs cannot be compared: leave one out."
        )
    for name in sorted(SPECULATION & arguments.keys()):
        yield (
            f"{cut}, and with `cluster.engine.vllm.{name}` engines do not say from which tokens "
            "they sample: leave one out."
        )
    if "max_logprobs" in arguments:
        yield f"{cut}, which decides about `cluster.engine.vllm.max_logprobs`: remove it."


def _staleness(config: Config) -> Iterator[str]:
    every, bound = config.weight_sync.every_steps, config.replay.max_staleness
    batch, outstanding = config.rollout.rollout_batch_size, config.replay.outstanding
    capacity = (bound + 1) * batch
    if every > bound + 1:
        yield (
            f"`weight_sync.every_steps` is {every}; it is at most `replay.max_staleness` + 1 = "
            f"{bound + 1}. {every} steps need {every} x {batch} = {every * batch} groups before a "
            f"weight sync frees slots, but at most {bound + 1} x {batch} = {capacity} may be "
            "outstanding."
        )
    least = min(every * batch + 1, capacity)
    if outstanding != "auto" and not least <= outstanding <= capacity:
        yield (
            f"`replay.outstanding` is {outstanding}; allowed are auto and {least} to {capacity} "
            "groups. A batch needs more than `rollout.rollout_batch_size` x "
            "`weight_sync.every_steps`; the most is (`replay.max_staleness` + 1) x "
            "`rollout.rollout_batch_size`."
        )
    if config.replay.order in UNBOUNDED_ORDERS and config.replay.on_stale == "wait":
        yield (
            f"`replay.order: {config.replay.order}` trains groups in the order of completion. A "
            f"slow group may become older than `replay.max_staleness` = {bound}: use "
            "`replay.on_stale: mask` or `expire` with it, or order oldest or fifo."
        )


def _partial(config: Config) -> Iterator[str]:
    if not config.checkpoint.partial_rollouts:
        return
    if config.seeded:
        yield (
            "`checkpoint.partial_rollouts` is true and `rollout.seeded` is "
            f"{config.rollout.seeded} (`replay.max_staleness` is {config.replay.max_staleness}): "
            "a seeded response that is continued would be another one than its seed makes; set "
            "one of them to false or off."
        )
    if not config.replay.journal.enable:
        yield (
            "`checkpoint.partial_rollouts` is true and `replay.journal.enable` is false: only "
            "the journal knows which responses were still under way when the run ended; enable "
            "it, or set the other to false."
        )


def _learner(config: Config) -> Iterator[str]:
    for key in sorted(REFUSED_DEEPSPEED_KEYS):
        node: Any = config.learner.deepspeed
        for part in key.split("."):
            node = node.get(part, _ABSENT) if isinstance(node, dict) else _ABSENT
        if node is not _ABSENT:
            instead = f"; use {_DECIDED_BY[key]}" if key in _DECIDED_BY else "; remove it"
            yield (
                f"`learner.deepspeed.{key}` must not be given, because the learner sets it "
                f"itself{instead}."
            )
    zero = config.learner.deepspeed.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield f"`learner.deepspeed.zero_optimization` is {zero!r}; allowed is a mapping."
        return
    for key, meant in unknown_keys(config.learner.deepspeed):
        ours = _DECIDED_BY.get(meant or "")
        known = f"use {ours}" if ours else f"is `{meant}` meant?" if meant else "remove it"
        yield f"`learner.deepspeed.{key}` is no setting of DeepSpeed: {known}."
    yield from _shared(config)
    stage = config.learner.zero_stage
    if config.learner.compile and stage == 3:
        yield (
            "`learner.compile` is true and `learner.zero_stage` is 3, which gathers weights inside "
            "the layers that would be compiled: use stage 2, or leave `compile` out."
        )
    if config.learner.activation_offload and not config.learner.recomputes:
        yield (
            "`learner.activation_offload` is true and `learner.gradient_checkpointing` is false: "
            "without it every activation of every layer would move; set it to true too."
        )
    replay = config.learner.routing_replay
    if replay != "off" and config.learner.compile:
        yield (
            f"`learner.routing_replay` is {replay} and `learner.compile` is true: leave one of "
            "them out."
        )
    if replay == "r3" and config.cluster.device == "cpu":
        yield WITHOUT_ROUTES
    once = config.updates_per_step == 1
    if replay == "r2" and once and config.algorithm.anchor != "recomputed":
        yield (
            "`learner.routing_replay` is r2, but with one update per step and `algorithm.anchor: "
            f"{config.algorithm.anchor}` no earlier pass has experts to take: use recomputed."
        )
    for key, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        if zero.get(key) and stage < lowest:
            yield (
                f"`learner.deepspeed.zero_optimization.{key}` is given, but `learner.zero_stage` "
                f"{stage} keeps what it would move away: set the stage to "
                f"{lowest}{' or more' if lowest < 3 else ''}, or leave it out."
            )


def _shared(config: Config) -> Iterator[str]:
    """Find what ranks that share sequences cannot divide."""
    size, ranks = config.learner.sequence_parallel, config.learner.ranks
    if ranks % size:
        yield (
            f"`learner.ranks` is {ranks}, which is no multiple of `learner.sequence_parallel` "
            f"{size}: so many ranks share each sequence."
        )
    if config.model.warm_start is not None and config.model.warm_start.heads < size:
        yield (
            f"`learner.sequence_parallel` is {size}, more than `model.warm_start.heads` "
            f"{config.model.warm_start.heads}, which the ranks share in attention: lower it."
        )


def _evaluation(config: Config) -> Iterator[str]:
    evaluation, step_s = config.evaluation, config.watchdog.step_timeout_s
    if evaluation.every_steps and evaluation.timeout_s > step_s:
        yield (
            f"`evaluation.timeout_s` is {evaluation.timeout_s:g} and `watchdog.step_timeout_s` is "
            f"{step_s:g}: with one engine a weight sync may wait for an evaluation. Set "
            "the second to at least the first."
        )


def _tracking(config: Config) -> Iterator[str]:
    tracking = config.tracking
    if tracking.register_model is not None and not (tracking.mlflow and tracking.log_model_max_gb):
        without = "log_model_max_gb` is 0" if tracking.mlflow else "mlflow` is false"
        yield (
            f"`tracking.register_model` is {tracking.register_model}, but `tracking.{without}, so "
            "MLflow never gets the model: set that, or leave the name out."
        )


def _cluster(config: Config) -> Iterator[str]:
    cluster, actors = config.cluster, config.cluster.rollout_actors
    if actors.max is not None and actors.min > actors.max:
        yield (
            f"`cluster.rollout_actors.min` is {actors.min}; it must not exceed "
            f"`cluster.rollout_actors.max`, {actors.max}."
        )
    for name, why in refused_arguments(cluster.engine.vllm):
        yield f"`cluster.engine.vllm.{name}` {why}."
    if cluster.device == "cpu":
        yield from speculation_on_cpu(config)
    apart = cluster.device == "cpu" or cluster.layout == "split"
    if cluster.engine.sleep is True and (apart or config.replay.max_staleness > 1):
        yield (
            "`cluster.engine.sleep: true` lets learner and engine take turns on one GPU: set it to "
            "auto, or `cluster.layout` to colocated and `replay.max_staleness` to 1."
        )
    yield from _transport(config)
    if config.weight_sync.delta == "always":
        yield from _deltas(config)
    if cluster.layout == "colocated":
        yield from _colocated(config, config.learner.ranks)


def speculation_on_cpu(config: Config) -> Iterator[str]:
    """Find arguments of speculative decoding, with which vLLM samples wrongly on CPU."""
    for name in sorted(SPECULATION & config.cluster.engine.vllm.keys()):
        yield (
            f"`cluster.engine.vllm.{name}` is given, and engines are on CPU, where vLLM's "
            "speculative decoding does not sample from the model's distribution: remove it."
        )


def _transport(config: Config) -> Iterator[str]:
    files = config.weight_sync.files
    if files is not None and "://" not in files and not files.startswith("/"):
        yield f"`weight_sync.files` is {files}; allowed are an absolute path and an address."
    cluster, transport = config.cluster, TRANSPORTS.get(config.weight_sync.backend.name)
    if transport is None:  # `auto` fits
        return
    if cluster.device == "cpu" and transport.needs_gpu:
        yield (
            f"`weight_sync.backend: {transport.name}` needs GPUs, but `cluster.device` is cpu; "
            f"use {_or_auto(other for other in TRANSPORTS.values() if not other.needs_gpu)}."
        )
    if transport.colocated and cluster.layout != "colocated":
        yield (
            f"`weight_sync.backend: {transport.name}` needs learner and engine on one GPU: set "
            "`cluster.layout: colocated`, or use "
            f"{_or_auto(other for other in TRANSPORTS.values() if other.colocated is False)}."
        )
    if transport.colocated is False and cluster.layout == "colocated":
        yield (
            f"`weight_sync.backend: {transport.name}` cannot join two processes on one GPU; with "
            "`cluster.layout: colocated` use "
            f"{_or_auto(other for other in TRANSPORTS.values() if other.colocated)}."
        )


def _deltas(config: Config) -> Iterator[str]:
    """Find what leaves `weight_sync.delta: always` without effect."""
    cluster, sync, always = config.cluster, config.weight_sync, "`weight_sync.delta` is always, "
    device = "cpu" if cluster.device == "cpu" else "cuda"
    meant = automatic(device=device, colocated=cluster.layout == "colocated")
    transport = TRANSPORTS.get(sync.backend.name, TRANSPORTS[meant])
    if transport.colocated:
        yield without_deltas(transport.name)
    if transport.pushes and not sync.overlap:
        yield f"{always}which compares copies: set `weight_sync.overlap` to true, too."
    if sync.senders == "every_rank":
        yield f"{always}and one rank sends: set `weight_sync.backend.senders` to one, or auto."


def without_deltas(backend: str) -> str:
    """Refuse `weight_sync.delta: always` with a transport without copies."""
    return (
        f"`weight_sync.delta` is always, and with {backend} engines read the learner's memory: "
        "leave it out."
    )


def _or_auto(transports: Iterable[Transport]) -> str:
    return " or ".join(["auto", *(transport.name for transport in transports)])


def _colocated(config: Config, ranks: int) -> Iterator[str]:
    cluster, actors = config.cluster, config.cluster.rollout_actors
    if cluster.device == "cpu":
        yield "`cluster.layout: colocated` shares GPUs, but `cluster.device` is cpu; use split."
    if cluster.engine.tensor_parallel_size != 1:
        yield (
            f"`cluster.engine.tensor_parallel_size` is {cluster.engine.tensor_parallel_size}; with "
            "`cluster.layout: colocated` it is 1 (learner rank i and engine i share one GPU)."
        )
    for key, count in (
        ("max", actors.max),
        ("min", actors.min if actors.max is None and actors.min > ranks else None),
    ):
        if count is not None and count != ranks:
            limit = "equal" if key == "max" else "be at most"
            yield (
                f"`cluster.rollout_actors.{key}` is {count}; with `cluster.layout: colocated` it "
                f"must {limit} `learner.ranks`, {ranks} (learner rank i and engine i share one "
                "GPU)."
            )
