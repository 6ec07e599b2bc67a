"""Imports what a learner rank does, and as it does, so that its children need not."""

from __future__ import annotations

from importlib import import_module

for name in (
    "async_grpo.runtime.light_imports",  # before transformers
    "async_grpo.learner.learner",
    "async_grpo.weights.transport",
):
    import_module(name)
with import_module("async_grpo.learner.backend.deepspeed.backend").without_mlflow():
    import_module("deepspeed")
