"""What an environment is: a user's code that answers what the policy says, turn after turn.

Runs in: environment children (the environment itself), and rollout actors (its answers). Hides
nothing. Invariants: one instance per episode; what crosses to a child and back is plain enough for
msgpack; an environment never sees whether, or with which weights, its episode is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

from async_grpo.config.schema import Config, TaskConfig
from async_grpo.old_names import WasVerdict
from async_grpo.runtime.numbers import checked_correct, finite

Content = str | list[dict[str, Any]] | list[int]
"""Chat messages for the model's template, text, or token ids."""


@dataclass(frozen=True)
class Action:
    """What the policy said in one turn: text with its special tokens but without the one that ended
    it, token ids, and "stop", or "length" where a limit cut it off. Of a task with tools also the
    calls (`name`, `arguments` and perhaps `id`), why there is one that cannot be read, and the
    content: what was said besides calls, without special tokens.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "stop"
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    unreadable: str = ""
    content: str = ""


@dataclass(frozen=True)
class Observation(WasVerdict):
    """What an environment answers: content for the policy, rewards of the turn by component (they
    are added up over the episode), and whether the episode is over. correct: 0/1 for the whole
    episode, the last one counts. invalid: the action made no sense. metrics: numbers to average.
    """

    content: Content = ""
    rewards: dict[str, float] = field(default_factory=dict)
    done: bool = False
    correct: float | None = None
    invalid: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One episode. Methods may be plain, which run one at a time in their process, or `async`.

    An attribute `replayable = True` says that the same reference, seed and actions always lead to
    the same answers: then `checkpoint.partial_rollouts` may play an episode again after a resume.
    """

    def reset(self, reference: Any, seed: int) -> Observation:
        """Begin. reference: of the problem; seed: the same for all episodes of a group. The content
        follows the problem's prompt.
        """

    def step(self, action: Action) -> Observation:
        """Answer one turn."""

    def close(self) -> None:
        """Free whatever the episode holds. Called once, whatever happened before."""


@runtime_checkable
class HasEnvironment(Protocol):
    """A task whose responses are episodes; it needs no `score`."""

    def environment(self) -> Environment:
        """Return a new environment, in a child process."""


@runtime_checkable
class HasTools(Protocol):
    """A task whose policy may call tools, which its prompts describe."""

    @property
    def tools(self) -> Sequence[Callable[..., Any] | dict[str, Any]]:
        """Functions, which are called in the child, or JSON schemas of tools that the environment
        itself answers.
        """


@runtime_checkable
class HasPlayers(Protocol):
    """A task whose episodes are played from outside, by whoever asks the policy over HTTP."""

    players: str
    """`module:Class` of what starts its players (`rollout.players.OutsidePlayers`), which rollout
    actors import.
    """
    posed: TaskConfig
    """Settings of the task whose problems these are."""

    def notes(self, config: Config) -> Iterator[str]:
        """Say what the user should know, and check what can be checked before a run. Raises
        TaskError, SetupError.
        """


def check_observation(value: object, components: Mapping[str, float]) -> Observation:
    """Return an observation with plain numbers. Raises TypeError for another type or an unknown
    reward component, ValueError for a number that is not finite.
    """
    if not isinstance(value, Observation):
        raise TypeError(f"an environment must return an Observation, got {type(value).__name__}")
    if unknown := sorted(set(value.rewards) - set(components)):
        raise TypeError(
            f"rewards name {', '.join(unknown)}; the components of this task are "
            f"{', '.join(sorted(components))}"
        )
    _check_content(value.content)
    for name in ("done", "invalid"):
        if not isinstance(getattr(value, name), bool):
            raise TypeError(f"{name} must be True or False, got {getattr(value, name)!r:.60}")
    return Observation(
        value.content,
        _numbers("rewards", value.rewards),
        value.done,
        checked_correct(value.correct),
        value.invalid,
        _numbers("metrics", value.metrics),
    )


def to_wire(observation: Observation) -> list[Any]:
    """Return the observation as plain values, for msgpack."""
    return list(asdict(observation).values())


def from_wire(values: Any, components: Mapping[str, float]) -> Observation:
    """Return what `to_wire` was given. Raises TypeError or ValueError for anything else."""
    if not isinstance(values, list) or len(values) != len(fields(Observation)):
        raise TypeError(f"no observation: {values!r:.80}")
    return check_observation(Observation(*values), components)


def _check_content(content: object) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise TypeError(
            "content must be text, chat messages or token ids, got " + type(content).__name__
        )
    if all(type(token) is int and token >= 0 for token in content):
        return
    if not all(isinstance(message, dict) and "role" in message for message in content):
        raise TypeError("content must be text, messages that each have a role, or token ids")


def _numbers(name: str, values: object) -> dict[str, float]:
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise TypeError(f"{name} must be numbers by name, got {values!r:.60}")
    return {key: finite(f"{name}[{key!r:.40}]", value) for key, value in values.items()}
