"""What to do about a key of another system whose meaning is not that of one setting of ours.

Runs in: any process. Hides which values matter. Invariant: every setting that an answer names is
one of the schema, with a value that it takes (a test holds it). Keys with one setting as answer
are in `peers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Answer:
    """An answer. keys: patterns of the ends of dotted paths, of whole ones behind `^`; when: for
    which values it is.
    """

    peers: str
    keys: str
    says: str
    when: Callable[[Any], bool] | None = None


_LEVEL = "set `algorithm.anchor: recomputed` and `algorithm.importance.level: token`"
_SETS = f"{_LEVEL}, and choose `algorithm.importance.mode` and `algorithm.importance.upper`"

ANSWERS = (
    Answer(
        "TRL",
        "loss_type",
        "choose `algorithm.policy_loss: gspo`, with clip ratios of its scale, and "
        "`algorithm.loss_agg_mode: seq-mean-token-sum`",
        lambda value: value == "luspo",
    ),
    Answer(
        "ROLL, TRL, AReaL",
        "importance_sampling importance_sampling_level",
        "choose `algorithm.policy_loss: gspo`, with clip ratios of its scale: its ratio is that of "
        "a whole response",
        lambda value: value in ("seq", "sequence"),
    ),
    Answer(
        "ROLL, TRL, AReaL",
        "importance_sampling importance_sampling_level",
        "it is the level of the ratio in the loss, and there is nothing to set for tokens: "
        "`algorithm.policy_loss: ppo_clip` has their ratio",
    ),
    Answer(
        "ROLL",
        "train_infer_correction*",
        f"{_SETS}: weights between engine and learner; its filters are rules of "
        "`algorithm.rejection`: `score: w` for the ratio, `difference` for that of probabilities",
    ),
    Answer(
        "ROLL",
        "norm_mean_type norm_std_type",
        "`algorithm.reward_norm: {mean: group, std: batch}` is both here (null is none), for an "
        "estimator that does not divide by the group's deviation itself, such as "
        "`algorithm.adv_estimator: raw`; ROLL's reward_clip, after it, is "
        "`algorithm.reward_clip_after`",
    ),
    Answer(
        "TRL",
        "multi_objective_aggregation",
        "`task.rewards_norm: group` normalises each component before they are added up, and "
        "`algorithm.whiten_advantages: true` whitens what comes of it",
        lambda value: value == "normalize_then_sum",
    ),
    Answer("OpenRLHF", "vllm_is_*", f"{_SETS}: weights between engine and learner"),
    Answer(
        "OpenRLHF",
        "train.train_batch_size ^train_batch_size",
        "in OpenRLHF it is the minibatch: `learner.ppo_mini_batch_size`, in groups (divide by "
        "samples per prompt); in verl it is the batch: `rollout.rollout_batch_size`, in groups",
    ),
    Answer(
        "TRL",
        "epsilon_high",
        "for CISPO it is a cap of the ratio itself: set `algorithm.clip_ratio_high` to one less, "
        "and `algorithm.clip_ratio_low: 1.0`",
        lambda value: isinstance(value, int | float) and value >= 1,
    ),
    Answer(
        "TRL",
        "vllm_importance_sampling_clip_min vllm_importance_sampling_min",
        "`algorithm.importance.lower` is that bound here",
    ),
    Answer(
        "AReaL",
        "m2_threshold",
        "it is another algorithm than the paper's, whose is here: `algorithm.policy_loss: "
        "{name: m2po, budget: 0.04}`; choose that, or `algorithm.policy_loss: ppo_clip`",
    ),
    Answer(
        "AReaL",
        "behav_imp_weight_cap",
        f"{_LEVEL}, `algorithm.importance.mode: mask`, and the cap as "
        "`algorithm.importance.upper`: tokens above it are left out",
    ),
    Answer(
        "AReaL",
        "adv_norm.*",
        "of advantages: `algorithm.whiten_advantages: true` takes mean and deviation of the batch, "
        "over all tokens of the step; other levels are not here",
    ),
    Answer(
        "AReaL",
        "mean_level std_level",
        "of rewards they are `algorithm.reward_norm: {mean: group, std: batch}`, with the "
        "deviation about the batch's mean; AReaL's is about what was subtracted: "
        "`algorithm.adv_std_level: batch_centered` for group and batch, batch_raw without a mean",
    ),
    Answer(
        "verl",
        "rollout_rs rollout_rs_threshold*",
        "each of its options is a rule of `algorithm.rejection`: `seq_max_k3` is `{score: k3, "
        "reduce: max, upper: ...}`, `token_k1` `{score: k1, reduce: token, ...}`; for k1, "
        "`lo_hi` is `lower: log(lo), upper: log(hi)`, which keeps 1/hi to 1/lo of the ratio of "
        "learner to engine",
    ),
    Answer(
        "slime, verl, SkyRL",
        "rs_veto_threshold rollout_token_veto_threshold outlier_token_is_threshold_low",
        "a rule of `algorithm.rejection`, `{score: w, reduce: min, lower: ...}`, leaves out "
        "responses with such a token",
    ),
    Answer(
        "slime",
        "use_opsm opsm_delta",
        "set `algorithm.opsm_delta`, and `algorithm.opsm_against: anchor` for the log-probs of the "
        "learner, which slime takes unless `use_rollout_logprobs` is set",
    ),
    Answer(
        "SkyRL",
        "outlier_token_is_threshold_high",
        "a rule of `algorithm.rejection`, `{score: w, reduce: max, upper: ...}`, leaves out "
        "responses with such a token",
    ),
    Answer(
        "SkyRL",
        "sequence_mask_metric geo_mask_* product_mask_* token_mask_is_threshold_*",
        "a rule of `algorithm.rejection`: `{score: w, reduce: mean, ...}` is the geometric mean, "
        "with `sum` the product, with `token` each token",
    ),
    Answer(
        "SkyRL",
        "token_tis_ratio_clip_high tis_imp_ratio_cap",
        f"{_LEVEL}, and the cap as `algorithm.importance.upper`",
    ),
    Answer("SkyRL", "tis_ratio_type", "`algorithm.importance.level` is that here"),
    Answer("NeMo-RL", "truncated_importance_sampling*", f"{_SETS}: truncate, or mask for IcePop"),
    Answer("all", "critic.* critic", "there is no critic here: advantages come from groups"),
    Answer(
        "verl, OpenRLHF",
        "reward_model.* reward_model reward_pretrain remote_rm_url",
        "a task scores the responses here, in its own code: `task.name: my_module:MyTask` may ask "
        "a model or a service (docs/tasks.md)",
    ),
    Answer(
        "TRL, verl",
        "report_to logger trainer.logger use_wandb wandb wandb.*",
        "runs are tracked by MLflow, at `tracking.uri` (null: a database in `run.dir`)",
    ),
    Answer(
        "AReaL, PipelineRL",
        "steps_per_iteration",
        "it is `learner.ppo_epochs` times the minibatches of `learner.ppo_mini_batch_size` here",
    ),
    Answer(
        "verl",
        "trainer.nnodes nnodes num_nodes",
        "the cluster decides: all nodes of the Ray cluster are used, `learner.ranks` and "
        "`cluster.rollout_actors.max` say how many processes",
    ),
)


def answer(path: Sequence[str], value: Any) -> str:
    """Say what to do about an unknown key, "" where nothing special is known."""
    whole = ".".join(path)
    for one in ANSWERS:
        if one.when is not None and not one.when(value):
            continue
        for pattern in one.keys.split():
            if fnmatchcase(whole, pattern.removeprefix("^")) or fnmatchcase(whole, f"*.{pattern}"):
                return f"`{path[-1]}`: {one.says}."
    return ""
