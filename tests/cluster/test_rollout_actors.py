"""Rollout actors that come and go with the nodes of a Ray cluster. The actors are stand-ins: no
engine, everything else is real.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from async_grpo.cluster import engine_processes, restart_budget, rollout_actors
from async_grpo.cluster.engine_processes import ActorSpec, EngineSlots
from async_grpo.cluster.placement import PlacementError
from async_grpo.cluster.relays import Relays
from async_grpo.cluster.remote_engine import GivenUp, RemoteEngine
from async_grpo.cluster.rollout_actors import ActorManager
from async_grpo.cluster.session import RaySession
from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent, RunError
from async_grpo.replay.queue import ReplayQueue
from async_grpo.runtime import listener
from async_grpo.weights.shared_memory import SegmentReader, SharedMemorySender, remove_segments
from async_grpo.weights.transport import Announcement
from tests.support.fake_actor import DiesOnce, Slow, StandIn
from tests.support.listener import RecordingListener
from tests.support.machine_speed import slowness
from tests.support.models import ModuleOwner
from tests.support.relay_nodes import configured

pytestmark = pytest.mark.timeout(300)


class Client:
    """The queue's side: remembers what was forfeited."""

    def __init__(self) -> None:
        self.forfeited: list[str] = []

    async def call(self, method: Callable[..., Any], *arguments: Any) -> bool:
        """The run is never over."""
        if method is ReplayQueue.forfeit:
            self.forfeited.extend(arguments)
        return False


class NoPublications:
    """The coordinator's side: every engine serves at once."""

    async def join(self, engine: RemoteEngine, admit: Callable[[], None]) -> None:
        admit()

    def between_publications(self) -> nullcontext[None]:
        return nullcontext()


class Fleet:
    """A manager on the test's cluster, with what it said and whether it gave up."""

    def __init__(
        self, cluster: Cluster, session: RaySession, manager: ActorManager, client: Client
    ) -> None:
        self.cluster, self.session, self.manager, self.client = cluster, session, manager, client
        self.listener = RecordingListener()
        self.notes, self.fatal = self.listener.notes, self.listener.failures

    @property
    def ids(self) -> list[str]:
        return [engine.actor_id for engine in self.manager.alive()]

    async def until(self, condition: Callable[[], object], what: str, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds * slowness()
        while not condition():
            assert time.monotonic() < deadline, (
                f"{what} did not happen: {self.notes}, {self.fatal}, {self.ids}"
            )
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    temp = Path(
        tempfile.mkdtemp(prefix="ag", dir="/tmp")
    )  # short: a Unix socket's path has about a hundred characters at most
    arguments = {
        "num_cpus": 3,
        "include_dashboard": False,
        "object_store_memory": 2**27,
        "temp_dir": str(temp),
    }
    # Ray takes some 15 s to notice that a node is gone; here 5 refused probes have to do.
    arguments["_system_config"] = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 300,
        "health_check_timeout_ms": 10_000,
    }
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(temp, ignore_errors=True)


@pytest.fixture
def extra(cluster) -> Iterator[Callable[..., Any]]:
    """Adds nodes to the cluster; those that are still there go with the test."""
    nodes: list[Any] = []

    def add(cpus: int) -> Any:
        nodes.append(cluster.add_node(num_cpus=cpus, object_store_memory=2**27))
        return nodes[-1]

    yield add
    for node in nodes:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node, allow_graceful=False)
    deadline = time.monotonic() + 30
    while sum(node["Alive"] for node in ray.nodes()) > 1:
        assert time.monotonic() < deadline, "a node of an earlier test is still there"
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """Stand-ins for the actors, short intervals, and two cores for the driver's node, of three
    CPUs, whatever the machine has.
    """
    monkeypatch.setattr(engine_processes, "RolloutProcess", StandIn)
    monkeypatch.setattr(rollout_actors, "SURVEY_INTERVAL_S", 0.2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


@asynccontextmanager
async def fleet(
    cluster: Cluster, directory: Path, *, probe_timeout_s: float = 30, **settings: Any
) -> AsyncIterator[Fleet]:
    """A running manager; its reservations are gone afterwards."""
    config = Config.model_validate(
        {
            "run": {"total_steps": 1, "dir": str(directory)},
            "model": {"path": "m"},
            "cluster": {"resources_timeout_s": 20} | settings,
            "watchdog": {"probe_timeout_s": probe_timeout_s},
        }
    )
    session, client = RaySession(local=False), Client()
    where = await session.wait_for_room(config)
    options = [(await session.reserve([slot], timeout_s=20))[0] for slot in where.engines]
    here = Fleet(cluster, session, None, client)
    slots = EngineSlots(
        config,
        session=session,
        placement=where,
        options=options,
        spec=ActorSpec(
            None,
            model_dir="",
            device=where.device,
            backend="shared_memory",
            env_vars={"A_KEY": "of a service"},
        ),
        relays=Relays(
            config,
            home=where.learners[0].node_id,
            key="",
            where=session.on_node,
            listener=here.listener,
        ),
    )
    here.manager = ActorManager(
        config, slots=slots, client=client, listener=here.listener, failures=here.listener
    )
    try:
        await here.manager.start()
        here.manager.begin(NoPublications())
        here.manager.produce()
        yield here
    finally:
        await here.manager.stop()
        for group in list(session._groups):
            session._remove(group)


def reservations() -> list[str]:
    """States of all placement groups that were not removed."""
    return [
        group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED"
    ]


def alive(here: Fleet) -> float:
    return here.manager.metrics()["cluster/rollout_actors"]


async def test_a_run_follows_the_nodes_of_its_cluster(cluster, extra, tmp_path) -> None:
    async with fleet(
        cluster, tmp_path, rollout_actors={"min": 1, "max": 3}, restart_budget=1
    ) as here:
        assert here.ids == ["actor-0.0"], "it starts with what there is room for"
        first = extra(2)
        await here.until(lambda: alive(here) == 3, "growing into a new node")
        cluster.remove_node(first, allow_graceful=False)
        await here.until(lambda: alive(here) == 1, "noticing that the node is gone")
        await here.until(
            lambda: sorted(here.client.forfeited) == ["actor-1.0", "actor-2.0"],
            "giving back the tickets",
        )
        await here.until(lambda: reservations() == ["CREATED"], "giving back the reservations")
        assert (
            here.manager.budget.faults,
            here.manager.budget.restarts,
            len(here.manager.deaths),
        ) == (1, 0, 1), "a node is one fault"
        [said] = [note for note in here.notes if "left the cluster" in note]
        assert "actor-1.0, actor-2.0" in said and "1 rollout actors go on" in said
        assert "run `ray start` there again" in said
        extra(1)
        await here.until(lambda: alive(here) == 2, "growing again, though the budget is spent")
        assert here.ids[1] == "actor-3.0" and not here.fatal
    assert reservations() == []


@pytest.mark.later
async def test_below_the_minimum_the_run_ends(cluster, extra, tmp_path) -> None:
    node = extra(1)
    async with fleet(cluster, tmp_path, rollout_actors={"min": 2, "max": 2}) as here:
        assert len(here.ids) == 2
        cluster.remove_node(node, allow_graceful=False)
        await here.until(lambda: here.fatal, "the end of the run")
        [error] = here.fatal
        assert isinstance(error, FaultBudgetSpent) and error.exit_code == 4
        assert "left the cluster, and with it actor-1.0" in str(
            error
        ) and "rollout_actors.min is 2" in str(error)


async def test_a_dead_process_is_replaced_until_the_budget_is_spent(
    cluster, extra, tmp_path
) -> None:
    extra(1)
    async with fleet(
        cluster, tmp_path, rollout_actors={"min": 1, "max": 2}, restart_budget=1
    ) as here:
        victim = here.manager.alive()[1]
        victim.handle.die.remote()
        await here.until(lambda: "actor-1.1" in here.ids, "a replacement")
        told = [await engine.handle.told.remote() for engine in here.manager.alive()]
        assert told == [{"A_KEY": "of a service"}] * 2
        assert here.client.forfeited == ["actor-1.0"] and (
            here.manager.budget.faults,
            here.manager.budget.restarts,
        ) == (1, 1)
        here.manager.alive()[1].handle.die.remote()
        await here.until(
            lambda: any("budget is spent" in note for note in here.notes),
            "going on with what is left",
        )
        await asyncio.sleep(1)  # several surveys
        assert here.ids == ["actor-0.0"] and not here.fatal, (
            "the room of what died too often is not used again"
        )
        assert reservations() == ["CREATED"]


@pytest.mark.later
async def test_a_fault_that_is_long_ago_is_forgiven(cluster, tmp_path, monkeypatch) -> None:
    async with fleet(cluster, tmp_path, rollout_actors={"max": 1}, restart_budget=1) as here:
        for died in ("actor-0.0", "actor-0.1"):
            here.manager.alive()[0].handle.die.remote()
            await here.until(lambda died=died: died not in here.ids and here.ids, "a replacement")
            monkeypatch.setattr(restart_budget, "FORGIVEN_S", 0.0)
        assert here.ids == ["actor-0.2"] and here.manager.budget.faults == 2 and not here.fatal


async def test_an_actor_that_answers_nothing_is_named_and_leaves_what_waits_for_it(
    cluster, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(rollout_actors, "PROBE_INTERVAL_S", 0.1)
    monkeypatch.setattr(listener.long_wait.__wrapped__, "__kwdefaults__", {"first_s": 0.3})
    async with fleet(cluster, tmp_path, rollout_actors={"max": 1}, probe_timeout_s=2) as here:
        [cut] = here.manager.alive()
        receiving = asyncio.ensure_future(cut.receive(Announcement("v0.1", "nccl")))
        cut.handle.cut.remote()
        with pytest.raises(GivenUp, match="no answer to a probe within"):
            await asyncio.wait_for(receiving, 60)
        assert here.ids == [] and here.client.forfeited == ["actor-0.0"]
        *late, gone = [note for note in here.notes if "actor-0.0" in note]
        assert f"a probe of actor-0.0 waits for {cut.host}, 0 s" in late
        assert gone.startswith(f"actor-0.0 on {cut.host} is given up (TimeoutError: no answer to a")
        assert here.manager.metrics()["cluster/late_probes"] == len(late) >= 2
        await here.until(lambda: here.ids == ["actor-0.1"], "a replacement")


@pytest.mark.later
async def test_who_dies_while_the_run_starts_is_replaced(
    cluster, extra, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(engine_processes, "RolloutProcess", DiesOnce)
    extra(1)
    async with fleet(
        cluster, tmp_path, rollout_actors={"min": 2, "max": 2}, restart_budget=1
    ) as here:
        assert here.ids == ["actor-0.0", "actor-1.1"] and here.manager.budget.restarts == 1
        [death] = here.manager.deaths
        assert death.startswith("actor-1.0 died while the run started (ActorDiedError: ")


@pytest.mark.later
@pytest.mark.parametrize("least", [1, 2])
async def test_a_machine_without_memory_is_named_and_the_least_number_of_actors_is_enough(
    cluster, extra, tmp_path, monkeypatch, least: int
) -> None:
    """Ray's own memory monitor, which thinks that one node has none left."""
    monkeypatch.setattr(engine_processes, "RolloutProcess", Slow)
    monkeypatch.setattr(restart_budget, "back_off_s", lambda deaths: 0.0)
    with monkeypatch.context() as poor:
        poor.setenv("RAY_memory_usage_threshold", "0.01")
        poor.setenv("RAY_memory_monitor_refresh_ms", "200")
        extra(1)
    starting = fleet(cluster, tmp_path, rollout_actors={"min": least, "max": 2}, restart_budget=1)
    if least == 2:
        with pytest.raises(FaultBudgetSpent, match=r"short of memory .*memory monitor killed it"):
            await starting.__aenter__()
        return
    async with starting as here:
        assert here.ids == ["actor-0.0"] and len(here.manager.deaths) == 2
        assert all("short of memory (" in death for death in here.manager.deaths)
        assert any("the restart budget is spent; 1 rollout" in note for note in here.notes)


@pytest.mark.later
async def test_actors_are_added_and_removed_by_hand(cluster, extra, tmp_path) -> None:
    async with fleet(
        cluster, tmp_path, rollout_actors={"min": 1, "max": 3}, restart_budget=0
    ) as here:
        with pytest.raises(RunError, match=r"rollout_actors.min forbids it"):
            await here.manager.remove("actor-0.0")
        with pytest.raises(ValueError, match=r"actor-7\.0 is not alive; these are: actor-0\.0"):
            await here.manager.remove("actor-7.0")
        added = await here.manager.add()
        assert here.ids == ["actor-0.0", added] == ["actor-0.0", "actor-1.0"], (
            "on CPU an engine that is asked for shares cores"
        )
        with pytest.raises(PlacementError, match="no room for another rollout actor"):
            await here.manager.add()
        await here.manager.remove("actor-0.0")
        extra(1)
        await asyncio.sleep(1)  # several surveys
        assert here.ids == [added], "what was removed by hand does not come back by itself"
        assert here.client.forfeited == ["actor-0.0"] and not here.manager.deaths and not here.fatal
        assert reservations() == ["CREATED"]
        again = await here.manager.add()
        assert here.ids == [added, again]


@pytest.mark.later
async def test_an_actor_that_does_not_drain_ends_at_the_deadline(
    cluster, extra, tmp_path, monkeypatch
) -> None:
    async def never(self) -> None:
        await asyncio.Event().wait()

    extra(1)
    monkeypatch.setattr(StandIn, "drain", never)
    async with fleet(cluster, tmp_path, rollout_actors={"min": 1, "max": 2}) as here:
        await here.manager.remove("actor-1.0", timeout_s=0.5)
        assert here.ids == ["actor-0.0"] and here.client.forfeited == ["actor-1.0"]
        assert (
            any("before it had finished" in note for note in here.notes) and not here.manager.deaths
        )


# ---- weights on a node without a learner ----


@pytest.mark.later
@pytest.mark.parametrize("way", ["ray", "files"])
def test_relays_bring_the_bytes_once_to_every_node(cluster, extra, tmp_path, way) -> None:
    added = extra(1)
    sync = {"delta": "always"} | ({"files": f"{tmp_path}/shared"} if way == "files" else {})
    config = configured(tmp_path, **sync)
    owner = ModuleOwner(torch.nn.Linear(300, 200))
    key, notes = f"test-{uuid.uuid4().hex[:8]}", []
    sender = SharedMemorySender(owner, key=key, fallback=tmp_path)
    [payload] = sender.connect("127.0.0.1", [1])
    reader = SegmentReader(payload["metadata"])

    async def check(relays: Relays, announcement: Announcement) -> Announcement:
        """Two engines of the node ask at once; the segment that they are shown has the learner's
        bits.
        """
        one, two = await asyncio.gather(
            *[relays.local(announcement, added.node_id) for _ in range(2)]
        )
        assert one == two and one.payload["path"] != announcement.payload["path"]
        got = {name: tensor.clone() for name, tensor in reader.tensors(**one.payload)}
        assert all(torch.equal(got[name], weight) for name, weight in owner.named_weights())
        return one

    async def scenario() -> None:
        session = RaySession(local=False)
        home = session.nodes()[0].node_id
        relays = Relays(
            config, home=home, key=key, where=session.on_node, listener=RecordingListener(notes)
        )
        first = sender.stage("v0.1", verify=True)
        assert await relays.local(first, home) is first, "the learner's own node needs no copy"
        local = await check(relays, first)
        with torch.no_grad():
            owner.model.weight[0].add_(1)
        await check(relays, sender.stage("v0.2", verify=True))
        reader.check(
            local.payload["path"], local.payload["sequence"]
        )  # the copy before is still whole: the segments take turns
        os.kill(await relays._relays[added.node_id].pid.remote(), signal.SIGKILL)
        with torch.no_grad():
            owner.model.weight[0].add_(1)
        newest = await check(relays, sender.stage("v0.3", verify=True))
        hung = await relays._relays[added.node_id].pid.remote()
        os.kill(hung, signal.SIGSTOP)
        relays._deadline_s = 1
        try:
            with pytest.raises(TimeoutError, match=r"the relay of node .* took longer than 1 s"):
                await relays.local(sender.stage("v0.31", verify=True), added.node_id)
        finally:
            os.kill(hung, signal.SIGKILL)
        relays._deadline_s = 60
        newest = await check(relays, sender.stage("v0.32", verify=True))
        assert (await relays.local(first, home)) is first
        with pytest.raises(ray.exceptions.RayTaskError, match="the announcement is for write"):
            await relays.local(first, added.node_id)  # its segment has been written again
        await check(relays, sender.stage("v0.4", verify=False))
        await relays.close()
        assert not Path(newest.payload["path"]).exists()

    try:
        asyncio.run(asyncio.wait_for(scenario(), 60 * slowness()))
    finally:
        sender.close()
        remove_segments(key, tmp_path)
    [said] = notes
    assert said.startswith(f"weights reach node {added.node_id[:8]} as what changed: ")
    assert not [*tmp_path.glob("shared/*")]
