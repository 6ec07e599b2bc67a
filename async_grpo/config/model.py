"""The settings of `model`: what is trained, and from which weights.

Runs in: any process. A part of `schema`, and as such a home of defaults.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_grpo.config.section import FREE, Fraction, NonNegative, Positive, Section, fixed, warn

WARM_START_POSITIONS = 512
"""Longest row, prompt and response together, of a model that is warm-started."""


class WarmStart(Section):
    """Build a small Qwen2-architecture model from scratch and teach it the task's own solutions before RL starts.

    The result is cached by its settings and the seed. It is supervised training and is reported as such.
    """

    hidden_size: Positive = 128
    """Width of the model; each of its heads needs an even share of it."""
    intermediate_size: Positive = 256
    """Width of the feed-forward layers."""
    layers: Positive = 2
    """Transformer layers."""
    heads: Positive = 4
    """Attention heads."""
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
    """Then train on partly randomised answers until greedy accuracy has fallen to this: knowledge kept, distribution blurred."""
    blur_sampled_accuracy: Fraction = 0.3
    """The blur phase also goes on until the accuracy of answers sampled at temperature 1 has fallen to this."""
    blur_noise: Fraction = 0.3
    """Share of answer tokens that the blur phase replaces at random."""
    blur_max_steps: NonNegative = 60
    """Upper limit of blur steps; 0 leaves the phase out."""
    cache_dir: Annotated[str, FREE] = "~/.cache/async_grpo"
    """Where warm-started models are kept between runs."""


class Lora(Section):
    """Train low-rank adapters (LoRA) beside the weights instead of the weights, which stay as they are.

    Engines and exports get the merged weights; the reference is the model without its adapters. Adapters want a learning rate about ten
    times as high as the weights. A section without keys (`{}`) has these defaults.
    """

    rank: Positive = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The product of an adapter's two matrices is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Linear layers that get an adapter, by the ends of their names (`[q_proj, v_proj]`); never the language-model head."""


class Model(Section):
    on_resume = fixed("the checkpoint holds the weights and the optimizer of another model")
    path: str | None = None
    """Local directory or hub name of a Hugging Face causal language model. Exactly one of `path` and `warm_start` is set."""
    warm_start: WarmStart | None = None
    """Build and warm-start a small model instead of loading one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type of learner and engines; `auto` is float32 on CPU and bfloat16 on GPU."""
    reference: Annotated[str | None, warn("the model that the KL penalty pulls to", trains=True)] = None
    """Model of the KL reference (directory or hub name); null means the initial policy. Used only with a KL penalty."""
    lora: Lora | None = None
    """Train adapters instead of the weights."""
    freeze: list[str] = Field([])
    """Regular expressions, searched in parameter names (`embed_tokens`): these weights are not trained. A tied head follows the embedding."""
    reference_refresh_steps: Annotated[NonNegative, warn("when the reference takes over the policy's weights", trains=True)] = 0
    """Learner steps after which the reference takes over the policy's weights, again and again; 0 means never."""
    lm_head_fp32: Annotated[bool, warn("the rounding of all log-probs", trains=True)] = False
    """Compute the language-model head in float32 in learner and engines, whatever `model.dtype` is."""
    trust_remote_code: Annotated[bool, FREE] = False
    """Allow code that ships with a model to run."""
