"""Settings of frozen models: models that take part in a run and are not trained.

Runs in: any process. Hides nothing; `schema` puts them into a `Config`, by name.
"""

from __future__ import annotations

from typing import Literal

from async_grpo.config.operation import EngineConfig
from async_grpo.config.section import Seconds, Section


class FrozenModel(Section):
    """Name a model that an engine of its own serves during a run, with the same weights always."""

    path: str
    """Directory or hub name of a Hugging Face causal LM."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; `auto` is float32 on CPU and bfloat16 on GPU."""
    engine: EngineConfig = EngineConfig()
    """See `cluster.engine`."""
    timeout_s: Seconds = 120.0
    """Longest time without an answer while one is asked for; then it is started again."""
