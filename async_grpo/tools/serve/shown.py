"""What a person sees of a served episode: its rows, turn by turn, and what would be trained.

Runs in: `async-grpo serve`. Hides nothing of the tokens: the lines cut them short, the
record has them all; a log-prob per sampled token, versions as spans of these.

    row 0 begins with the prompt [3 tokens]; then per segment: context (mask 0) or sampled (mask 1)
    row 1 begins anew, and why (`rollout.endpoint.forks`, or template), behind a turn of which row

Each row has the label (`model`) under which its turns were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from async_grpo.agents.endpoint.served import ServedEpisode, ServedTurn
from async_grpo.environments.pool import EnvironmentFailed
from async_grpo.rollout.episodes import Episode
from async_grpo.rollout.session import SessionRow
from async_grpo.runtime.text import counted, shortened

SHOWN_TOKENS, SHOWN_TEXT = 12, 100
Words = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Shown:
    """An episode that has ended: how it was served, and what it was worth or why it failed."""

    number: int
    served: ServedEpisode
    seconds: float
    failed: EnvironmentFailed | None = None

    @property
    def episode(self) -> Episode:
        """Tokens, rewards and verdict."""
        return self.served.episode

    @property
    def begun(self) -> dict[int, ServedTurn]:
        """The first turn of each row with something to train, by its number in the session."""
        found: dict[int, ServedTurn] = {}
        for turn in self.served.turns:
            if self.episode.session.row(turn.row).segments:
                found.setdefault(turn.row, turn)
        return found

    def behind(self, turn: ServedTurn) -> int | None:
        """Return the row, as it is shown, from whose turn a turn goes on; None for none."""
        if turn.parent is None:
            return None
        return [*self.begun].index(self.served.turns[turn.parent].row)

    @property
    def unread(self) -> int:
        """Turns that nobody has read, and that are in no row."""
        return sum(not turn.read for turn in self.served.turns)

    def record(self, words: Words) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        failed, episode = self.failed, self.episode
        return {
            "episode": self.number,
            "seconds": self.seconds,
            "failed": failed and {"reason": failed.reason, "detail": str(failed)},
            "finish_reason": episode.finish_reason,
            "rewards": episode.rewards,
            "correct": episode.verdict,
            "metrics": dict(episode.metrics),
            "sequences": [
                _record(episode.session.row(number), words)
                | {"begun": turn.forked, "label": turn.label, "after_sequence": self.behind(turn)}
                for number, turn in self.begun.items()
            ],
            "unread_turns": self.unread,
        }

    def lines(self, words: Words) -> Iterator[str]:
        """Say it in lines."""
        episode, begun = self.episode, self.begun
        if self.failed is not None:
            yield f"episode {self.number}: failed after {self.seconds:.1f} s, {self.failed}"
        else:
            rewards = ", ".join(f"{name} {value:g}" for name, value in episode.rewards.items())
            yield (
                f"episode {self.number}: {episode.finish_reason}, rewards {rewards}, correct: "
                f"{episode.verdict}, {self.seconds:.1f} s"
            )
        kept = [count for at in begun for _, count in episode.session.row(at).segments]
        yield (
            f"  {counted(len(kept), 'turn')} in {counted(len(begun), 'sequence')}, "
            f"{counted(sum(kept), 'sampled token')}"
        )
        if self.unread:
            yield f"  {counted(self.unread, 'turn')} more that nobody read: not trained"
        for at, (number, turn) in enumerate(begun.items()):
            row, behind = episode.session.row(number), self.behind(turn)
            why = f", anew: {turn.forked}" if turn.forked else ""
            where = "" if behind is None else f" after sequence {behind}"
            yield f"  sequence {at}{why}{where}, of {turn.label!r}"
            yield _line("prompt", row.prompt, words)
            for kind, ids in _segments(row):
                yield _line(kind, ids, words)


def _segments(row: SessionRow) -> Iterator[tuple[str, list[int]]]:
    """Cut a row behind its prompt where what was sampled meets what was fed."""
    at = 0
    for context, sampled in row.segments:
        if context:
            yield "context", row.ids[at : at + context]
        yield "sampled", row.ids[at + context : at + context + sampled]
        at += context + sampled


def _line(kind: str, ids: Sequence[int], words: Words) -> str:
    first = " ".join(map(str, ids[:SHOWN_TOKENS])) + (" ..." if len(ids) > SHOWN_TOKENS else "")
    text = repr(shortened(words(ids), SHOWN_TEXT))
    return f"    {kind:<8}{len(ids):>6} tokens  mask {int(kind == 'sampled')}  {text}  [{first}]"


def _record(row: SessionRow, words: Words) -> dict[str, Any]:
    mask = [int(kind == "sampled") for kind, ids in _segments(row) for _ in ids]
    ids = row.response_ids.tolist()
    return {
        "prompt_ids": row.prompt,
        "response_ids": ids,
        "mask": mask,
        "logprobs": row.behavior_logprobs.tolist(),
        "versions": [[one.policy_version, one.start, one.end] for one in row.versions],
        "text": words(row.prompt) + words(ids),
    }
