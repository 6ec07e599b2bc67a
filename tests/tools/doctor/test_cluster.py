"""What the nodes of a cluster lack, on nodes that are functions of this process."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from async_grpo.cluster import session
from async_grpo.cluster.placement import Node, PlacementError
from async_grpo.config.load import load_settings
from async_grpo.tools.doctor import cluster
from async_grpo.tools.doctor.machine import Finding, row


class Nodes:
    """Answers as two nodes do; what is in `broken` answers something else on node b."""

    def __init__(self) -> None:
        self.broken: dict[Callable[..., Any], Any] = {}

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        answer = function(*arguments)
        return {"a": answer, "b": self.broken.get(function, answer)}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    look = [row("python", "3.11"), row("memory", "1 GiB", True, "1 GiB is free", warns=False)]

    def findings() -> list[Finding]:
        return look

    monkeypatch.setattr(cluster, "findings", findings)
    monkeypatch.setattr(cluster, "CONNECT_S", 0.5)
    return Nodes()


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def examined(nodes: Nodes, port: int) -> list[Finding]:
    return list(cluster.examine(nodes, "127.0.0.1", port))


def test_every_node_has_the_rows_of_its_machine(nodes: Nodes, port: int) -> None:
    rows = examined(nodes, port)
    labels = ["python", "memory", "clock", "ports"]
    assert [one[:2] for one in rows] == [(node, label) for node in "ab" for label in labels]
    assert [one[3:] for one in rows if one[3]] == [("1 GiB is free", "error")] * 2


def test_a_node_that_is_silent(nodes: Nodes, port: int) -> None:
    nodes.broken[cluster.findings] = TimeoutError("too late")
    [one] = [one for one in examined(nodes, port) if one[0] == "b"]
    assert one == ("b", "node", "not known", "it cannot do a run's work: too late", "error")


@pytest.mark.parametrize(("ahead", "shown"), [(7.25, "+7.2"), (-90.0, "-90.0")])
def test_a_clock_that_is_off(nodes: Nodes, port: int, ahead: float, shown: str) -> None:
    nodes.broken[cluster.clock] = time.time() + ahead
    [(*_, fault, severity)] = [one for one in examined(nodes, port) if one[:2] == ("b", "clock")]
    assert severity == "warning"
    assert fault == f"its clock is {shown} s off: let NTP set it"


def test_a_slow_answer_is_no_clock_that_is_off(
    nodes: Nodes, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that a question takes is the error of its answer: the quickest one counts."""
    now, trips = [1000.0], iter([8.0, 0.5, 6.0])

    def ask(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        if function is not cluster.clock:
            return nodes(function, *arguments)
        there = now[0] + 1.2  # as soon as it is asked: the answer takes the time
        now[0] += next(trips)
        return {"a": there, "b": there}

    monkeypatch.setattr(cluster.time, "time", lambda: now[0])
    rows = list(cluster.examine(ask, "127.0.0.1", port))
    found = [one[2:4] for one in rows if one[1] == "clock"]
    assert found == [("+0.950 s, give or take 0.250 s", "")] * 2


def test_a_port_that_is_closed(nodes: Nodes, port: int) -> None:
    nodes.broken[cluster.connects] = False
    [one] = [one for one in examined(nodes, port) if one[:2] == ("b", "ports")]
    said = "it cannot connect to 127.0.0.1: open all TCP ports of nodes"
    assert one == ("b", "ports", "to 127.0.0.1", said, "error")


def test_a_connection_is_tried(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "CONNECT_S", 0.5)
    assert cluster.connects("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        other = closed.getsockname()[1]
    assert not cluster.connects("127.0.0.1", other)


def test_a_cluster_without_room_for_the_run() -> None:
    settings = {"model": {"path": "a/b"}, "task": {"name": "arithmetic"}, "run": {"total_steps": 1}}
    config = load_settings(settings, ["learner.ranks=2", "cluster.device=cuda"])
    small = Node("n", "10.0.0.7", cpus=4.0, gpus=1.0)
    with pytest.raises(PlacementError, match="the run asks for 2 learner ranks with a GPU each"):
        list(cluster._places(config, [small]))
    large = Node("n", "10.0.0.7", cpus=8.0, gpus=4.0)
    assert list(cluster._places(config, [large])) == [row("places", "2 learner ranks, 2 engines")]


def test_answers_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails or comes too late stands in its place."""

    def get(call: str) -> str:
        if call == "fails":
            raise ray.exceptions.RayError("it died")
        return call.upper()

    def wait(calls: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        assert (num_returns, timeout) == (3, 7.0)
        return ["one", "fails"], ["late"]

    monkeypatch.setattr(session.ray, "get", get)
    monkeypatch.setattr(session.ray, "wait", wait)
    one, failed, late = session.answers(["one", "fails", "late"], timeout_s=7.0)
    assert one == "ONE" and str(failed) == "it died" and str(late) == "no answer within 7 s"


class Session:
    """A connection to a cluster of two nodes, the second of which is silent."""

    def __init__(self) -> None:
        self.closed, self.asked = False, list[tuple[str, str]]()

    def nodes(self) -> list[Node]:
        return [Node(name, name, cpus=4.0, gpus=0.0) for name in ("127.0.0.1", "127.0.0.2")]

    def on_node(self, node_id: str) -> dict[str, str]:
        return {"node": node_id}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def joined(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Session:
    """That connection, in place of Ray."""
    session = Session()

    class Task:
        def __init__(self, function: Callable[..., Any], node: str = "") -> None:
            self.function, self.node = function, node

        def options(self, *, node: str) -> Task:
            return Task(self.function, node)

        def remote(self, *arguments: Any) -> Any:
            session.asked.append((self.function.__name__, self.node))
            silent = self.node == "127.0.0.2"
            return TimeoutError("no answer") if silent else self.function(*arguments)

    monkeypatch.setattr(cluster.RaySession, "open", lambda *, processes: session)
    monkeypatch.setattr(cluster.ray, "remote", lambda **_: Task)
    monkeypatch.setattr(cluster, "answers", lambda calls, *, timeout_s: calls)
    return session


def test_a_silent_node_is_asked_once_and_the_cluster_left(joined: Session) -> None:
    rows = list(cluster.nodes(None, []))
    assert rows[0][1:3] == ("ray cluster", "127.0.0.1: 4 CPUs, 0 GPUs; 127.0.0.2: 4 CPUs, 0 GPUs")
    [silent] = [one for one in rows if one[0] == "127.0.0.2"]
    assert silent[3] == "it cannot do a run's work: no answer"
    assert ("127.0.0.1", "ports", "to 127.0.0.1", "", "") in rows
    assert [name for name, node in joined.asked if node == "127.0.0.2"] == ["findings"]
    assert joined.closed


def test_a_run_without_room_is_refused_and_the_nodes_are_looked_at(joined: Session) -> None:
    rows = list(cluster.nodes("quickstart", ["cluster.device=cuda"]))
    [places] = [one for one in rows if one[1] == "places"]
    assert places[3].startswith("the run asks for 1 learner rank with a GPU each: 127.0.0.1: 4 CPU")
    assert places[4] == "error" and ("127.0.0.1", "python", "3.11", "", "") in rows
    assert joined.closed
