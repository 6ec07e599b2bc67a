"""Settings of frozen models: models that take part in a run and are not trained; and of judges.

Runs in: any process. Hides nothing; `schema` puts them into a `Config`, by name.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_grpo.config.operation import EngineConfig
from async_grpo.config.section import Above0, NonNegative, Positive, Seconds, Section


class FrozenModel(Section):
    """Name a model that takes part in a run with the same weights always: one that an engine of its
    own serves, or one behind an OpenAI-compatible address.
    """

    path: str | None = None
    """Directory or hub name of a Hugging Face causal LM, or of a sequence classifier with one label
    (a reward model).
    """
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; `auto` is float32 on CPU and bfloat16 on GPU."""
    context_length: Positive | None = None
    """Longest text in tokens; null: the longest row of the policy, and for judges twice that with
    1,024 tokens for what is said to them, and their answer.
    """
    engine: EngineConfig = EngineConfig()
    """See `cluster.engine`."""
    timeout_s: Seconds = 120.0
    """Longest time without an answer while one is asked for; then it is started again. At an
    address: of one question, with all requests for it.
    """
    url: str | None = None
    """Address instead of `path`, as `https://host/v1`; only for judges."""
    served_name: str | None = None
    """Name of the model at the address."""
    api_key_env: Annotated[str | None, Field(pattern=r"^[A-Za-z_]\w*$")] = None
    """Environment variable of the driver with the key for the address; the key is written
    nowhere.
    """
    max_concurrency: Positive = 16
    """Requests of one rollout actor at the address at the same time."""
    retries: NonNegative = 4
    """How often a request is sent again after 408, 409, 429, 5xx, no answer or no connection."""


class Judge(Section):
    """Let a frozen model grade responses: a reward component with the name of the judge."""

    model: str
    """Name under `frozen`."""
    kind: Literal["pointwise", "pairwise", "reward_model"] = "pointwise"
    """`pointwise`: an integer for each response, at temperature 0. `pairwise`: the share of the
    other responses of the group that it beats, each pair judged in both orders. `reward_model`: the
    score of a sequence classifier.
    """
    prompt: str | None = None
    """What the judge is asked, with `{prompt}`, `{response}` (pairwise: `{first}` and `{second}`)
    and, where wanted, `{reference}` (the answer); null: a short question of ours.
    """
    criteria: list[Annotated[str, Field(pattern=r"^[a-z]\w{0,31}$")]] = Field(
        ["score"], min_length=1
    )
    """Grades that it gives (pointwise); their mean counts."""
    scale: Annotated[list[int], Field(min_length=2, max_length=2)] = Field([1, 5])
    """Lowest and highest grade (pointwise); the component is 0 at the lowest and 1 at the
    highest.
    """
    reasoning: bool = False
    """Whether the judge writes its reasons before its verdict."""
    max_tokens: Positive = 512
    """Longest answer of the judge in tokens."""
    mean: float = 0.0
    """What is taken from the score of a reward model."""
    std: Above0 = 1.0
    """By what the rest is divided."""
    clip: Above0 | None = None
    """Largest magnitude of the quotient."""
