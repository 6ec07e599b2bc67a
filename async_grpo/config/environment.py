"""Settings of the processes in which the environments of episodes run.

Runs in: any process. Hides nothing; `schema` puts the section into a `Config`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_grpo.config.section import FREE, NonNegative, Positive, Seconds, Section, warn


class EnvironmentConfig(Section):
    """Bound the environments of tasks whose responses are episodes; no other task has any."""

    on_resume = FREE
    tools: Annotated[list[str], warn("which tools the policy has", trains=True)] = Field(
        default_factory=list
    )
    """Functions that the policy may call, as `module.function` or `calculator`: responses become
    episodes, also of a task without an environment, which scores the turn that calls nothing.
    """
    tool_parser: Annotated[str, warn("how tool calls are read")] = "auto"
    """Reads tool calls: the name of a parser of vLLM, or `auto`: the renderer, else what the
    tokenizer brings (`response_template`), else the parser that the chat template is known to need.
    """
    renderer: Annotated[str, warn("how messages become tokens")] = "auto"
    """Renders messages: `template` (the model's own chat template), a renderer of the package
    `renderers` by name, or `auto`: the renderer that knows `model.path`, else the template.
    """
    workers: Positive = 2
    """Processes per rollout actor in which environments live, many in each."""
    reset_timeout_s: Seconds = 60.0
    """Longest time an environment may take to begin; then the group is issued again."""
    step_timeout_s: Seconds = 30.0
    """Longest time an environment may take to answer one turn; see `on_timeout`."""
    memory_mb: Positive = 4096
    """Most private memory that a process with environments may have, and each process that it
    starts, in MiB; reserved addresses, mapped files and shared memory do not count.
    """
    on_timeout: Annotated[
        Literal["score_zero", "fail_group"], warn("what an episode is worth that hangs")
    ] = "score_zero"
    """When an environment's answer takes too long: the episode ends with what it has earned so far,
    since an action may have caused it, or its group is issued again.
    """
    max_invalid: Annotated[NonNegative, warn("when episodes end")] = 3
    """End an episode after this many invalid actions in a row; 0: never."""
