"""Programs that play episodes over HTTP, with a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from async_grpo.agents.program import Program
from async_grpo.agents.program_process import KEPT, _Pipes
from async_grpo.environments.pool import EnvironmentFailed, EnvironmentPool
from async_grpo.rollout.engine.base import Sampling
from async_grpo.rollout.episodes import Episode, EpisodePlayer, PlayerParts
from async_grpo.tasks.base import TaskError
from tests.support.programs import PLAIN, config_of, play, playing, script
from tests.support.scripted_policy import Letters, Saying
from tests.support.waiting import alive, wait_until, wait_until_gone

pytestmark = pytest.mark.timeout(90)  # they wait for each other

PRELOADED = pytest.mark.parametrize("preload", [[], ["urllib.request"]], ids=["plain", "preloaded"])


@pytest.mark.parametrize("preload", [[], ["openai"]], ids=["plain", "preloaded"])
def test_an_openai_loop_is_the_python_environment(preload: list[str]) -> None:
    """The same engine, the same turns: the same rows, rewards and finish reason."""
    from async_grpo.config import schema
    from async_grpo.environments.chain import Chain

    chain = Chain(schema.TaskConfig(name="chain"), 0)
    said = [chain.train(index).solution or () for index in range(99)]
    index = next(at for at, one in enumerate(said) if len(one) >= 5)
    turns = said[index][::2]
    engine = Saying(*turns, version=1)
    found, counts = play(
        engine, config_of(script("openai_chain"), options={"preload": preload}), index=index
    )
    assert isinstance(found, Episode), found

    async def plain() -> Episode:
        config = config_of([])
        settings = schema.TaskConfig(name="chain")
        pool = EnvironmentPool(settings, config.environment, weights=chain.weights, seed=0)
        await pool.start()
        saying: Any = Saying(*turns, version=1)
        parts = PlayerParts(config, saying, Letters(), Counter())
        player = EpisodePlayer(parts, pool, weights=chain.weights)
        sampling = Sampling(n=1, max_tokens=60, temperature=1.0, seed=5)
        try:
            return await player.play(chain.train(index), sampling, seed=3)
        finally:
            await pool.close()

    known = asyncio.run(plain())
    [row], [other] = found.session.rows, known.session.rows
    assert row.prompt == other.prompt and row.ids == other.ids
    assert row.segments == other.segments and row.versions == other.versions
    assert (row.behavior_logprobs == other.behavior_logprobs).all()
    assert found.rewards == known.rewards == {"correct": 1.0}
    assert found.verdict == known.verdict == 1.0
    assert found.finish_reason == known.finish_reason == "env_done"
    assert [one.seed for _, one in engine.asked] == [6 + at for at in range(len(turns))]
    assert counts["requests_answered"] == counts["turns"] == len(turns)


FAILING = [
    ("exits", "exception", "exit status 3: Boom"),
    ("says_nothing", "exception", "must be JSON"),
    ("never_asks", "silent", "without asking"),
    ("prints_much", "exception", "output_mb"),
    ("kills_itself", "exception", "signal 9"),
    ("unknown_reward", "wrong_type", "other"),
    ("compacts_and_exits", "exception", "exit status 3"),
    ("asks_too_much", "refused", "messages take 504); exception: "),
    ("hides_it", "refused", "all requests of the episode were refused: the episode has used"),
]
"""What a program does, and the failure that it is."""
OF_PROCESSES = ("exits", "prints_much", "kills_itself")
"""Those that a forked program does in another way than one that was begun."""


@pytest.mark.parametrize(
    ("preload", "name", "reason", "says"),
    [
        *([[], *case] for case in FAILING),
        *([["urllib.request"], *case] for case in FAILING if case[0] in OF_PROCESSES),
    ],
)
def test_what_the_policy_cannot_have_caused_is_no_score(
    preload: list[str], name: str, reason: str, says: str
) -> None:
    options = {"output_mb": 1.0, "preload": preload}
    config = config_of([*script("failing"), name], options=options)
    found, counts = play(Saying("a1", "a2"), config)
    assert isinstance(found, EnvironmentFailed)
    assert found.reason == reason and says in str(found)
    assert counts[f"environment_{reason}"] == 1


def test_an_error_that_nobody_has_foreseen_fails_its_episode() -> None:
    found, counts = play(Saying(KeyError("odd")), config_of([*script("failing"), "exits"]))
    assert isinstance(found, EnvironmentFailed), found
    assert found.reason == "answer" and "KeyError: 'odd'" in str(found)
    assert counts["environment_answer"] == counts["requests_503"] == 1


@PRELOADED
def test_a_result_is_a_line_whatever_else_ends_lines_in_unicode(preload: list[str]) -> None:
    config = config_of([*script("failing"), "result_of_line_ends"], options={"preload": preload})
    found, _ = play(Saying("a1"), config)
    assert isinstance(found, Episode), found
    assert found.verdict == 1.0


@pytest.mark.parametrize("size", [KEPT - 2, KEPT, 2 * KEPT])
def test_a_result_has_less_than_what_is_kept(size: int) -> None:
    found, _ = play(Saying("a1"), config_of([*script("failing"), "result_of_size", str(size)]))
    if size < KEPT:
        assert isinstance(found, Episode) and found.verdict == 1.0
    else:
        assert isinstance(found, EnvironmentFailed) and "64 KiB or more" in str(found)


def test_what_is_printed_is_read_and_thrown_away() -> None:
    """It says itself by how much the peak memory of its reader has grown."""
    config = config_of([*script("failing"), "prints_256_mb"], options={"output_mb": 257.0})
    found, _ = play(Saying("a1"), config)
    assert isinstance(found, Episode), found
    assert found.metrics["grown_mb"] < 64


@PRELOADED
def test_memory_is_what_a_program_has_not_what_it_reserves(preload: list[str]) -> None:
    """As the runtimes of other languages do; 20 GiB here."""
    environment = {"memory_mb": 1024, "step_timeout_s": 200.0}
    config = config_of(
        [*script("failing"), "reserves"], environment=environment, options={"preload": preload}
    )
    found, _ = play(Saying("a1"), config)
    assert isinstance(found, Episode), found
    assert found.verdict == 1.0
    config = config_of(
        [*script("failing"), "eats"], environment=environment, options={"preload": preload}
    )
    found, _ = play(Saying("a1"), config)
    assert isinstance(found, EnvironmentFailed)
    assert found.reason == "exception" and "MemoryError" in str(found)


@pytest.mark.parametrize("on_timeout", ["score_zero", "fail_group"])
def test_a_program_that_hangs_ends_at_its_deadline(on_timeout: str) -> None:
    environment = {"step_timeout_s": 2.0, "on_timeout": on_timeout}
    options = {"preload": ["urllib.request"]}  # so that it asks soon after it was started
    config = config_of([*script("failing"), "hangs"], options=options, environment=environment)
    found, _ = play(Saying("a1"), config)
    if on_timeout == "fail_group":
        assert isinstance(found, EnvironmentFailed) and found.reason == "timeout"
    else:
        assert isinstance(found, Episode)
        assert (found.finish_reason, found.rewards) == ("env_timeout", {"correct": 0.0})


@PRELOADED
async def test_a_program_that_hangs_is_ended_with_its_episode(
    preload: list[str], tmp_path: Path
) -> None:
    """Also one whose environment does not show the key, while its process goes on with others."""
    pids = tmp_path / "pids"
    config = config_of(
        [*script("failing"), "hides_and_hangs", str(pids)],
        environment={"step_timeout_s": 2.5},
        options={"preload": preload},
    )

    async with playing(Saying("a1", "a1"), config, PLAIN) as (player, task, _):
        sampling = Sampling(n=1, max_tokens=60, temperature=1.0, seed=5)
        playing_both = [player.play(task.train(0), sampling, seed=3) for _ in range(2)]
        for found in await asyncio.gather(*playing_both):
            assert found.finish_reason == "env_timeout"
        both = [line.split() for line in pids.read_text().splitlines()]
        assert len(both) == 2 and not any(Path(f"/proc/{program}").exists() for program, _ in both)
        [child] = {child for _, child in both}
        assert Path(f"/proc/{child}").exists()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_turns": 2}, "max_turns"), ({"response_length": 6, "context_length": 40}, "length")],
)
def test_an_episode_that_has_used_up_its_room_is_worth_nothing(
    limits: dict[str, int], reason: str
) -> None:
    config = config_of([*script("failing"), "asks_for_ever"], **limits)
    found, _ = play(Saying(*["g1"] * 20), config)
    assert isinstance(found, Episode), found
    assert (found.finish_reason, found.rewards) == (reason, {"correct": 0.0})
    assert found.session.sampled == 6


def test_a_program_that_goes_on_behind_a_shorter_history_has_its_score() -> None:
    found, _ = play(Saying("a1", "a2"), config_of([*script("failing"), "compacts"]))
    assert isinstance(found, Episode), found
    assert (found.finish_reason, found.rewards) == ("env_done", {"correct": 1.0})
    assert len(found.session.rows) == 2


@PRELOADED
def test_what_a_program_leaves_behind_is_ended(preload: list[str], tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    config = config_of([*script("failing"), "leaves", str(pids)], options={"preload": preload})
    found, _ = play(Saying("a1"), config)
    assert isinstance(found, Episode), found
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 8 and not any(Path(f"/proc/{pid}").exists() for pid in left)


@pytest.mark.parametrize(
    ("preload", "killed"),
    [
        pytest.param([], "player", marks=pytest.mark.slow),
        (["openai"], "player"),
        ([], "player, whose child is stopped"),
        ([], "guard"),
        pytest.param([], "child", marks=pytest.mark.slow),
        pytest.param([], "guard, then player", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_nothing_outlives_whoever_is_killed(
    preload: list[str], killed: str, tmp_path: Path
) -> None:
    """The player as a rollout actor is, the guard as Ray does it before it ends an actor."""
    pids = tmp_path / "pids"
    player = subprocess.Popen(
        [sys.executable, "-m", "tests.support.programs", str(pids), json.dumps(preload)]
    )
    told = wait_until(lambda: said(pids), 60, "the program to have begun eight others")
    left = [int(pid) for pid in told.split()[:-1]]
    assert len(left) == 9 and all(alive(pid) for pid in left)
    [guard] = children_of(player.pid)
    [child] = children_of(guard)
    if "stopped" in killed:
        os.kill(child, signal.SIGSTOP)
    for one in killed.split(",")[0], *killed.split("then ")[1:]:
        os.kill({"player": player.pid, "guard": guard, "child": child}[one], signal.SIGKILL)
    wait_until_gone([*left, child])
    player.kill()
    player.wait(10)
    wait_until_gone([guard])


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(one) for each in lists for one in each.read_text().split()]


def said(path: Path) -> str:
    text = path.read_text() if path.exists() else ""
    return text if text.endswith("all\n") else ""


@pytest.mark.slow
def test_a_forked_program_is_as_one_that_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables, arguments, directory, environment in /proc, numbers by chance, exit status."""
    passed = ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "NAMED")
    for name in (*passed[2:], "SECRET"):
        monkeypatch.setenv(name, str(tmp_path))
    told = []
    for preload in ([], ["random"]):
        lines = []
        for _ in range(2):
            command = [*script("failing"), "tells", str(tmp_path / "told"), "more"]
            options = {"preload": preload, "directory": str(tmp_path), "variables": {"A": "b c"}}
            config = config_of(command, options=options, env_vars=["NAMED"])
            found, _ = play(Saying("a1"), config)
            assert isinstance(found, EnvironmentFailed) and "exit status 1: the end" in str(found)
            lines.append(json.loads((tmp_path / "told").read_text()))
        assert lines[0].pop("by_chance") != lines[1].pop("by_chance")
        assert lines[0].pop("key_in_proc") and lines[1].pop("key_in_proc")
        told += lines
    assert told[0] == told[1] == told[2] == told[3]
    own = (
        "A",
        "ANTHROPIC_API_KEY",
        "ANTHROPIC_BASE_URL",
        "OPENAI_API_KEY",
        "OPENAI_BASE_URL",
        "PYTHONUNBUFFERED",
    )
    assert told[0]["variables"] == sorted([*passed, *own])
    assert told[0]["directory"] == str(tmp_path) and told[0]["A"] == "b c"


@pytest.mark.parametrize(
    ("module", "whose"),
    [
        ("random", "by_chance"),
        ("numpy.random", "numpy"),
        pytest.param("torch", "torch", marks=pytest.mark.slow),
    ],
)
def test_forked_programs_have_random_numbers_of_their_own(
    module: str, whose: str, tmp_path: Path
) -> None:
    async def scenario() -> set[float]:
        command = [*script("failing"), "tells", str(tmp_path / "told")]
        options = {"preload": [module], "variables": {"A": "", "OFFLINE": "1"}}
        launcher = Program(config_of(command, options=options).task, 0).environment()._launcher
        found = set()
        for number in range(3):
            process = await launcher.begin(b"{}", {"OPENAI_API_KEY": f"{number:032}"})
            assert (await process.end()).err == "the end"
            await process.close()
            found.add(json.loads((tmp_path / "told").read_text())[whose])
        return found

    assert len(asyncio.run(asyncio.wait_for(scenario(), 60))) == 3


def test_a_module_that_cannot_be_imported_is_said() -> None:
    config = config_of(script("openai_chain"), options={"preload": ["no_such_module"]})
    found, _ = play(Saying("a1"), config)
    assert isinstance(found, EnvironmentFailed) and found.reason == "exception"
    assert "ModuleNotFoundError: No module named 'no_such_module'" in str(found)


@pytest.mark.parametrize("command", [["python"], ["python", "-u", "agent.py"], ["python", "-m"]])
def test_what_cannot_be_forked_is_refused(command: list[str]) -> None:
    config = config_of(command, options={"preload": ["json"]})
    with pytest.raises(TaskError, match="preload is for commands like"):
        Program(config.task, 0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"directory": "/nowhere"}, "/nowhere is no directory"),
        ({"command": ["no_such_program"]}, "there is no program no_such_program"),
        ({"command": ["./no_such_program"]}, "there is no program ./no_such_program"),
        ({"command": ["python", "no_agent.py"]}, "no_agent.py does not exist"),
        ({"preload": ["no_such_module"]}, "preload: ModuleNotFoundError"),
        ({"command": ["true", "agent"], "preload": ["json"]}, "has ended"),
    ],
)
def test_what_cannot_be_begun_is_said_before_a_run(options: dict[str, Any], says: str) -> None:
    config = config_of(script("openai_chain"), options=options)
    with pytest.raises(TaskError, match=says):
        Program(config.task, 0).check(30.0)


def test_a_program_that_can_be_begun_passes() -> None:
    Program(config_of(script("openai_chain"), options={"preload": ["json"]}).task, 0).check(30.0)


@PRELOADED
@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_a_program_that_is_being_begun_is_ended_too(
    how: str, preload: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it has started meanwhile: the environment does not know it yet."""
    pids, opened = tmp_path / "pids", _Pipes.open

    async def slow(*arguments: Any, **more: Any) -> None:
        while not said(pids):
            await asyncio.sleep(0.02)
        await opened(*arguments, **more)

    monkeypatch.setattr(_Pipes, "open", slow)
    config = config_of([*script("failing"), "leaves_and_hangs", str(pids)])
    options = config.task.options | {"preload": preload, "variables": {"OFFLINE": "1"}}
    task = Program(config.task.unchecked_copy(update={"options": options}), 0)
    environment = task.environment()
    reference = {"prompt": "", "reference": 0, "url": "http://127.0.0.1:9/v1", "key": "k" * 32}
    reset = asyncio.create_task(environment.reset(reference, 0))
    await asyncio.sleep(0.1)
    if how == "closed":
        await environment.close()
        await reset
    else:
        reset.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reset
        await environment.close()
    left = [int(pid) for pid in said(pids).split()[:-1]]
    assert len(left) == 9
    wait_until_gone(left)


def test_a_result_counts_whoever_has_the_output_still(tmp_path: Path) -> None:
    """A process without the key, in a session of its own, is not found with its episode, and the
    result is there; it ends with the environments.
    """
    config = config_of([*script("failing"), "leaves_stranger", str(tmp_path / "pid")])
    found, _ = play(Saying("a1"), config)
    assert isinstance(found, Episode), found
    assert found.verdict == 1.0
    wait_until_gone([int((tmp_path / "pid").read_text())])


async def test_programs_leave_no_zombies(tmp_path: Path) -> None:
    """What they started is a child of the environments' process once they have ended."""
    config = config_of([*script("failing"), "leaves_plain"])
    launcher = Program(config.task, 0).environment()._launcher
    for number in range(3):
        variables = {"OPENAI_API_KEY": f"{number}" * 32, "OFFLINE": "1"}
        process = await launcher.begin(b"{}", variables)
        assert (await process.end()).code == 0
        await process.close()
    own, stats = f" {os.getpid()} ", []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            stats.append(path.read_text())
    assert not [one for one in stats if f") Z{own}" in one and "(sleep)" in one]


def test_a_program_that_was_just_forked_is_killed_at_once(tmp_path: Path) -> None:
    """Before it has its own session and environment."""

    async def scenario() -> float:
        config = config_of([*script("failing"), "hangs"], options={"preload": ["json"]})
        launcher = Program(config.task, 0).environment()._launcher
        slowest = 0.0
        for number in range(12):
            variables = {"OPENAI_API_KEY": f"{number:032}", "OFFLINE": "1"}
            process = await launcher.begin(b"{}", variables)
            began = time.monotonic()
            await asyncio.wait_for(process.close(), 20)
            slowest = max(slowest, time.monotonic() - began)
        return slowest

    assert asyncio.run(asyncio.wait_for(scenario(), 100)) < 15.0, "it waited for the program"
