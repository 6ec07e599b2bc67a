"""Agent libraries as they come from the package index, each in an interpreter of its own, on a
policy that says what it is told to.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from async_grpo.rollout.chat_format import PlainFormat
from async_grpo.rollout.episodes import Episode
from async_grpo.tasks.base import Problem
from tests.support.programs import PLAIN, config_of, play
from tests.support.scripted_policy import Letters, Saying
from tests.support.served_episodes import Reasoning

EXAMPLES = Path(__file__).parents[3] / "examples"
INSTALL_S = 400
ASKED = Problem("1+2=", {"prompt": "1+2=", "reference": "3"})
pytestmark = [pytest.mark.slow, pytest.mark.timeout(INSTALL_S + 100)]


@pytest.mark.parametrize(
    ("requirement", "example", "chat", "turns", "segments"),
    [
        ("pydantic-ai-slim[openai]", "pydantic_ai", Reasoning(Letters()), ["!add", "3"], 2),
        ("verifiers<0.2", "verifiers", PLAIN, ["3"], 1),
    ],
    ids=["pydantic_ai", "verifiers"],
)
def test_a_library_plays_unmodified(
    tmp_path: Path,
    requirement: str,
    example: str,
    chat: PlainFormat,
    turns: list[str],
    segments: int,
) -> None:
    """One row, one turn behind the other: the library sends back what it was given."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", requirement], check=True, timeout=INSTALL_S
    )
    config = config_of(
        [str(python), str(EXAMPLES / example / "agent.py")],
        prompt_length=4000,
        response_length=200,
        context_length=9000,
    )
    episode, counts = play(Saying(*turns), config, problem=ASKED, chat=chat)
    assert isinstance(episode, Episode), episode
    assert (episode.verdict, episode.rewards) == (1.0, {"correct": 1.0})
    [row] = episode.session.rows
    assert len(row.segments) == segments and counts["forks"] == 0


def test_the_bare_loop_warms_up_and_runs() -> None:
    options = {"preload": ["warm"]}
    agent = EXAMPLES / "openai_loop" / "agent.py"
    episode, _ = play(Saying("a1"), config_of([sys.executable, str(agent)], options=options))
    assert isinstance(episode, Episode) and episode.session.sampled == 3
