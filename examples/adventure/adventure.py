"""A text adventure: rooms, a key, and a chest that it opens; rewards on the way, and at the end. A
whole custom task, with its environment and options:

    cd examples/adventure && async-grpo check adventure.yaml

Runs in: the driver and rollout actors (problems), and environment children (`AdventureGame`). The
map belongs to the problem: where the exits lead, and where key and chest are, is only known by
going there. Hides how an index becomes a map. Invariants: every room can be reached; a problem is
training or held-out by its index alone; what happens is decided by the actions.
"""

from __future__ import annotations

import random
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from async_grpo.config import schema
from async_grpo.config.section import Section
from async_grpo.environments.base import Action, Observation
from async_grpo.tasks.base import Problem, parse_options, refuse_rows

TRAIN_PROBLEMS = 2**20
WAYS = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}
INSTRUCTION = (
    "Find the key, take it, find the chest, and open it. Answer with one action and nothing else: "
    "north, south, west, east, take or open."
)
_BACK = {"north": "south", "south": "north", "west": "east", "east": "west"}


class AdventureOptions(Section):
    """Options of the task."""

    size: Annotated[int, Field(ge=2, le=9)] = 3
    """The map has size x size rooms."""
    style: Literal["chat", "plain"] = "chat"
    """Chat messages for the model's chat template, or plain text for a model without one."""


class Adventure:
    """Virtual training set of 2^20 maps; needs no data."""

    weights: ClassVar[dict[str, float]] = {"chest": 1.0, "key": 0.3}

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        """`seed` changes only the order of the problems, which is not decided here."""
        refuse_rows(settings)
        self._options = parse_options(AdventureOptions, settings)

    @cached_property
    def fingerprint(self) -> str:
        """Names the options; see `Task.fingerprint`."""
        return f"adventure-1-{self._options.size}-{self._options.style}"

    def __len__(self) -> int:
        return TRAIN_PROBLEMS

    def train(self, index: int) -> Problem:
        """Training problem `index`; see `Task.train`."""
        if not 0 <= index < TRAIN_PROBLEMS:
            raise IndexError(f"problem {index} of {TRAIN_PROBLEMS}")
        return self._problem(f"train {index}")

    def evaluation(self, n: int) -> list[Problem]:
        """`n` held-out maps."""
        return [self._problem(f"held out {index}") for index in range(n)]

    def environment(self) -> AdventureGame:
        """Return a new game."""
        return AdventureGame(self._options.size)

    def _problem(self, name: str) -> Problem:
        plain = self._options.style == "plain"
        prompt = f"{INSTRUCTION}\n\n" if plain else [{"role": "system", "content": INSTRUCTION}]
        return Problem(prompt, {"map": name})


class AdventureGame:
    """One walk through a map."""

    replayable = True

    def __init__(self, size: int) -> None:
        self._size = size
        self._exits: dict[tuple[int, int], set[str]] = {}
        self._at = self._chest = (0, 0)
        self._key: tuple[int, int] | None = None

    def reset(self, reference: Any, seed: int) -> Observation:
        """Draw the problem's map, and look around."""
        dice, size = random.Random(reference["map"]), self._size
        rooms = [(x, y) for x in range(size) for y in range(size)]
        self._exits = {room: set() for room in rooms}
        reached, path = {rooms[0]}, [rooms[0]]
        while path:  # a walk that turns back where all is known reaches every room
            x, y = path[-1]
            near = [(way, (x + dx, y + dy)) for way, (dx, dy) in WAYS.items()]
            new = [(way, room) for way, room in near if room in self._exits and room not in reached]
            if not new:
                path.pop()
                continue
            way, room = dice.choice(new)
            self._exits[path[-1]].add(way)
            self._exits[room].add(_BACK[way])
            reached.add(room)
            path.append(room)
        start, key, chest = dice.sample(rooms, 3)
        self._at = start
        self._key, self._chest = key, chest
        return Observation(self._look())

    def step(self, action: Action) -> Observation:
        """Go, take or open; anything else is no action."""
        said = action.text.strip().lower()
        if said in self._exits[self._at]:
            x, y = self._at
            dx, dy = WAYS[said]
            self._at = x + dx, y + dy
            return Observation(self._look(), correct=0.0)
        if said == "take" and self._key == self._at:
            self._key = None
            return Observation(self._look(), {"key": 1.0}, correct=0.0)
        if said == "open" and self._key is None and self._chest == self._at:
            return Observation(rewards={"chest": 1.0}, done=True, correct=1.0)
        return Observation(f"You cannot do that. {self._look()}", correct=0.0, invalid=True)

    def close(self) -> None:
        """Nothing is held."""

    def _look(self) -> str:
        there = [f"Exits: {', '.join(way for way in WAYS if way in self._exits[self._at])}."]
        if self._key == self._at:
            there.append("There is a key.")
        if self._chest == self._at:
            there.append("There is a chest.")
        if self._key is None:
            there.append("You have the key.")
        return " ".join(there) + "\n"
