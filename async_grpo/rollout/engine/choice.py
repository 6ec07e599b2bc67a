"""The engine of this installation: the one place that names it.

Runs in: any process; imports no engine's library.
"""

from __future__ import annotations

from async_grpo.rollout.engine.base import EngineKind
from async_grpo.rollout.engine.vllm.kind import VllmKind

ENGINE: EngineKind = VllmKind()
"""What everybody asks."""
