"""Picks a few trained or evaluated responses, as text, for the sample table.

Runs in: the driver, beside the loop, which sees no tokens. Hides that the frames come from the
queue, which has the frames of the step in training, and that the tokenizer is loaded late.

Invariants: a run shows about `tracking.sample_rows` of each kind, from its first step to its last;
training never waits for samples, and a step that cannot be shown is noted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_grpo.cluster.queue import DriverQueue
from async_grpo.config.schema import Config
from async_grpo.runtime.listener import RunListener
from async_grpo.runtime.provenance import load_tokenizer
from async_grpo.runtime.text import dialogue, last_line
from async_grpo.wire.codec import Batch, Group, Row, decode_group, unpack_frames

GROUPS = 2
"""Groups of a step that are shown, each with its best and its worst response."""
ROWS = 2 * GROUPS
EVALUATED = 8
"""Responses of one evaluation that are shown."""
FINISH_S = 10.0
Decode = Callable[[Sequence[int]], str]


class TrainingSamples:
    """Gives samples of the steps that are due to the listener."""

    def __init__(
        self,
        config: Config,
        *,
        queue: DriverQueue,
        model_dir: str,
        total_steps: int,
        weights: Mapping[str, float],
        listener: RunListener,
    ) -> None:
        """weights: of the reward components."""
        self._config, self._queue = config, queue
        self._model_dir, self._weights = model_dir, weights
        self._listener = listener
        self._every = interval(total_steps, config.tracking.sample_rows, each=ROWS)
        self._decode: Decode | None = None
        self._task: asyncio.Task[None] | None = None

    def take(self, batch: Batch) -> None:
        """Ask for samples of this batch's step, before the queue can learn of the next step."""
        due = self._every and (batch.step == 1 or batch.step % self._every == 0)
        if due and (self._task is None or self._task.done()):
            size = len(batch.groups)
            chosen = {
                batch.groups[(batch.step + part * size // GROUPS) % size].group_id
                for part in range(GROUPS)
            }
            self._task = asyncio.create_task(self._fetch(batch.step, sorted(chosen)))

    async def finish(self) -> None:
        """Wait a while until pending samples are shown."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=FINISH_S)
            self._task.cancel()

    async def _fetch(self, step: int, group_ids: list[int]) -> None:
        try:
            groups = [
                decode_group(frame)
                for frame in unpack_frames(await self._queue.payload(step, group_ids))
            ]
            self._listener.samples(await asyncio.to_thread(self._rows, step, groups))
        except Exception as error:  # noqa: BLE001 - not worth the training
            ids = ", ".join(map(str, group_ids))
            self._listener.note(
                f"no samples of the groups {ids} of step {step}: {last_line(error)}"
            )

    def _rows(self, step: int, groups: list[Group]) -> list[dict[str, Any]]:
        if self._decode is None:
            self._decode = _decoder(
                self._model_dir, trust_remote_code=self._config.model.trust_remote_code
            )
        rows = [row for group in groups for row in self._of(group, step, self._decode)]
        return rows[: self._config.tracking.sample_rows]

    def _of(self, group: Group, step: int, decode: Decode) -> list[dict[str, Any]]:
        ranked = sorted((row for row in group.rows if row.role == "train"), key=self._reward)
        return [
            {
                "step": step,
                "source": "training",
                "group_id": group.group_id,
                "prompt": decode(group.prompts[row.prompt].tolist()),
                "response": _said(row, decode),
                "tokens": len(row.behavior_logprobs),
                "rewards": row.rewards,
                "correct": row.verdict,
                "finish_reason": row.finish_reason,
                "staleness": max(
                    (step - 1 - one.policy_version for one in row.versions), default=0
                ),
            }
            for row in ([ranked[-1], ranked[0]] if len(ranked) > 1 else ranked)
        ]

    def _reward(self, row: Row) -> float:
        return sum(weight * row.rewards.get(name, 0.0) for name, weight in self._weights.items())


def _said(row: Row, decode: Decode) -> str:
    """Decode a response; of an episode turn by turn."""
    parts: list[str] = []
    at = 0
    for context, sampled in row.segments:
        middle, end = at + context, at + context + sampled
        if parts or context:
            parts.append(decode(row.response_ids[at:middle].tolist()))
        parts.append(decode(row.response_ids[middle:end].tolist()))
        at = end
    first_is_environment = bool(row.segments and row.segments[0][0])
    return dialogue(["", *parts] if first_is_environment else parts)


class EvaluationSamples:
    """Picks evaluations to show: the first, the last, and others as long as `rows` has room."""

    def __init__(self, *, total_steps: int, rows: int) -> None:
        self.each = min(rows, EVALUATED)
        self._total_steps, self._last = total_steps, -1
        self._every = interval(total_steps, rows, each=EVALUATED)

    def shown(self, step: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows to show of the evaluation of `step`."""
        recent = self._last >= 0 and 0 <= step - self._last < self._every
        if recent and step != self._total_steps:
            return []
        self._last = step
        return rows[: self.each]


def interval(total_steps: int, rows: int, *, each: int) -> int:
    """Return the steps between samples of `each` rows for about `rows` at most; 0: never."""
    return -(-total_steps // max(1, rows // each - 1)) if rows else 0


def _decoder(model_dir: str, *, trust_remote_code: bool) -> Decode:
    """Token ids -> text without special tokens."""
    file = Path(model_dir) / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer  # inside transformers' own, and loaded at once

        light = Tokenizer.from_file(str(file))
        return lambda ids: light.decode(list(ids), skip_special_tokens=True)
    tokenizer = load_tokenizer(model_dir, trust_remote_code=trust_remote_code)
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)
