"""Every setting of a run: its name, type, default, range and meaning.

Runs in: any process (imports pydantic only). Hides nothing. With `algorithm` and the options of
`algo.catalog` the only home of defaults: a `Config` is immutable and complete once loaded, and no
other module supplies a default for a missing setting. `load` reads YAML and overrides, `checks`
holds the rules that span several sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from async_grpo.config.algorithm import Algorithm
from async_grpo.config.choice import Chosen, OneOf
from async_grpo.config.endpoint import EndpointConfig
from async_grpo.config.environment import EnvironmentConfig
from async_grpo.config.frozen import FrozenModel, Judge
from async_grpo.config.operation import Checkpoint, Cluster, Evaluation, Layout, Tracking, Watchdog
from async_grpo.config.section import (
    FREE,
    Fraction,
    ModuleName,
    NonNegative,
    Positive,
    Seconds,
    Section,
    fixed,
    overlaid,
    warn,
)
from async_grpo.config.transports import BACKENDS, Senders

WARM_START_POSITIONS = 512
"""Longest row, prompt and response together, of a model that is warm-started."""


class WarmStart(Section):
    """Build a small model of the Qwen2 architecture, or of Qwen3's with experts, from scratch and
    teach it the task's own solutions before RL starts: supervised training, reported as such,
    cached by its settings and the seed.
    """

    hidden_size: Positive = 128
    """Width of the model; each of its heads needs an even share of it."""
    intermediate_size: Positive = 256
    """Width of the feed-forward layers."""
    layers: Positive = 2
    """Transformer layers."""
    heads: Positive = 4
    """Attention heads."""
    experts: NonNegative = 0
    """Experts in every layer, of which a token takes two; 0: a dense model."""
    tie_embeddings: bool = False
    """Use the input embedding as the output layer too."""
    batch_size: Positive = 128
    """Problems per supervised step."""
    lr: Annotated[float, Field(gt=0)] = 3e-3
    """Learning rate of the supervised steps."""
    max_steps: NonNegative = 1000
    """Upper limit of supervised steps; 0 leaves the weights random."""
    target_accuracy: Fraction = 0.9
    """Stop the clean phase when greedy accuracy on training problems reaches this."""
    blur_accuracy: Fraction = 0.5
    """Then train on partly randomised answers until greedy accuracy has fallen to this."""
    blur_sampled_accuracy: Fraction = 0.3
    """... and until the accuracy of answers sampled at temperature 1 has fallen to this."""
    blur_noise: Fraction = 0.3
    """Share of answer tokens that the blur phase replaces at random."""
    blur_max_steps: NonNegative = 60
    """Upper limit of blur steps; 0 leaves the phase out."""
    cache_dir: Annotated[str, FREE] = "~/.cache/async_grpo"
    """Where warm-started models are kept between runs."""


class Lora(Section):
    """Train low-rank adapters (LoRA) beside the weights instead of the weights, which stay as they
    are.

    Exports get the merged weights, and so do engines, unless `weight_sync.lora` says otherwise; the
    reference is the model without its adapters.
    Adapters want a learning rate about ten times as high as the weights. A section without keys
    (`{}`) has these defaults.
    """

    rank: Positive = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The product of an adapter's two matrices is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Layers with adapters, by the ends of their names (`[q_proj, v_proj]`); never the head."""


class Model(Section):
    """Name what is trained, and from which weights."""

    on_resume = fixed("the checkpoint holds the weights and the optimizer of another model")
    path: str | None = None
    """Directory or hub name of a Hugging Face causal LM. Exactly one of `path` and `warm_start`."""
    warm_start: WarmStart | None = None
    """Build and warm-start a small model instead of loading one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type of learner and engines; `auto` is float32 on CPU and bfloat16 on GPU."""
    reference: Annotated[
        str | None, warn("the model that the KL penalty pulls to", trains=True)
    ] = None
    """Model of the KL reference (directory or hub name); null: the initial policy."""
    lora: Lora | None = None
    """Train adapters instead of the weights."""
    freeze: list[str] = Field([])
    """Regular expressions, searched in parameter names (`embed_tokens`): these weights are not
    trained. A tied head follows the embedding.
    """
    router: Literal["train", "frozen"] = "train"
    """Whether what assigns tokens to experts is trained too, in a mixture of experts."""
    reference_refresh_steps: Annotated[
        NonNegative, warn("when the reference takes over the policy's weights", trains=True)
    ] = 0
    """Learner steps after each of which the reference takes over the policy's weights; 0: never."""
    lm_head_fp32: Annotated[bool, warn("the rounding of all log-probs", trains=True)] = False
    """Compute the language-model head in float32 in learner and engines, whatever the `dtype`."""
    trust_remote_code: Annotated[bool, FREE] = False
    """Allow code that ships with a model to run."""


class Deadlines(Section):
    """Limit the phases of one weight sync, in seconds."""

    rendezvous_s: Seconds = 60.0
    """Forming the group of learner and engines (NCCL; times the senders, each of which has one), or
    telling the engines what will come.
    """
    stage_s: Seconds = 120.0
    """Copying the new weights out of the learner."""
    pause_s: Seconds = 30.0
    """An engine's current forward pass, after which it pauses."""
    bucket_s: Seconds = 20.0
    """Longest time for one bucket over NCCL. When nothing moved for twice as long (two are under
    way), both sides abort; before the first bucket `pause_s` later.
    """
    resume_s: Seconds = 30.0
    """Setting the new version label and resuming."""
    acknowledge_s: Seconds = 120.0
    """Everything above for one weight sync; an engine that takes longer is replaced."""


class WeightSync(Section):
    """Set how and when new weights reach the engines."""

    on_resume = FREE
    backend: Annotated[Chosen, OneOf("transport")] = Chosen(name="auto")
    """How weights travel; `auto`: shared memory on CPU, `ipc` colocated on GPU, else `nccl`."""
    every_steps: Annotated[Positive, warn("how old the tokens are that are trained")] = 1
    """Learner steps per weight sync; at most `replay.max_staleness + 1`."""
    kv_cache: Annotated[
        Literal["auto", "recompute", "keep"], warn("under which weights responses continue")
    ] = "auto"
    """Running responses after a weight sync: recompute their cache, or keep the old one; `auto`
    recomputes while that takes at most 5 % of an engine's time, by its own measurements.
    """
    overlap: bool = True
    """Engines take new weights while the next learner step runs, where the transport allows it."""
    self_check: bool = True
    """When an engine starts: sync perturbed weights, compare its log-probs, restore."""
    verify_every: NonNegative = 10
    """Weight syncs between those whose bytes are compared by checksum, and after which every
    engine's log-probabilities of a few fixed responses are compared with the learner's; 0 means
    never.
    """
    delta: Literal["off", "auto", "always"] = "auto"
    """Send only what changed: `auto`, to other nodes with shared memory, while it is faster than
    all weights; `always`, without comparing, and over NCCL too, where every engine process
    then keeps a copy in host memory.
    """
    files: str | None = None
    """Directory that all nodes see, or address of fsspec (`s3://bucket/weights`), by which other
    nodes get the weights with shared memory; null: through Ray's object store.
    """
    lora: Annotated[
        Literal["merged", "adapter"], warn("under which weights responses continue")
    ] = "merged"
    """What engines get of `model.lora`: `merged` weights, or each `adapter` beside those before it.
    Then weight syncs are small and pause nobody, and a response ends under the adapter that it
    began with.
    """
    deadlines: Deadlines = Deadlines()

    @property
    def senders(self) -> str:
        """Which learner ranks send where weights are pushed: `auto`, `one` or `every_rank`."""
        chosen = BACKENDS.options(self.backend.name, self.backend.values)
        return (chosen if isinstance(chosen, Senders) else Senders()).senders


_REFUSED = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler
managed_gradient_accumulation gradient_clipping bf16 fp16 bfloat16 amp torch_autocast data_types
zero_optimization.stage zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print
tensor_parallel sequence_parallel_size pipeline
"""
REFUSED_DEEPSPEED_KEYS = frozenset(_REFUSED.split())
"""Keys that the learner sets itself: `learner.deepspeed` may not contain them. Dots go inside."""


class Run(Section):
    """Name the run, its directory and its length."""

    on_resume = FREE
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "async_grpo"
    """Name of the run; part of its directory and of the MLflow run."""
    dir: str = "runs/{name}"
    """Directory of everything the run writes. `{name}` and `{time}` are filled in; with `{time}`
    every start is a separate run.
    """
    total_steps: Annotated[
        Positive | None,
        warn("the number of steps, and with a schedule the learning rate", trains=True),
    ] = None
    """Learner steps to train. Exactly one of `total_steps` and `epochs` is set."""
    epochs: Annotated[
        Positive | None,
        warn("the number of steps, and with a schedule the learning rate", trains=True),
    ] = None
    """Passes over the training prompts, rounded down to whole learner steps."""
    callbacks: dict[str, dict[str, Any]] = Field({})
    """What is called at the events of the run, with its options: `early_stopping`, or
    a custom class as `package.module:Class` (docs/how-to/notebook.md).
    """
    on_callback_error: Literal["fail", "count"] = "fail"
    """An error in a callback ends the run with the callback's name, or is counted."""


class Verifier(Section):
    """Set the child processes that score responses."""

    on_resume = FREE
    workers: Positive = 1
    """Verifier child processes per rollout actor."""
    concurrency: Positive = 1
    """Responses that a child scores at the same time, where `score` of the task is `async`."""
    timeout_s: Seconds = 10.0
    """Longest time one response may take to score; then the child is killed and replaced, or a
    coroutine cancelled.
    """
    memory_mb: Positive = 2048
    """Most private memory that a verifier child may have, in MiB; reserved addresses, mapped
    files and shared memory do not count.
    """
    on_error: Annotated[
        Literal["drop_group", "zero", "fail"],
        warn("what a response is worth that cannot be scored"),
    ] = "drop_group"
    """After a crash, timeout or non-finite reward: re-issue the group, score 0, or end the run."""


class TaskConfig(Section):
    """Name the task, its data and the weights of its rewards."""

    on_resume = warn(
        "which problems are posed: groups completed before are generated again, and problems may "
        "come twice in an epoch"
    )
    name: Annotated[str, fixed("the group ids of the run stand for problems of the other task")] = (
        "arithmetic"
    )
    """Built-in task (docs/how-to/data.md lists them: `arithmetic`, `gsm8k`, `chain`, ...) or a path
    `package.module:Class`.
    """
    train: str | None = None
    """Rows: a file of JSON lines, JSON, CSV, parquet or Arrow, also in gzip or zstd; a directory or
    pattern of these, also at an address (`s3://...`); a directory of `save_to_disk`; or a Hugging
    Face data set as `name`, `name:config`, `name:config:split`, also `name@revision`.
    """
    eval: Annotated[
        str | None, warn("what held-out accuracy means: it cannot be compared with that before")
    ] = None
    """Held-out data, same forms as `train`."""
    layout: Layout | None = None
    """Rows are in the layout of this system, for the task `jsonl`."""
    streaming: bool = False
    """Read training rows when they are posed, for data that do not fit in memory: JSON lines,
    parquet and Arrow. At most 1,000 are checked before the start.
    """
    columns: dict[str, str] = Field({})
    """Where a row has what the task wants: its key by the task's, as `{answer: final}`; a dot goes
    into a mapping. Text as `messages` is what the user asks.
    """
    options: dict[str, Any] = Field({})
    """The task's own settings, checked by the task."""
    env_vars: Annotated[list[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]], FREE] = Field([])
    """Environment variables of the driver, such as keys and proxies, that verifiers, environments,
    tools and programs have too. Their values are written nowhere.
    """
    rewards: Annotated[dict[str, float], warn("what responses are worth", trains=True)] = Field({})
    """Weight per reward component; empty means the task's own weights."""
    rewards_norm: Annotated[
        Literal["none", "group", "batch"], warn("what responses are worth", trains=True)
    ] = "none"
    """Normalise each component by its mean and deviation in the group, or in the learner step,
    before they are weighted and added up (GDPO).
    """
    judges: Annotated[
        dict[Annotated[str, Field(pattern=r"^[a-z]\w{0,31}$")], Judge],
        warn("what responses are worth", trains=True),
    ] = Field({})
    """Frozen models that grade responses, each a reward component by a name of yours with weight 1
    unless `rewards` says another. They do not grade evaluations.
    """
    max_bad_fraction: Annotated[Fraction, FREE] = 0.0
    """Share of malformed data rows that is left out, and of issued groups that may fail for good
    (early in a run of 1,000 groups, or of all if there are fewer).
    """
    verifier: Verifier = Verifier()


LEAST_GROUP_S, TOKEN_S = 600.0, 0.06
"""Longest time of a group of short responses, and of one token of long ones, in seconds: twice what
a token takes in a full engine of a large model.
"""
MOST_KEPT = 512
"""Most tokens of a set that is kept for the learner."""


class RolloutConfig(Section):
    """Set what is sampled: groups, lengths, temperature."""

    on_resume = warn(
        "how responses are sampled: groups completed before are generated again", trains=True
    )
    rollout_batch_size: Annotated[
        Positive, warn("how many groups a learner step trains", trains=True)
    ] = 32
    """Groups (prompts) that one learner step consumes."""
    group_size: Positive = 8
    """Responses sampled per prompt."""
    prompt_length: Annotated[
        Positive, warn("which prompts fit: groups completed before are generated again")
    ] = 512
    """Longest prompt in tokens; a longer one is refused."""
    response_length: Positive = 512
    """Longest response in tokens; of an episode, what is sampled in all of its turns."""
    turn_length: Positive | None = None
    """Longest turn of an episode in tokens; null: as long as the response may be."""
    context_length: Positive | None = None
    """Longest episode in tokens behind its prompt, with what its environment says; null:
    `response_length`.
    """
    max_turns: Positive = 16
    """Turns after which an episode ends."""
    max_open_episodes: Annotated[Positive | None, FREE] = None
    """Episodes that a rollout actor has begun and not ended, those that wait for their environments
    included; null: twice as many as its engine generates at the same time.
    """
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Sampling temperature; the learner's log-probabilities use the same."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most probable tokens that have this probability together."""
    top_k: Annotated[int, Field(ge=0, le=MOST_KEPT)] = 0
    """Sample from so many most probable tokens; 0: from all, or from 512 where `top_p` or `min_p`
    leaves tokens out.
    """
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Leave out tokens that are less probable than this share of the most probable one."""
    repetition_times: Annotated[int | None, Field(ge=2)] = None
    """End a response, or a turn of an episode, that says the same this many times in a row; it is
    scored, with the finish reason `repetition`. Null: never.
    """
    repetition_length: Positive = 32
    """Longest repeated pattern that is looked for, in tokens."""
    seeded: Annotated[
        Literal["auto", "on", "off"], warn("whether the same command samples the same responses")
    ] = "auto"
    """Seed every group by (seed, group_id); `auto` means on at `replay.max_staleness: 0` only."""
    group_timeout_s: Annotated[Seconds | None, FREE] = None
    """A group that takes longer to generate and score, or is lost, is aborted and issued again;
    null: 600, and with `response_length` above 10,000 more, 60 ms a token.
    """

    @property
    def most_kept(self) -> int:
        """Most tokens of which each one is sampled; 0: all, and no sets are kept."""
        return self.top_k or (MOST_KEPT if self.top_p < 1 or self.min_p > 0 else 0)

    @property
    def repetition(self) -> tuple[int, int] | None:
        """Longest pattern and times after which a response ends, if it does."""
        times = self.repetition_times
        return None if times is None else (self.repetition_length, times)

    @property
    def longest_row(self) -> int:
        """Longest prompt with what follows it, in tokens."""
        return self.prompt_length + (self.context_length or self.response_length)

    @property
    def longest_row_in_words(self) -> str:
        """Name the settings that bound a row, with their sum."""
        name = "response_length" if self.context_length is None else "context_length"
        behind = self.longest_row - self.prompt_length
        return (
            f"`rollout.prompt_length` {self.prompt_length} + `rollout.{name}` {behind} = "
            f"{self.longest_row}"
        )

    @property
    def longest_group_s(self) -> float:
        """Longest time that a group may take, in seconds."""
        return self.group_timeout_s or max(LEAST_GROUP_S, TOKEN_S * self.response_length)


class FilterGroups(Section):
    """Reject groups without a learning signal, and sample others instead."""

    on_resume = warn("which groups are trained, from here on")
    enable: bool = False
    """Reject groups without learning signal and generate others instead (dynamic sampling)."""
    metric: str = "score"
    """What must vary inside a group: `score` (weighted reward sum), `acc` (correct or not),
    `seq_reward` (the shaped reward) or a reward component.
    """
    zero_variance: bool = True
    """Reject groups whose values of the metric are all equal."""
    tolerance: Annotated[float, Field(ge=0)] = 1e-6
    """Values of the metric that differ by no more than this are equal."""
    accuracy_low: Fraction | None = None
    """Reject groups whose accuracy is this low or lower; null is off."""
    accuracy_high: Fraction | None = None
    """Reject groups whose accuracy is this high or higher; null is off."""
    all_truncated: bool = False
    """Reject groups whose responses all hit the response budget."""
    custom: Annotated[Chosen, OneOf("group_filter")] | None = None
    """A group filter of a plugin, which may reject more groups; null is off."""
    retire_at: Annotated[float, Field(gt=0, le=1)] | None = None
    """Pose a problem no more once this share of a group's responses was right; null is off."""
    max_num_gen_batches: Annotated[NonNegative, FREE] = 20
    """End the run after this many times `rollout_batch_size` rejections in a step; 0: no limit."""


class Difficulty(Section):
    """Prefer problems whose responses are sometimes right."""

    on_resume = warn("which problems are posed, from here on")
    choose: Literal["all", "window", "gaussian", "bandit"] = "all"
    """Which problems are posed: all; those whose pass rate is at most `width` from `target`; with a
    chance that falls with that distance like a normal density; or as often as groups of problems
    with such a rate (in fifths) had right and wrong responses. A problem without a pass rate is
    always posed; the rate is of its groups that were trained or rejected by a filter, the last one
    counts half.
    """
    target: Fraction = 0.5
    """The best pass rate."""
    width: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Largest distance from it, or the standard deviation."""
    explore: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Smallest chance to be posed, so that a rate is measured again."""
    rates_from: Annotated[str | None, FREE] = None
    """Directory of a run on the same data, with whose pass rates this one begins."""


class MixedTask(TaskConfig):
    """A task of several. What it does not say is as in `task`."""

    weight: float | list[list[float]] = 1.0
    """Its share of the groups, in proportion; or pairs of a learner step and the weight from then
    on, the first of step 0. A step counts as `rollout.rollout_batch_size` issued groups.
    """
    after: dict[str, Fraction] = Field({})
    """Pose it once the held-out accuracy of other tasks was as high, as `{sums: 0.8}`."""
    group_size: Positive | None = None
    """Responses sampled per prompt, at most `rollout.group_size`; null: as many."""
    response_length: Positive | None = None
    """Longest response in tokens, at most `rollout.response_length`; null: as long."""
    filter_groups: FilterGroups | None = None
    """Its own filter; null: `replay.filter_groups`."""
    teacher: str | None = None
    """Which of `algorithm.distill.teacher` teaches it, where its rows name none."""

    @property
    def alone(self) -> TaskConfig:
        """The task without what is for several."""
        return TaskConfig.model_validate(self.model_dump(include=set(TaskConfig.model_fields)))

    @property
    def weights(self) -> list[list[float]]:
        """Pairs of a learner step and the weight from then on."""
        return [[0, self.weight]] if isinstance(self.weight, float) else self.weight


class Wire(Section):
    """Limit what crosses processes."""

    on_resume = FREE
    max_frame_bytes: Annotated[int, Field(ge=2**16)] = 2**28
    """Largest group on its way to the queue, in bytes (8 per sampled token, 4 per
    token of context, with a teacher 4 + 8 x `teacher_top_k`, with `rollout.top_p` or `top_k` 2 + 4
    for each token that one is sampled from, and facts of its sequences)."""


class Journal(Section):
    """The record of every group on disk, in `journal/` of the run's directory."""

    on_resume = FREE
    enable: Annotated[bool, warn("whether completed groups survive the next interruption")] = True
    """Keep one: completed groups survive the queue's death, and a resumed run has them."""
    fsync: Literal["group", "interval", "never"] = "group"
    """When it is flushed: before a completed group is acknowledged (survives power loss), every
    second, or never (both survive processes).
    """


UNBOUNDED_ORDERS = ("ready",)
"""Orders that do not keep `max_staleness` by themselves, see `replay.order`."""


class Replay(Section):
    """Set staleness bound, order and journal of the replay queue."""

    on_resume = FREE
    max_staleness: Annotated[NonNegative, warn("how old a trained token may be", trains=True)] = 1
    """Strict bound on the staleness of every trained token, in learner steps; 0 is synchronous."""
    order: Annotated[
        Literal["oldest", "fifo", "ready"],
        warn("which groups are trained first, from here on", trains=True),
    ] = "oldest"
    """Ready groups leave by oldest ticket, by smallest id, or as they were completed."""
    on_stale: Annotated[
        Literal["wait", "mask", "expire"],
        warn("what becomes of groups that are too old", trains=True),
    ] = "wait"
    """Groups that would become too old: the learner waits in time, or continues and gives old
    tokens weight 0, or has the group generated again.
    """
    outstanding: Literal["auto"] | Positive = "auto"
    """Groups that may be under way or ready: as many as the learner needs, or a number of at most
    (max_staleness + 1) x `rollout.rollout_batch_size`. The fewer, the younger is what is trained.
    """
    max_attempts: Positive = 3
    """Attempts at a group that may fail (or become too old) before it is failed (or expired)."""
    filter_groups: FilterGroups = FilterGroups()
    quota: Annotated[Literal["issued", "trained"], warn("which of `tasks` comes when")] = "issued"
    """Weights of `tasks` are exact shares of the groups issued; `trained`: of those that filters
    and failures leave, a lost group is followed by one of the same task.
    """
    difficulty: Difficulty = Difficulty()
    plugins: list[ModuleName] = Field([])
    """Modules of yours that register group filters; the queue imports them: no torch in them."""
    journal: Journal = Journal()


MICRO_BATCH_TOKENS = 16384
"""Of a forward pass, where memory allows it."""


class LearnerConfig(Section):
    """Set ranks, minibatches, optimizer and DeepSpeed."""

    on_resume = warn("how the weights are updated, from the next step on", trains=True)
    ranks: Annotated[
        Positive,
        warn(
            "the order of sums, so the last bits of gradients; with zero_stage 3 it is refused",
            trains=True,
        ),
    ] = 1
    """DeepSpeed processes."""
    sequence_parallel: Annotated[
        Positive, warn("the order of sums, so the last bits of gradients", trains=True)
    ] = 1
    """Neighbouring ranks that share each sequence, for contexts whose activations one rank cannot
    hold: each has its part of the tokens, and in attention of the heads (Ulysses). A divisor of
    `ranks`, at most the model's attention heads.
    """
    zero_stage: Annotated[
        int, Field(ge=0, le=3), fixed("it decides how the optimizer's files are laid out")
    ] = 1
    """What DeepSpeed shards: nothing, optimizer states, gradients too, parameters too."""
    ppo_epochs: Positive = 1
    """Passes over each learner step's batch."""
    ppo_mini_batch_size: Positive | None = None
    """Groups per optimizer update; null means the whole batch."""
    routing_replay: Literal["off", "r2", "r3"] = "off"
    """In a mixture of experts. `r2`: later passes over a learner step take the experts of its first
    one, so that importance ratios compare log-probs under the same experts. One more forward pass,
    unless `algorithm.anchor` is `recomputed`. `r3`: all passes take the experts that the engine
    took when it sampled; engines on GPUs only.
    """
    tokens_per_micro_batch: Annotated[
        Literal["auto"] | Positive,
        warn("the order of sums, so the last bits of gradients", trains=True),
    ] = "auto"
    """Most tokens in one forward pass of one rank; a prompt that sequences share counts once.
    `auto`: 16,384, or as many as fit the memory; a resumed run keeps what it had.
    """
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: Annotated[
        list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)
    ] = Field([0.9, 0.95])
    """Decay rates of AdamW's two averages."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    warmup_steps: NonNegative = 0
    """Optimizer updates over which the learning rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine", "settle"] = "constant"
    """Course of the learning rate after the warm-up: `linear` and `cosine` fall to 0 over the run's
    optimizer updates; `settle` needs no known end: it halves the rate while stale data makes the
    policy oscillate.
    """
    ess_step_size: bool = False
    """Multiply the learning rate of each optimizer update by the root of the effective share of its
    responses, by their ratios of current to sampling policy (VCPO).
    """
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest global gradient norm."""
    gradient_checkpointing: Annotated[Literal["auto"] | bool, FREE] = "auto"
    """Recompute activations in the backward pass: less memory, about a third more time. `auto`:
    where they do not fit the memory otherwise.
    """
    activation_offload: Annotated[bool, FREE] = False
    """Keep what `gradient_checkpointing` stores, the inputs of layers, in host memory."""
    compile: Annotated[bool, warn("the rounding of log-probs and gradients", trains=True)] = False
    """Compile the decoder layers with torch.compile: a minute at the first step, and a C++ compiler
    on every node with learner ranks; not with `zero_stage` 3.
    """
    kernels: Annotated[
        Literal["auto", "none"], warn("the rounding of log-probs and gradients", trains=True)
    ] = "auto"
    """`auto`: Liger's fused kernels on GPUs, for families that they are tested with, unless
    `compile`, which fuses the same.
    """
    deepspeed: dict[str, Any] = Field({})
    """Merged into the DeepSpeed configuration; keys that this project sets itself are refused."""

    @property
    def fuses(self) -> bool:
        """Whether layers get fused kernels, where there are some."""
        return self.kernels == "auto" and not self.compile

    @property
    def recomputes(self) -> bool:
        """Whether activations are recomputed; what is kept elsewhere needs it."""
        given = self.gradient_checkpointing
        return self.activation_offload if given == "auto" else given

    @property
    def teams(self) -> int:
        """Teams of ranks, each with rows of its own."""
        return self.ranks // self.sequence_parallel


class Config(Section):
    """All settings of a run; `Trainer(config)` builds everything that they describe."""

    seed: Annotated[
        int,
        Field(ge=0, lt=2**32),
        fixed("the group ids of the run stand for problems in the order of its seed"),
    ] = 0
    """Seed of data order, warm start, minibatches, and of sampling where it is seeded."""
    run: Run = Run()
    model: Model = Model()
    frozen: Annotated[
        dict[Annotated[str, Field(pattern=r"^[a-z]\w{0,31}$")], FrozenModel],
        warn("what frozen models say of groups, from the next one on"),
    ] = Field({})
    """Models that take part and are not trained, by names of yours: `{teacher: {path: ...}}`. Each
    has an engine of its own, or an address, and is used where a setting names it.
    """
    task: TaskConfig = TaskConfig()
    tasks: Annotated[
        dict[Annotated[str, Field(pattern=r"^[a-z]\w{0,31}$")], MixedTask],
        warn("which problems are posed: groups completed before are generated again", trains=True),
    ] = Field({})
    """Several tasks, by names of yours: `{sums: {name: jsonl, train: ..., weight: 3}}`, each with
    data, rewards and verifier of its own. What one does not say is as in `task`.
    """
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    endpoint: EndpointConfig = EndpointConfig()
    wire: Wire = Wire()
    replay: Replay = Replay()
    algorithm: Algorithm = Algorithm()
    learner: LearnerConfig = LearnerConfig()
    weight_sync: WeightSync = WeightSync()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    tracking: Tracking = Tracking()
    watchdog: Watchdog = Watchdog()
    cluster: Cluster = Cluster()

    @model_validator(mode="before")
    @classmethod
    def _inherited(cls, given: Any) -> Any:
        """Give each of `tasks` what it does not say itself."""
        if not isinstance(given, Mapping) or not isinstance(given.get("tasks"), Mapping):
            return given
        common = given.get("task") or {}
        if isinstance(common, TaskConfig):
            common = common.model_dump(exclude_unset=True)
        tasks = {
            name: overlaid(common, one) if isinstance(one, Mapping) else one
            for name, one in given["tasks"].items()
        }
        return {**given, "tasks": tasks}

    @model_validator(mode="after")
    def _cross_field(self) -> Config:
        from async_grpo.config.checks import check

        check(self)
        return self

    @property
    def frozen_here(self) -> dict[str, FrozenModel]:
        """Frozen models with an engine of their own."""
        return {name: one for name, one in self.frozen.items() if one.url is None}

    @property
    def posed(self) -> str:
        """Name of the task in `tasks` that this is the configuration of (`of_task`), or ""."""
        return next(iter(self.tasks)) if len(self.tasks) == 1 else ""

    def component(self, name: str) -> str:
        """Return the name in the run of a reward component of its task: of several `task.name`."""
        return f"{self.posed}.{name}" if self.posed else name

    @property
    def posed_tasks(self) -> dict[str, TaskConfig]:
        """The tasks by name: `tasks`, or `task` alone under ""."""
        return dict(self.tasks) if self.tasks else {"": self.task}

    @property
    def judges(self) -> dict[str, Judge]:
        """The judges of all tasks, by their keys."""
        return {
            f"tasks.{task}.judges.{name}" if task else f"task.judges.{name}": judge
            for task, settings in self.posed_tasks.items()
            for name, judge in settings.judges.items()
        }

    @property
    def task_names(self) -> str:
        """What is posed, in words."""
        return ", ".join(self.tasks) or self.task.name

    @property
    def env_vars(self) -> list[str]:
        """`task.env_vars` of all tasks."""
        tasks = self.posed_tasks.values()
        return list(dict.fromkeys(name for one in tasks for name in one.env_vars))

    def of_task(self, name: str) -> Config:
        """Return the configuration as one of `tasks` has it; "": as it is."""
        if not name:
            return self
        own, rollout = self.tasks[name], self.rollout
        sizes = {
            "group_size": own.group_size or rollout.group_size,
            "response_length": own.response_length or rollout.response_length,
        }
        replay = self.replay
        if own.filter_groups is not None:
            replay = replay.unchecked_copy(update={"filter_groups": own.filter_groups})
        return self.unchecked_copy(
            update={
                "task": own.alone,
                "tasks": {name: own},
                "rollout": rollout.unchecked_copy(update=sizes),
                "replay": replay,
            }
        )

    @property
    def mini_batch_groups(self) -> int:
        """Groups per optimizer update."""
        return self.learner.ppo_mini_batch_size or self.rollout.rollout_batch_size

    @property
    def longest_share(self) -> int:
        """Most tokens of a row on one rank."""
        return -(-self.rollout.longest_row // self.learner.sequence_parallel)

    @property
    def rank_tokens(self) -> int:
        """Most tokens of a micro-batch on one rank; while `auto` is not resolved, where the choice
        begins.
        """
        given = self.learner.tokens_per_micro_batch
        return max(MICRO_BATCH_TOKENS, self.longest_share) if given == "auto" else given

    @property
    def micro_batch_tokens(self) -> int:
        """Most tokens of a micro-batch, on all ranks that share it."""
        return self.learner.sequence_parallel * self.rank_tokens

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates per learner step."""
        return self.learner.ppo_epochs * (self.rollout.rollout_batch_size // self.mini_batch_groups)

    @property
    def records_routes(self) -> bool:
        """Whether a pass before the first update records the experts that it takes."""
        replay = self.learner.routing_replay
        return replay == "r2" or (replay == "r3" and self.updates_per_step > 1)

    @property
    def max_lag_updates(self) -> int:
        """Most optimizer updates from the weights that sampled a token to its last training."""
        return (self.replay.max_staleness + 1) * self.updates_per_step - 1

    @property
    def max_outstanding(self) -> int:
        """Groups issued and not yet contained in live weights: B = (K + 1) R, or as many as set."""
        if isinstance(self.replay.outstanding, int):
            return self.replay.outstanding
        return (self.replay.max_staleness + 1) * self.rollout.rollout_batch_size

    @property
    def adapter_slots(self) -> int:
        """Adapters that an engine holds: of each version that a response may have, and one more."""
        served = self.weight_sync.lora == "adapter" and self.model.lora is not None
        return self.replay.max_staleness + 2 if served else 0

    @property
    def evaluated_task(self) -> TaskConfig:
        """The task whose held-out problems are evaluated; verified like the one that is trained."""
        other = self.evaluation.task
        if other is None:
            return self.task
        return TaskConfig(
            **other.model_dump(),
            env_vars=self.task.env_vars,
            verifier=self.task.verifier,
            max_bad_fraction=self.task.max_bad_fraction,
        )

    @property
    def seeded(self) -> bool:
        """Whether every group has its own sampling seed."""
        mode = self.rollout.seeded
        return mode == "on" or (mode == "auto" and self.replay.max_staleness == 0)
