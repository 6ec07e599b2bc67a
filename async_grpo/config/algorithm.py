"""The settings of `algorithm`: how rewards become advantages, and advantages a loss.

Runs in: any process (imports pydantic only). Hides nothing; names and options of losses and
estimators are those of `algo.catalog`, the formulas are in `async_grpo.algo`, the rules that span
several of these settings in `checks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from async_grpo.algo.catalog import ESTIMATORS
from async_grpo.config.choice import Chosen, OneOf
from async_grpo.config.section import Above0, AtLeast0, ModuleName, Positive, Section, warn


class Importance(Section):
    """Weigh tokens or responses by the proximal policy against the policy that sampled them."""

    level: Literal["none", "token", "sequence", "geometric"] = "none"
    """Importance weight of the proximal policy against the behaviour policy: per token, its product
    over the response, or its geometric mean.
    """
    mode: Annotated[Chosen, OneOf("importance")] = Chosen(name="truncate")
    """Clamp a weight into [lower, upper] (truncated importance sampling), or set it to 0 outside
    (IcePop); or a plugin's mode.
    """
    lower: AtLeast0 = 0.0
    """Smallest weight that is neither clamped nor masked."""
    upper: Above0 = 2.0
    """Largest weight that is neither clamped nor masked."""
    normalize: bool = False
    """Divide the weights, after `mode`, by their mean over all tokens (other levels: responses) of
    the optimizer step; a weight may then exceed `upper`.
    """


class RejectionRule(Section):
    """Keep tokens or responses whose score of proximal to behaviour policy is within bounds."""

    score: Literal["w", "k1", "k2", "k3", "difference"]
    """Score of a token by w, its ratio of proximal to behaviour policy: w itself, -log w,
    (log w)^2 / 2, or w - 1 - log w; or the difference of both probabilities.
    """
    reduce: Literal["token", "sum", "mean", "min", "max"]
    """Judge each token, or the whole response by the sum, mean, smallest or largest score of its
    tokens; sum and mean of `w` are its product and geometric mean.
    """
    lower: float | None = None
    """Smallest score that is kept; null is no bound."""
    upper: float | None = None
    """Largest score that is kept; null is no bound."""


def rejection_rules(value: Any) -> Any:
    """Return the rules for the one mapping {level, lower, upper} that older files hold; any other
    value as it is.
    """
    reduce = {"token": "token", "sequence": "sum", "geometric": "mean"}
    if not isinstance(value, Mapping) or not set(value) <= {"level", "lower", "upper"}:
        return value
    level, bounds = value.get("level"), {"lower": 0.5, "upper": 2.0}
    if level in reduce:
        given = {key: bound for key, bound in value.items() if key != "level"}
        return [{"score": "w", "reduce": reduce[level], **bounds, **given}]
    return [] if dict(value) in ({}, {"level": "none"}, {"level": "none", **bounds}) else value


class KlCtrl(Section):
    """Control the coefficient of the token-level KL penalty."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Keep the coefficient, or steer it after every step so that the KL goes to `target_kl`."""
    kl_type: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = "kl"
    """Estimator of the KL per token; k1, k2 and k3 are other names of kl, mse and low_var_kl."""
    kl_coef: AtLeast0 = 0.001
    """Coefficient, at the start if it is adaptive."""
    target_kl: Above0 = 0.1
    """Mean KL per token that the adaptive coefficient aims at."""
    horizon: Above0 = 10000.0
    """Responses over which the adaptive coefficient reacts: larger is slower."""


LIVE = "policy"
"""Name of the policy itself, as a teacher."""


class Distill(Section):
    """Pull the policy towards a frozen model on its own responses (on-policy distillation)."""

    teacher: str | Annotated[list[str], Field(min_length=1)] | None = None
    """Frozen model (a name under `frozen`) that says how probable it finds each sampled token;
    `policy`: the policy itself under `teacher_prompt`; null: none. Of a list, each row's `teacher`
    says which one, and the first has all other rows.
    """
    coef: Above0 = 1.0
    """Weight of the teacher's log-prob minus the policy's in a token's advantage, which is the
    policy gradient of the reverse KL; with `teacher_top_k`, of the forward KL in the loss.
    """
    reward_coef: AtLeast0 = 1.0
    """Weight of the advantages that come from rewards; 0: the teacher alone teaches."""
    teacher_prompt: str | None = None
    """What the teacher sees instead of the prompt's text (of a chat: its last message), with
    `{prompt}` and, where wanted, `{solution}`; null: what the policy sees.
    """
    teacher_top_k: Annotated[int, Field(ge=0, le=20)] = 0
    """0: the teacher judges the sampled token. Above 0: the loss is the forward KL to the teacher's
    distribution over its `teacher_top_k` most probable tokens, with all others as one.
    """

    @property
    def teachers(self) -> list[str]:
        """Names of all teachers."""
        return [self.teacher] if isinstance(self.teacher, str) else self.teacher or []

    @property
    def frozen(self) -> list[str]:
        """Names of those that are not the policy itself."""
        return [name for name in self.teachers if name != LIVE]


class OverlongBuffer(Section):
    """Penalise responses that end within the last tokens of the limit, softly."""

    enable: bool = False
    """Soft overlong punishment (DAPO): linear over the last `len` tokens of the response budget."""
    len: Positive = 16
    """Length of the punished tail, in tokens."""
    penalty_factor: AtLeast0 = 1.0
    """Penalty of a response that uses the whole budget."""


class Algorithm(Section):
    """Set advantages, rewards, policy loss and corrections."""

    on_resume = warn("how rewards become gradients, from the next step on", trains=True)
    adv_estimator: Annotated[Chosen, OneOf("estimator")] = Chosen(name="grpo")
    """How rewards become advantages; or a plugin's estimator."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by a standard deviation (`grpo`, `grpo_passk`, `turn_grpo`); false is Dr. GRPO's
    advantage.
    """
    adv_std_level: Literal["group", "batch", "batch_centered", "batch_raw"] = "group"
    """Whose standard deviation `grpo` divides by: the group's, or over the learner step that of
    the rewards, of the rewards minus the mean of their group, or of the rewards about 0.
    """
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per step, for the estimators with returns (`reinforce`,
    `reinforce_plus_plus`, `remax`, `turn_grpo`).
    """
    gamma_per: Literal["token", "turn"] | None = None
    """What `gamma` discounts by: sampled tokens, or turns; null: turns of episodes, and tokens of
    plain responses.
    """
    whiten_advantages: bool | Literal["shift", "keep_mean"] = False
    """Subtract the advantages' mean over all tokens of the step and divide by their deviation
    (`shift`, or true); `keep_mean` adds the mean again.
    """
    advantage_clip: Above0 | None = None
    """Clamp advantages to [-clip, clip], last of all; null is off."""
    reward_clip: Above0 | None = None
    """Clamp the weighted reward sum to [-clip, clip], before anything else; null is off."""
    reward_clip_after: Above0 | None = None
    """Clamp rewards to [-clip, clip] once they are normalised, with `add_token_level_kl` that of
    each token; null is off.
    """
    reward_norm: (
        Literal["group", "batch", "running"]
        | dict[Literal["mean", "std"], Literal["none", "group", "batch", "running"]]
        | None
    ) = None
    """Normalise shaped rewards by mean and deviation of the group, step, or all steps so far; as a
    mapping `{mean: group, std: batch}` the two apart, each `none` where it is left out.
    """
    reward_shift: bool = False
    """Only subtract the mean (of `reward_norm`'s statistics, else the learner step's)."""
    reward_scale: bool = False
    """Only divide by the standard deviation (of `reward_norm`'s statistics, else the step's)."""
    add_token_level_kl: bool = False
    """Subtract a KL penalty to the reference from every token's reward (not with `use_kl_loss`)."""
    kl_ctrl: KlCtrl = KlCtrl()
    overlong_buffer: OverlongBuffer = OverlongBuffer()
    reward_shaping: list[Annotated[Chosen, OneOf("reward_shaping")]] = Field([])
    """Reward shapings of plugins, applied after the others in this order."""
    mask_truncated: bool = False
    """Leave truncated responses out of the loss; they still count in the group statistics."""
    policy_loss: Annotated[Chosen, OneOf("policy_loss")] = Chosen(name="ppo_clip")
    """Loss of one token; or a plugin's loss."""
    clip_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Half-width of the clip interval around ratio 1, for sides without a separate value."""
    clip_ratio_low: Annotated[float, Field(gt=0, le=1)] | None = None
    """Half-width of the lower side; null means `clip_ratio`; 1 leaves the lower side open where the
    schedule does not narrow it.
    """
    clip_ratio_high: Above0 | None = None
    """Half-width of the upper side; null means `clip_ratio`. Wider than the lower side is
    clip-higher (DAPO uses 0.28).
    """
    top_entropy_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the tokens of an optimizer step, those of the highest entropy, that have a policy
    loss; the divisor stays that of all tokens.
    """
    dual_clip_loss: bool = False
    """Bound the loss of negative advantages too (`ppo_clip`, `m2po`)."""
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """Bound of the loss for negative advantages when `dual_clip_loss` is on."""
    clip_schedule: Annotated[Chosen, OneOf("clip_schedule")] = Chosen(name="constant")
    """How the clip interval shrinks with a token's staleness k: not at all, eps / (1 + rate k), or
    eps rate^k.
    """
    anchor: Literal["behavior", "recomputed", "interpolated"] = "behavior"
    """Proximal policy, the centre of the trust region: the policy that sampled each token, the
    learner's policy before the step (one more forward pass), or a mixture of both by the token's
    staleness (A-3PO, no forward pass).
    """
    importance: Importance = Importance()
    rejection: Annotated[list[RejectionRule], BeforeValidator(rejection_rules)] = Field([])
    """Leave out tokens or responses that one of these rules does not keep: by the ratio w of
    proximal to behaviour policy (`score: w`), -log w (k1), (log w)^2 / 2 (k2) or w - 1 - log w
    (k3), or the `difference` of both probabilities, of each `token`, or of the response by `reduce`
    over its tokens (sum and mean of w: product and geometric mean).
    """
    opsm_delta: AtLeast0 | None = None
    """Leave out responses with a negative advantage whose mean log-prob has fallen by more than
    this (OPSM).
    """
    opsm_against: Literal["behavior", "anchor"] = "behavior"
    """What it has fallen against: the policy that sampled, or the proximal policy."""
    loss_agg_mode: Literal[
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
        "prompt-mean",
    ] = "token-mean"
    """How token losses become one number; `seq-mean-token-sum-norm` divides by the constant
    `rollout.response_length` (Dr. GRPO).
    """
    use_kl_loss: bool = False
    """Add a KL penalty to a reference policy to the loss."""
    kl_loss_coef: AtLeast0 = 0.001
    """Weight of the KL penalty."""
    kl_loss_type: Literal[
        "kl",
        "k1",
        "abs",
        "mse",
        "k2",
        "low_var_kl",
        "k3",
        "kl+",
        "k1+",
        "abs+",
        "mse+",
        "k2+",
        "low_var_kl+",
        "k3+",
    ] = "low_var_kl"
    """Estimator: kl (k1), abs (of k1), mse (k2), low_var_kl (k3); `+`: its value with k2's
    gradient, that of the divergence.
    """
    kl_loss_unbiased: bool | Literal["anchor", "behavior"] = False
    """Multiply the penalty by the ratio to the proximal policy (true says the same), or to the
    policy that sampled: unbiased for off-policy tokens. k1 and k3 have gradient through both
    factors; with the gradient of k2 the ratio is detached.
    """
    behavior_penalty: AtLeast0 = 0.0
    """Weight of (log-prob - log-prob of the sampler)^2, added to the loss of every token, whatever
    its weight.
    """
    distill: Distill = Distill()
    sft_loss_coef: AtLeast0 = 0.0
    """Weight of the cross-entropy of demonstrations in the loss: one for each prompt, a mean over
    their tokens in an update. 0: none.
    """
    sft_model: str | None = None
    """Frozen model whose response is the demonstration; null: the problem's worked solution."""
    entropy_coef: AtLeast0 = 0.0
    """Weight of the entropy bonus."""
    calculate_entropy: bool = True
    """Measure `train/entropy` also without a bonus; false saves a tenth of the head's time."""
    plugins: list[ModuleName] = Field([])
    """Python modules of yours that register estimators, losses, importance modes or reward
    shapings; see docs/how-to/extend.md.
    """

    @property
    def clip_low(self) -> float:
        """Half-width of the lower side of the clip interval at staleness 0."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Half-width of the upper side of the clip interval at staleness 0."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def has_baseline(self) -> bool:
        """Whether the estimator needs a greedy response in every group, besides those to train."""
        return self.adv_estimator.name in ESTIMATORS.where(lambda traits: traits.baseline)

    @property
    def uses_reference(self) -> bool:
        """Whether a reference policy is needed."""
        return self.use_kl_loss or self.add_token_level_kl
