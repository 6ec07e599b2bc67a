"""Environments of other packages: `gymnasium` (text), `textarena` (one player), and `skyrl_gym`.

Runs in: the driver and rollout actors (problems), and environment children (games). Hides the
interfaces of the packages, which are imported when an episode begins and are not installed with
this one. Invariants: a game is decided by its problem alone, so all episodes of a group play the
same one; held-out games have seeds of their own.
"""

from __future__ import annotations

import importlib
import re
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from async_grpo.config import schema
from async_grpo.config.section import Positive, Section
from async_grpo.environments.base import Action, Observation
from async_grpo.tasks.base import Problem, Prompt, Score, parse_options, refuse_rows
from async_grpo.tasks.data import RowTask, text_of
from async_grpo.tasks.sources import BadRow

_MARKED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", re.DOTALL)
"""What a terminal would show in another colour; a policy reads it in brackets."""
_FIRST_TRAINED = 2**20
"""Seeds below are those of held-out games."""


class GameOptions(Section):
    """Options of the tasks `gymnasium` and `textarena`."""

    id: Annotated[str, Field(min_length=1)]
    """Name of the game in its package."""
    arguments: dict[str, Any] = Field({})
    """Arguments of the package's `make`, for example {render_mode: ansi}."""
    problems: Positive = 4096
    """How many games there are to train on: seeds."""
    instruction: str = "Play the game. Answer with your next action, and nothing else."
    """What stands before the game's first words."""
    style: Literal["chat", "plain"] = "chat"
    """Chat messages for the model's chat template, or plain text for a model without one."""
    success: float = 1.0
    """A game counts as won (for accuracy) from this sum of rewards on."""


class SkyRLOptions(Section):
    """Options of the task `skyrl_gym`."""

    id: Annotated[str, Field(min_length=1)]
    """Name of the environment; a row's own `env_class` comes first."""
    env_config: dict[str, Any] = Field({})
    """Configuration of the environment."""
    success: float = 1.0
    """An episode counts as right (for accuracy) from this sum of rewards on."""


class _Game:
    """An episode, whose package makes its game when it begins."""

    def __init__(self, options: Any) -> None:
        self._options, self._total = options, 0.0
        self._game: Any = None

    def close(self) -> None:
        """Close the game, unless it has ended."""
        if self._game is not None:
            self._game.close()

    def _won(self) -> float:
        return float(self._total >= self._options.success)


class _Games:
    """Games by seed."""

    weights: ClassVar[dict[str, float]] = {"reward": 1.0}

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        """`seed` changes only the order of the problems, which is not decided here."""
        refuse_rows(settings)
        self._options = parse_options(GameOptions, settings)
        self._name = settings.name

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the options; see `Task.fingerprint`."""
        named = repr((self._name, sorted(self._options.model_dump().items())))
        return blake2b(named.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._options.problems

    def train(self, index: int) -> Problem:
        """Training problem `index`; see `Task.train`."""
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index} of {len(self)}")
        return self._problem(_FIRST_TRAINED + index)

    def evaluation(self, n: int) -> list[Problem]:
        """`n` held-out games."""
        return [self._problem(seed) for seed in range(min(n, _FIRST_TRAINED))]

    def _problem(self, seed: int) -> Problem:
        said, prompt = self._options.instruction, ""
        asked: Prompt = [{"role": "system", "content": said}] if said else []
        if self._options.style == "plain":
            prompt = f"{said}\n\n" if said else ""
        return Problem(prompt if self._options.style == "plain" else asked, {"seed": seed})


class Gymnasium(_Games):
    """A game of `gymnasium` that can be played in text; see `GameOptions`."""

    def environment(self) -> GymnasiumGame:
        """Return a new game."""
        return GymnasiumGame(self._options)


class GymnasiumGame(_Game):
    """Plays a game whose observations are texts, or are rendered as `ansi`, and whose actions are
    texts or numbers.
    """

    def reset(self, reference: Any, seed: int) -> Observation:
        """Make the game of the problem's seed."""
        package = importlib.import_module("gymnasium")
        self._game = package.make(self._options.id, **self._options.arguments)
        seen, _ = self._game.reset(seed=reference["seed"])
        return Observation(self._words(seen))

    def step(self, action: Action) -> Observation:
        """Make a move; a text that is no action changes nothing."""
        move: Any = action.text.strip()
        space = self._game.action_space
        if hasattr(space, "n"):
            first, last = int(space.start), int(space.start + space.n) - 1
            if not move.lstrip("-").isdecimal() or not first <= int(move) <= last:
                text = f"An action is a number from {first} to {last}."
                return Observation(text, correct=self._won(), invalid=True)
            move = int(move)
        seen, reward, ended, cut, _ = self._game.step(move)
        self._total += float(reward)
        return Observation(
            self._words(seen),
            {"reward": float(reward)},
            done=bool(ended or cut),
            correct=self._won(),
        )

    def _words(self, seen: Any) -> str:
        if self._options.arguments.get("render_mode") == "ansi":
            return _MARKED.sub(r"[\1]", str(self._game.render()))
        return seen if isinstance(seen, str) else str(seen)


class TextArena(_Games):
    """A game of `textarena` for one player; see `GameOptions`."""

    def environment(self) -> TextArenaGame:
        """Return a new game."""
        return TextArenaGame(self._options)


class TextArenaGame(_Game):
    """Plays a game for one player, whose reward comes with its end."""

    def __init__(self, options: GameOptions) -> None:
        super().__init__(options)
        self._told = ""

    def reset(self, reference: Any, seed: int) -> Observation:
        """Make the game of the problem's seed."""
        package = importlib.import_module("textarena")
        self._game = package.make(self._options.id, **self._options.arguments)
        self._game.reset(num_players=1, seed=reference["seed"])
        return Observation(self._words())

    def step(self, action: Action) -> Observation:
        """Make a move."""
        done, _ = self._game.step(action=action.text)
        if not done:
            return Observation(self._words(), correct=0.0)
        rewards, _ = self._game.close()
        self._game = None
        self._total = float(rewards[0])
        return Observation(rewards={"reward": self._total}, correct=self._won(), done=True)

    def _words(self) -> str:
        """Return what is new: many games tell everything from the beginning, every time."""
        _, seen = self._game.get_observation()
        if not isinstance(seen, str):
            return "\n".join(str(message[1]) for message in seen)
        told, self._told = self._told, seen
        return seen[len(told) :] if seen.startswith(told) else seen


class SkyRLGym(RowTask):
    """Rows of SkyRL (`prompt` as messages, `reward_spec` and what else its environment needs)."""

    weights: ClassVar[dict[str, float]] = {"reward": 1.0}

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        super().__init__(settings, seed)
        self._options = parse_options(SkyRLOptions, settings)

    def problem(self, row: dict[str, Any]) -> Problem:
        """Take `prompt`, and the row as the environment's extras; see `RowTask.problem`."""
        prompt = row.get("prompt")
        if not isinstance(prompt, list) or not prompt:
            raise BadRow("'prompt' must be a list of messages")
        return Problem(prompt, {"extras": row})

    def score(self, response: str, reference: Any) -> Score:
        """Refuse: the environment gives rewards."""
        raise TypeError("the responses of skyrl_gym are episodes")

    def environment(self) -> SkyRLEpisode:
        """Return a new episode."""
        return SkyRLEpisode(self._options)


class SkyRLEpisode(_Game):
    """Plays one row in an environment of `skyrl_gym`."""

    def reset(self, reference: Any, seed: int) -> Observation:
        """Make the row's environment. Raises ValueError for one that changes the prompt."""
        package, row = importlib.import_module("skyrl_gym"), reference["extras"]
        name = text_of(row, "env_class") if "env_class" in row else self._options.id
        self._game = package.make(name, env_config=self._options.env_config, extras=row)
        asked = row["prompt"]
        prompt, _ = self._game.init(asked)
        if prompt[: len(asked)] != asked:
            raise ValueError(f"{name} changes the prompt; put what it adds into the data rows")
        return Observation(prompt[len(asked) :])

    def step(self, action: Action) -> Observation:
        """Take a step, whose observations are messages."""
        found = self._game.step(action.text)
        self._total += float(found["reward"])
        return Observation(
            list(found["observations"]),
            {"reward": float(found["reward"])},
            done=bool(found["done"]),
            correct=self._won(),
        )
