"""The adventure of the examples, and games of other packages."""

from __future__ import annotations

import json
import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import schema
from async_grpo.config.load import load_config
from async_grpo.environments.base import Action, HasEnvironment, Observation, check_observation
from async_grpo.tasks.base import TaskError
from async_grpo.tasks.registry import load_task
from tests.support.games import installed
from tests.support.recipes import CONFIGS

EXAMPLE = CONFIGS.parent / "examples" / "adventure"
WAYS = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's module is found, as from its directory."""
    monkeypatch.syspath_prepend(EXAMPLE)


def task_of(name: str, **settings: Any) -> Any:
    task = load_task(schema.TaskConfig(name=name, **settings), 0)
    assert isinstance(task, HasEnvironment)
    return task


def begin(task: Any, index: int = 0) -> tuple[Any, Observation]:
    game = task.environment()
    first = game.reset(task.train(index).reference, 3)
    return game, check_observation(first, task.weights)


def say(game: Any, text: str, weights: dict[str, float] | None = None) -> Observation:
    return check_observation(game.step(Action(text)), weights or {"reward": 1.0})


def walk(game: Any, there: tuple[int, int]) -> None:
    """Go by the shortest way."""
    paths = deque([(game._at, [])])
    seen = {game._at}
    while paths:
        (x, y), path = paths.popleft()
        if (x, y) == there:
            for way in path:
                assert not say(game, way).invalid
            return
        for way in sorted(game._exits[x, y]):
            room = x + WAYS[way][0], y + WAYS[way][1]
            if room not in seen:
                seen.add(room)
                paths.append((room, [*path, way]))
    raise AssertionError(f"there is no way to {there}")


@pytest.mark.parametrize("size", [2, 3, 9])
def test_every_adventure_can_be_won(size: int) -> None:
    task = task_of("adventure:Adventure", options={"size": size})
    for index in range(30):
        game, first = begin(task, index)
        assert str(first.content).startswith("Exits: ")
        assert say(game, "open", task.weights).invalid, "there is no key yet"
        walk(game, game._key)
        assert "There is a key." in game._look()
        assert say(game, " TAKE ", task.weights).rewards == {"key": 1.0}
        assert say(game, "take", task.weights).invalid and "You have the key." in game._look()
        walk(game, game._chest)
        end = say(game, "open", task.weights)
        assert (end.done, end.correct, end.rewards) == (True, 1.0, {"chest": 1.0})


def test_the_settings_of_the_adventure_fit() -> None:
    config = load_config(EXAMPLE / "adventure.yaml")
    task = load_task(config.task, 0)
    assert isinstance(task, HasEnvironment) and task.weights == {"chest": 1.0, "key": 0.3}
    assert len(task.evaluation(3)) == 3


def test_an_adventure_is_its_problems_and_nobody_elses() -> None:
    task, plain = (
        task_of("adventure:Adventure"),
        task_of("adventure:Adventure", options={"style": "plain"}),
    )
    maps = {json.dumps(task.train(n).reference) for n in range(9)}
    maps |= {json.dumps(one.reference) for one in task.evaluation(9)}
    assert len(maps) == 18 and task.fingerprint != plain.fingerprint
    dice = random.Random(1)
    moves = [dice.choice([*WAYS, "take", "open", "dance"]) for _ in range(40)]
    walks = []
    for seed in (1, 2):
        game = task.environment()
        game.reset(task.train(5).reference, seed)
        walks.append([game.step(Action(move)) for move in moves])
    assert walks[0] == walks[1]
    assert isinstance(plain.train(0).prompt, str) and task.train(0).prompt[0]["role"] == "system"


def gymnasium(**options: Any) -> Any:
    return task_of("gymnasium", options={"id": "Corridor", "problems": 4} | options)


def test_a_game_of_gymnasium_is_played_in_text() -> None:
    with installed():
        game, first = begin(gymnasium(arguments={"texts": True}))
        at = int(str(first.content).split()[1])
        for place in range(at + 1, 3):
            assert say(game, " on\n") == Observation(f"at {place}", {"reward": 0.0}, correct=0.0)
        end = say(game, "on")
        assert (end.done, end.rewards, end.correct) == (True, {"reward": 1.0}, 1.0)
        game.close()
        assert game._game.closed


def test_numbers_are_actions_of_games_that_want_numbers() -> None:
    with installed():
        game, first = begin(gymnasium(arguments={"render_mode": "ansi"}))
        assert str(first.content).endswith("[@]"), "what a terminal marks by a colour"
        for nonsense in ("on", "2", "-1", "", "1.0"):
            answer = say(game, nonsense)
            assert answer.invalid and "a number from 0 to 1" in str(answer.content)
        while not (answer := say(game, "1")).done:
            assert str(answer.content).endswith("[@]")
        assert answer.correct == 1.0


def test_games_are_seeds_and_held_out_ones_are_others() -> None:
    task = gymnasium()
    trained = [task.train(n).reference["seed"] for n in range(len(task))]
    held_out = [one.reference["seed"] for one in task.evaluation(4)]
    assert len({*trained, *held_out}) == 8
    assert task.fingerprint != gymnasium(arguments={"length": 4}).fingerprint
    assert gymnasium(style="plain", instruction="go").train(0).prompt == "go\n\n"
    with pytest.raises(IndexError):
        task.train(4)


def test_a_game_of_textarena_gives_its_reward_at_the_end() -> None:
    with installed():
        game, first = begin(task_of("textarena", options={"id": "Guess"}))
        assert first.content == "guess"
        number = game._game.number
        wrong = say(game, str((number + 1) % 10))
        assert wrong == Observation("no", correct=0.0)
        end = say(game, str(number))
        assert (end.done, end.rewards, end.correct) == (True, {"reward": 1.0}, 1.0)
        game.close()


def test_what_textarena_has_told_is_not_told_again() -> None:
    with installed():
        game, _ = begin(task_of("textarena", options={"id": "Guess"}))
        number, wrong = game._game.number, str((game._game.number + 1) % 10)
        told = ["all: guess"]

        def everything() -> tuple[int, str]:
            return 0, "\n".join(told)

        game._game.get_observation = everything
        assert say(game, wrong).content == "all: guess"
        told.append("all: no")
        assert say(game, wrong).content == "\nall: no"
        told[0] = "another game"
        assert say(game, wrong).content == "another game\nall: no"
        assert say(game, str(number)).done


def rows(path: Path, *more: dict[str, Any]) -> str:
    asked = [{"role": "user", "content": "the truth?"}]
    row = {"prompt": asked, "env_class": "echo", "reward_spec": {"ground_truth": "yes"}}
    path.write_text("".join(json.dumps(row | one) + "\n" for one in ({}, *more)))
    return str(path)


def test_an_environment_of_skyrl_gets_its_row(tmp_path: Path) -> None:
    task = task_of(
        "skyrl_gym",
        train=rows(tmp_path / "rows.jsonl", {"changes": True, "prompt": [{"role": "user"}]}),
        options={"id": "other", "env_config": {"hint": "well?"}},
    )
    assert task.train(0).prompt == [{"role": "user", "content": "the truth?"}]
    with installed():
        game, first = begin(task)
        assert first.content == [{"role": "user", "content": "well?"}]
        assert say(game, "no").content == [{"role": "user", "content": "again"}]
        end = say(game, "yes")
        assert (end.done, end.rewards, end.correct) == (True, {"reward": 1.0}, 1.0)
        game.close()
        with pytest.raises(ValueError, match="echo changes the prompt"):
            begin(task, 1)
    with pytest.raises(TypeError, match="episodes"):
        task.score("", None)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"task\.options\.id is missing"):
        load_task(schema.TaskConfig(name="gymnasium"), 0)
    with pytest.raises(ModuleNotFoundError):
        begin(task_of("textarena", options={"id": "Guess"}))
