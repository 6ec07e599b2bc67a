"""Whoever dies, of whatever and whenever: the run goes on within its budget, or ends with exit code
4 and one sentence. Every part of the driver is real, and the processes are doubles.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch

from async_grpo.cluster.deaths import is_death, told
from async_grpo.cluster.learner_group import LearnerGroup
from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent, LearnerLost
from async_grpo.run.ending import coded
from tests.support.mortal import World, run, settings
from tests.support.wiring import tiny_model

MEMORY = """1 worker(s) were killed due to the node running low on memory. Memory on the node \
(IP: 10.0.0.2, ID: a37) was 22.40GB used / 23.59GB limit (0.949555)
OOM kill reason: Memory usage 4662390784B exceeded threshold of 253252688B (1.0%)
Object store memory usage: [- objects spillable: 0
Consider provisioning more memory on this node or reducing task parallelism."""
"""What Ray 2.60 says, shortened."""
WORDS = """The actor died unexpectedly before finishing this task.
\tclass_name: LearnerProcess
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes \
include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop."""
FULL = """CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB \
of which 1.20 GiB is free. Process 7 has 77.90 GiB memory in use."""
ERRORS: dict[str, Callable[[], BaseException]] = {
    "died": lambda: ray.exceptions.RayActorError(error_msg=WORDS),
    "unavailable": lambda: ray.exceptions.ActorUnavailableError("RpcError: Socket closed", None),
    "memory": lambda: ray.exceptions.OutOfMemoryError(MEMORY),
    "node": lambda: ray.exceptions.NodeDiedError("The node is dead"),
    "worker": ray.exceptions.WorkerCrashedError,
    "raylet": ray.exceptions.LocalRayletDiedError,
    "unschedulable": lambda: ray.exceptions.ActorUnschedulableError("The node doesn't exist"),
}
ENGINE = {
    "start": ("start", 1),
    "connect": ("connect", 1),
    "load": ("receive", 1),
    "sampling": ("probe_sequences", 2),
    "evaluate before training": ("evaluate", 1),
    "step": ("run", 1),
    "probe": ("health", 2),
    "sync": ("receive", 6),
    "evaluate": ("evaluate", 3),
}
"""Phases of a run, with the call in which an engine dies, and its number."""
LEARNER = {
    "start": ("address", 1),
    "load": ("setup", 1),
    "connect": ("connect", 1),
    "check": ("stage_perturbed", 1),
    "first weights": ("stage", 1),
    "step": ("prepare", 1),
    "update": ("train", 2),
    "sync": ("stage", 2),
    "save": ("write_checkpoint", 1),
}
QUEUE = {
    "start": ("opened", 1),
    "load": ("progress", 1),
    "live": ("live", 1),
    "step": ("next_batch", 1),
    "metrics": ("full_metrics", 1),
    "sync": ("live", 2),
    "save": ("snapshot", 1),
}
STOP = {"rollout": "close", "learner": "close", "queue": "close"}


REPEATED = (
    "connect",
    "load",
    "sampling",
    "evaluate before training",
    "step",
    "probe",
    "sync",
    "evaluate",
)
"""What is asked of an engine again that could not be reached and is well."""


def cases(
    kind: str, phases: dict[str, tuple[str, int]], errors: str = "unavailable memory node"
) -> list[object]:
    return [
        pytest.param((kind, *call), error, id=f"{kind}-{phase}-{error}")
        for phase, call in phases.items()
        for error in errors.split()
    ]


def is_repeated(call: tuple, kind: str) -> bool:
    """Whether the engine lives on."""
    return kind == "unavailable" and call in [("rollout", *ENGINE[phase]) for phase in REPEATED]


def sentence(error: BaseException | None, kind: str) -> str:
    """What the user reads of the end of a run: exit code 4 and one line that names the cause."""
    assert error is not None
    code, message = coded(error)
    assert code == 4 and "\n" not in message, (code, message)
    assert ("short of memory (10.0.0.2: 22.40GB used / 23.59GB limit)" in message) == (
        kind == "memory"
    ), message
    return message


@pytest.mark.parametrize(("call", "kind"), [*cases("rollout", ENGINE), *cases("learner", LEARNER)])
def test_a_death_costs_one_fault_of_the_budget(tmp_path: Path, call: tuple, kind: str) -> None:
    world = World(settings(tmp_path), (*call, ERRORS[kind]()))
    assert run(world) == (None, None), world.listener.text
    assert world.strikes == 1 and not world.listener.failures
    actors, learner = world.running.actors, world.running.supervisor
    if is_repeated(call, kind):
        assert not world.listener.faults
    elif call[0] == "rollout":
        [fault] = world.listener.faults
        assert actors.budget.restarts == 1 and not learner.restarts and "died" in fault
    else:
        [fault] = world.listener.faults
        assert (
            learner.restarts == 1 and not actors.budget.restarts and "a learner rank died" in fault
        )
    assert all(("short of memory" in one) == (kind == "memory") for one in world.listener.faults)


@pytest.mark.parametrize(("call", "kind"), cases("learner", LEARNER, "memory node"))
def test_a_learner_that_dies_once_too_often_is_a_sentence(
    tmp_path: Path, call: tuple, kind: str
) -> None:
    world = World(settings(tmp_path, budget=0), (*call, ERRORS[kind]()))
    ended, at_stop = run(world)
    assert "a learner rank died during" in sentence(ended, kind) and at_stop is None


async def test_a_rank_that_complains_of_a_dead_one_is_not_the_dead_one(tmp_path: Path) -> None:
    async def raises(error: BaseException, seconds: float) -> None:
        await asyncio.sleep(seconds)
        raise error

    complaint = ray.exceptions.RayTaskError("update", "connection reset", RuntimeError())
    group = LearnerGroup(
        settings(tmp_path, ranks=2),
        placement=SimpleNamespace(device="cpu", learners=()),
        options=[],
        queue=None,
        model_dir="",
        backend="",
        key="",
        total_updates=1,
    )
    for other, expected in ((ERRORS["memory"](), LearnerLost), (None, ray.exceptions.RayTaskError)):
        ends = [raises(complaint, 0.0), raises(other, 0.01) if other else asyncio.sleep(0)]
        group._handles = [
            SimpleNamespace(update=SimpleNamespace(remote=lambda end=end: end)) for end in ends
        ]
        with pytest.raises(expected, match="short of memory" if other else "connection reset"):
            await group._all("update")


@pytest.mark.parametrize("phase", ["load", "check", "first weights", "update", "save"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_learner_without_gpu_memory_is_a_sentence_with_what_helps_and_no_restart(
    tmp_path: Path, phase: str, ranks: int
) -> None:
    """It would be again."""
    config = settings(tmp_path, ranks=ranks)
    config = Config.model_validate(config.model_dump() | {"model": {"path": tiny_model()}})
    full = ray.exceptions.RayTaskError("train", "trace", torch.OutOfMemoryError(FULL))
    world = World(config, ("learner", *LEARNER[phase], full.as_instanceof_cause()))
    ended, at_stop = run(world)
    assert ended is not None and at_stop is None and not world.listener.faults
    code, message = coded(ended)
    assert code == 2 and "\n" not in message
    assert re.match(
        r"a learner rank ran out of GPU memory during the learner's (call )?\w+( .+)? \(CUDA out "
        r"of memory. Tried to allocate 2.00 GiB.\): use a smaller model; `async-grpo check` shows "
        r"the parts",
        message,
    ), message


@pytest.mark.parametrize("error", [RuntimeError("x"), torch.OutOfMemoryError("host")])
def test_another_error_of_a_learner_is_no_lack_of_gpu_memory(
    tmp_path: Path, error: Exception
) -> None:
    raised = ray.exceptions.RayTaskError("train", "trace", error).as_instanceof_cause()
    ended, _ = run(World(settings(tmp_path), ("learner", "train", 1, raised)))
    assert ended is not None and coded(ended)[0] == 1


@pytest.mark.parametrize(("call", "kind"), cases("rollout", ENGINE, "unavailable memory"))
@pytest.mark.parametrize("least", [1, 2])
def test_without_a_budget_the_least_number_of_actors_is_enough(
    tmp_path: Path, call: tuple, kind: str, least: int
) -> None:
    world = World(settings(tmp_path, budget=0, least=least), (*call, ERRORS[kind]()))
    ended, at_stop = run(world)
    assert world.strikes == 1 and at_stop is None
    if is_repeated(call, kind) or call[1:] == ENGINE["evaluate"]:  # the other one answers
        assert ended is None
    elif least == 1:
        assert ended is None and len(world.running.actors.deaths) == 1
        assert any("1 rollout actors go on" in note for note in world.listener.notes)
    else:
        assert "cluster.rollout_actors.min is 2" in sentence(ended, kind)
        if call[1:] in [ENGINE[phase] for phase in ("connect", "load", "sampling")]:
            assert world.running.loop.phase == "connecting the weights"
        elif call[1:] == ENGINE["start"]:
            assert world.running.loop.phase == "starting"


@pytest.mark.parametrize(("call", "kind"), cases("queue", QUEUE, "unavailable memory"))
def test_a_queue_that_is_gone_for_good_is_a_sentence(
    tmp_path: Path, call: tuple, kind: str
) -> None:
    world = World(settings(tmp_path), (*call, ERRORS[kind]()))
    ended, at_stop = run(world)
    assert "the replay queue's process died" in sentence(ended, kind) and at_stop is None


@pytest.mark.parametrize("kind", ["memory", "node"])
def test_a_relay_that_dies_costs_a_repetition(tmp_path: Path, kind: str) -> None:
    world = World(settings(tmp_path), ("relay", "write", 3, ERRORS[kind]()))
    assert run(world) == (None, None) and world.strikes == 1 and not world.listener.faults


@pytest.mark.parametrize("kind", ["memory", "node"])
@pytest.mark.parametrize("who", STOP)
def test_who_dies_while_the_run_stops_changes_nothing(tmp_path: Path, who: str, kind: str) -> None:
    world = World(settings(tmp_path), (who, STOP[who], 1, ERRORS[kind]()))
    assert run(world) == (None, None) and world.strikes == 1


@pytest.mark.parametrize("phase", ["start", "connect", "load"])
def test_a_node_that_goes_in_the_start_is_one_fault_and_the_others_go_on(
    tmp_path: Path, phase: str
) -> None:
    method, number = ENGINE[phase]
    world = World(
        settings(tmp_path), ("rollout", method, number + 1, ERRORS["node"]())
    )  # the second engine is on node b
    world.at_death = lambda: world.lost_nodes.add("b")
    assert run(world) == (None, None) and world.strikes == 1
    [fault] = world.listener.faults
    assert "node 10.0.0.2 left the cluster, and with it actor-1.0" in fault
    assert any("1 rollout actors go on" in note for note in world.listener.notes)
    assert len(world.running.actors.alive()) == 0 and world.running.actors.budget.faults == 1


def test_what_a_living_process_raises_is_no_death() -> None:
    for error in ERRORS.values():
        assert is_death(error())
        inside = ray.exceptions.RayTaskError("evaluate", "trace", error()).as_instanceof_cause()
        assert not is_death(inside)
    for other in (
        None,
        ray.exceptions.GetTimeoutError(),
        ray.exceptions.RayTaskError("f", "", ValueError()),
        FaultBudgetSpent("x"),
    ):
        assert not is_death(other)


@pytest.mark.parametrize("kind", ERRORS)
def test_a_death_that_nobody_expected_is_exit_4_and_one_line(kind: str) -> None:
    """Of a task, say, or inside a call."""
    error = ERRORS[kind]()
    told_by = ray.exceptions.RayTaskError("f", "trace", error).as_instanceof_cause()
    for raised in (error, told_by, ExceptionGroup("unhandled", [error])):
        assert sentence(raised, kind).startswith("a process of the run died: ")


def test_a_death_is_told_without_advice_about_ray() -> None:
    assert told(ERRORS["memory"]()).startswith(
        "OutOfMemoryError: its machine was short of memory (10.0.0.2: 22.40GB used / 23.59GB "
        "limit), and Ray's memory monitor killed it"
    )
    assert re.fullmatch(
        r"RayActorError: The actor is dead because its worker process has died, killed from "
        r"outside or by a crash; `dmesg` shows whether memory was short",
        told(ERRORS["died"]()),
    )
    unborn = f"{WORDS}\nThe actor never ran - it was cancelled before it started running."
    assert told(ray.exceptions.RayActorError(error_msg=unborn)) == told(ERRORS["died"]())
