"""What a frozen model says of a group's sampled tokens, and with which settings its engine starts.

    rows --prompt and response of each--> Scorer --log-probs--> those of the sampled tokens -> plane

Runs in: rollout actors, after the group is scored; settings also in the driver. Knows no process: a
`Scorer` is where the model is (`cluster.frozen_models`). Invariant: a group either has a finite
log-prob for every sampled token, or is failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from async_grpo.config.schema import Config
from async_grpo.wire.groups import Row


class FrozenFailed(RuntimeError):
    """A frozen model does not answer: the group is issued again."""


class Scorer(Protocol):
    """A frozen model, as rollout actors see it."""

    async def score(self, sequences: Sequence[tuple[list[int], list[int]]]) -> list[np.ndarray]:
        """Log-probs [L] float32 at temperature 1 of each response, behind its prompt, both as token
        ids. Raises FrozenFailed.
        """


def engine_config(config: Config, name: str) -> Config:
    """Return the settings with which the engine of a frozen model starts. Its context is one token
    longer than the longest row, since an engine that scores samples one token.
    """
    frozen, rollout = config.frozen[name], config.rollout
    longest = "response_length" if rollout.context_length is None else "context_length"
    longer = {longest: (getattr(rollout, longest) or 0) + 1}
    model: dict[str, object] = {
        "path": frozen.path,
        "dtype": frozen.dtype,
        "lora": None,
        "freeze": [],
    }
    return config.unchecked_copy(
        update={
            "model": config.model.unchecked_copy(update=model),
            "rollout": rollout.unchecked_copy(update=longer),
            "cluster": config.cluster.unchecked_copy(update={"engine": frozen.engine}),
        }
    )


async def teacher_logprobs(
    teacher: Scorer, prompts: Sequence[np.ndarray], rows: Sequence[Row]
) -> np.ndarray:
    """Return the plane [S, 1] float32 of the sampled tokens of all rows, one after the other.
    Raises FrozenFailed, also for an answer of another length.
    """
    asked = [(prompts[row.prompt].tolist(), row.response_ids.tolist()) for row in rows]
    answers = await teacher.score(asked)
    lengths = [len(answer) for answer in answers]
    if lengths != [len(response) for _, response in asked]:
        raise FrozenFailed(f"gave {lengths} log-probs for {[len(one) for _, one in asked]}")
    sampled = [answer[row.sampled] for answer, row in zip(answers, rows, strict=True)]
    return np.concatenate(sampled).astype(np.float32)[:, None]
