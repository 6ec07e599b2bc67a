"""The connection to Ray: join a cluster or start one, see its nodes, reserve places.

Runs in: the driver. Hides how Ray is started and what its placement groups are called. A process
that has initialised Ray itself (a script, a task or an actor of Ray, a trial of Tune) is joined as
it is: its connection is used, and stays when the run has ended. In a placement group that captures
the caller's children, the run lives in the group's bundles.

`survey` lists the machines before anything is started: those of the cluster of RAY_ADDRESS, or this
one, where the run would start Ray.

Invariant: a cluster that was joined is left as it was found, and a connection that was there stays;
a cluster that was started here ends with `close`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import parameter as ray_parameter
from ray._private import ray_constants, services
from ray._private import state as ray_state
from ray._private import utils as ray_utils
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
from ray._private.authentication import authentication_token_setup as ray_tokens
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.thirdparty import pynvml
from ray.util import client
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from async_grpo.cluster.placement import (
    Bundle,
    Node,
    Placement,
    PlacementError,
    Slot,
    describe,
    least,
    place,
    place_given,
)
from async_grpo.config.schema import Config
from async_grpo.errors import SetupError, StopRequested
from async_grpo.runtime.storage import open_to_others
from async_grpo.runtime.text import one_line

POLL_S = 1.0
RESERVED_POLL_S = 0.1
CONNECT_TIMEOUT_S = 5.0
START_S = 180.0
"""Longest wait for the node of a Ray that is started here."""
AGENT_PORTS = (
    "dashboard_agent_listen_port",
    "metrics_agent_port",
    "metrics_export_port",
    "runtime_env_agent_port",
)
OWN_PORTS = range(28_000, 32_768)
"""Neither Ray nor Linux gives one of these to whoever asks for any port."""
MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"


@dataclass
class RaySession:
    """A Ray connection. local: the cluster was started here. lent: the caller had initialised Ray
    and keeps it. given: the caller's placement group, whose bundles are the run's places.
    """

    local: bool
    lent: bool = False
    given: PlacementGroup | None = None
    _groups: list[PlacementGroup] = field(default_factory=list)

    @classmethod
    def open(cls, *, processes: int, check: Callable[[], None] = lambda: None) -> RaySession:
        """Use the Ray that is initialised in this process; else join the cluster of RAY_ADDRESS, or
        start one for `processes` on loopback. check: called while the node is waited for; what it
        raises ends the start. Raises SetupError.
        """
        if client.ray.is_connected():
            raise SetupError(
                "this process is a Ray client (ray://), but a run must be inside the cluster: "
                "submit the script with `ray job submit`, or start it on a node of the cluster"
            )
        if ray.is_initialized():
            return cls(local=False, lent=True, given=_given())
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        # Ray's agents notice late that all others are gone.
        os.environ.setdefault("RAY_DASHBOARD_AGENT_CHECK_PARENT_INTERVAL_S", "1")
        joined = bool(os.environ.get("RAY_ADDRESS"))
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        with _own_sigterm():
            if joined:
                _join(options)
            else:
                cpus = max(os.cpu_count() or 1, processes)
                # Ray replaces a loopback address by the machine's own unless it believes that it
                # cannot form clusters.
                ray_constants.ENABLE_RAY_CLUSTER = False
                try:
                    with _own_cluster(check), _own_token():
                        ray.init(
                            address="local",
                            num_cpus=cpus,
                            include_dashboard=False,
                            _node_ip_address="127.0.0.1",
                            **options,
                        )
                except StopRequested:
                    ray.shutdown()
                    raise
                except Exception as error:  # plain ones among them
                    logs = Path(get_default_ray_temp_dir()) / "session_latest" / "logs"
                    raise SetupError(
                        f"Ray did not start on this machine ({one_line(error).rstrip('.')}); its "
                        f"logs are in {logs}"
                    ) from error
        return cls(local=not joined)

    def nodes(self) -> list[Node]:
        """Living nodes, the driver's first."""
        own, cores = ray.get_runtime_context().get_node_id(), sorted(os.sched_getaffinity(0))
        free = ray_state.available_resources_per_node()
        nodes = []
        for node in ray.nodes():
            if node["Alive"]:
                cpus, gpus = (node["Resources"].get(name, 0.0) for name in ("CPU", "GPU"))
                left = free.get(node["NodeID"], node["Resources"])
                nodes.append(
                    Node(
                        node_id=node["NodeID"],
                        address=node["NodeManagerAddress"],
                        cpus=cpus,
                        gpus=gpus,
                        cores=tuple(cores) if node["NodeID"] == own else (),
                        used_cpus=cpus - left.get("CPU", 0.0),
                        used_gpus=gpus - left.get("GPU", 0.0),
                        real_cpus=(os.cpu_count() or 1) if self.local else None,
                    )
                )
        return sorted(nodes, key=lambda node: (node.node_id != own, node.node_id))

    async def wait_for_room(self, config: Config) -> Placement:
        """Wait for the placement, and ask a joined cluster for what is missing, so that an
        autoscaler sees the demand. Raises SetupError at `cluster.resources_timeout_s`.
        """
        deadline = time.monotonic() + config.cluster.resources_timeout_s
        demand: PlacementGroup | None = None
        try:
            while True:
                nodes = self.nodes()
                try:
                    return self._place(config, nodes)
                except PlacementError as error:
                    if self.local or self.given or time.monotonic() > deadline:
                        raise SetupError(str(error)) from error
                if demand is None and (bundles := least(config, nodes)):
                    demand = placement_group(bundles)
                    self._groups.append(demand)
                elif demand is not None and _is_created(demand):
                    self._remove(demand)  # it holds what `place` is to find free
                    demand = None
                await asyncio.sleep(POLL_S)
        finally:
            if demand is not None:
                self._remove(demand)

    def _place(self, config: Config, nodes: list[Node]) -> Placement:
        if self.given is None:
            return place(config, nodes)
        table = placement_group_table(self.given)
        where = table["bundles_to_node_id"]
        return place_given(
            config,
            [
                Bundle(where[index], bundle.get("CPU", 0.0), bundle.get("GPU", 0.0))
                for index, bundle in sorted(table["bundles"].items())
            ],
        )

    def gpu_memory(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, int]:
        """Ask every node with a GPU for the memory of its smallest one, in bytes; without the nodes
        that do not say in time.
        """
        nodes = [node for node in self.nodes() if node.gpus]
        asked = [_smallest_gpu.options(max_retries=0, **self.on_node(n.node_id)) for n in nodes]
        found = zip(
            nodes, answers([one.remote() for one in asked], timeout_s=timeout_s), strict=True
        )
        return {node.node_id: nbytes for node, nbytes in found if isinstance(nbytes, int)}

    async def reserve(
        self, slots: list[Slot], *, timeout_s: float, sharers: int = 1
    ) -> list[dict[str, Any]]:
        """Reserve a bundle per slot for `sharers` processes, unless the caller's group has it;
        options by slot. Raises SetupError.
        """
        if self.given is not None:
            return [_options(slot, self.given, int(slot.bundle or 0)) for slot in slots]
        bundles = [
            {"CPU": slot.cpus * sharers, **({"GPU": slot.gpus * sharers} if slot.gpus else {})}
            for slot in slots
        ]
        group = placement_group(
            bundles,
            strategy="PACK",
            bundle_label_selector=[{"ray.io/node-id": slot.node_id} for slot in slots],
        )
        self._groups.append(group)
        try:
            await asyncio.wait_for(_created(group), timeout_s)
        # whoever is cancelled meanwhile leaves no reservation behind either
        except BaseException as error:
            self._remove(group)
            if not isinstance(error, TimeoutError):
                raise
            raise SetupError(
                f"the cluster did not free {bundles} within cluster.resources_timeout_s = "
                f"{timeout_s:g} s; it has {describe(self.nodes())}"
            ) from error
        return [_options(slot, group, index) for index, slot in enumerate(slots)]

    async def reserved_again(self, option: dict[str, Any], *, timeout_s: float) -> bool:
        """Whether a reserved place has its resources, or has them again within the deadline."""
        group = option["scheduling_strategy"].placement_group
        try:
            await asyncio.wait_for(_created(group), timeout_s)
        except TimeoutError:
            return False
        return True

    def release(self, option: dict[str, Any]) -> None:
        """Give back the reservation of these actor options; its processes are killed."""
        self._remove(option["scheduling_strategy"].placement_group)

    async def node_serves(self, node_id: str, *, timeout_s: float) -> bool:
        """Whether a node runs a process now: Ray notices the loss of a node late."""
        if node_id == ray.get_runtime_context().get_node_id():
            return True
        call = _here.options(max_retries=0, **self.on_node(node_id)).remote()
        answer = asyncio.ensure_future(settled(call))
        deadline = time.monotonic() + timeout_s
        try:
            while time.monotonic() < deadline and not answer.done():
                if all(node.node_id != node_id for node in self.nodes()):
                    return False
                await asyncio.wait({answer}, timeout=RESERVED_POLL_S)
            # a node that is short of memory ends this process too, and is there
            well = (type(None), ray.exceptions.OutOfMemoryError)
            return answer.done() and isinstance(answer.result(), well)
        finally:
            answer.cancel()

    async def check_shared_storage(
        self, directory: str, node_ids: set[str], *, timeout_s: float
    ) -> None:
        """Check that nodes and driver read each other's files here. Raises SetupError."""
        nodes = [node for node in self.nodes() if node.node_id in node_ids]
        token = secrets.token_hex(8)
        own = Path(directory) / f".probe-{token}"
        try:
            own.write_text(token)
            for node in nodes:
                probe = _probe_storage.options(**self.on_node(node.node_id))
                answer = probe.remote(str(own), token, node.node_id)
                try:
                    seen = await asyncio.wait_for(answer, timeout_s)
                except ray.exceptions.RayTaskError as error:  # also of the class of its cause
                    raise SetupError(
                        f"node {node.address} cannot use run.dir {directory} "
                        f"({one_line(error.cause)}); every process of the run must be able to read "
                        "and write there"
                    ) from error
                if not seen or not own.with_name(f"{own.name}-{node.node_id}").exists():
                    raise SetupError(
                        f"node {node.address} does not see {directory} as the driver does; with "
                        "several nodes run.dir must be storage that all of them share"
                    )
        except TimeoutError as error:  # an OSError too, without anything to say
            raise SetupError(
                f"a node did not look at run.dir {directory} within "
                f"cluster.resources_timeout_s = {timeout_s:g} s"
            ) from error
        except OSError as error:
            raise SetupError(f"run.dir {directory} cannot be written: {error.strerror}") from error
        finally:
            for path in own.parent.glob(f"{own.name}*"):
                path.unlink(missing_ok=True)

    def exposed_token(self) -> str | None:
        """Say which file protects a cluster that was joined, where every user can read it."""
        named = os.environ.get(f"{TOKEN}_PATH") or Path.home() / ".ray" / "auth_token"
        path = Path(named)
        asked = not self.local and is_token_auth_enabled()
        if not asked or TOKEN in os.environ or not path.is_file() or not open_to_others(path):
            return None
        return (
            f"warning: every user of this machine can read {path}, the token of this Ray cluster, "
            f"and so run code as you; fix it with `chmod 600 {path}`"
        )

    def start_here(self, process: type, *arguments: Any, **options: Any) -> Any:
        """Start a process beside the driver that needs no reserved resources; its handle. options:
        of a Ray actor.
        """
        here = self.on_node(ray.get_runtime_context().get_node_id())
        return ray.remote(process).options(**options, **here).remote(*arguments)

    @staticmethod
    def end(handle: Any) -> None:
        """End a process at once; a Ray that was there before goes on."""
        ray.kill(handle)

    @staticmethod
    def on_node(node_id: str) -> dict[str, Any]:
        """Return Ray's options of an actor or a task on this node that reserves nothing."""
        where = NodeAffinitySchedulingStrategy(node_id, soft=False)
        return {"num_cpus": 0, "scheduling_strategy": where}

    def close(self) -> None:
        """Free the reservations and disconnect; a cluster started here ends, a Ray that the caller
        had initialised stays.
        """
        try:
            while self._groups and ray.is_initialized():
                self._remove(self._groups[-1])
        finally:
            if not self.lent:
                ray.shutdown()
            if self.local:
                _read_token()  # whoever uses Ray next in this process has another one

    def _remove(self, group: PlacementGroup) -> None:
        if group in self._groups:
            self._groups.remove(group)
            remove_placement_group(group)


def _given() -> PlacementGroup | None:
    """Return the placement group that captures this process's children, if it has bundles for them
    beside the one of this process.
    """
    group = get_current_placement_group()
    if group is None or not ray.get_runtime_context().should_capture_child_tasks_in_placement_group:
        return None
    return group if group.bundle_count > 1 else None


def _options(slot: Slot, group: PlacementGroup, index: int) -> dict[str, Any]:
    """Return the Ray options of a process in this slot, which is a bundle of the group."""
    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return {"num_cpus": slot.cpus, "num_gpus": slot.gpus, "scheduling_strategy": where}


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the caller's SIGTERM handler: Ray's own would end the run without saving."""
    install, handler = ray_utils.set_sigterm_handler, signal.getsignal(signal.SIGTERM)
    if callable(handler):
        ray_utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = install
        if callable(handler) and threading.current_thread() is threading.main_thread():
            # In front of the one of Ray's C++ part, which prints a stack.
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _own_cluster(check: Callable[[], None]) -> Iterator[None]:
    """Start no autoscaler and no log monitor, which a cluster of one machine does not need, leave
    the ports that `ray start` wants to a cluster that may be started beside it, and wait for a node
    longer than Ray's 30 seconds, which are few where others use the cores. Ray's agents are told
    their ports: a node waits until they have chosen some, which takes seconds of imports, and ends
    itself after 15 seconds (issue 65983 of ray-project/ray). Ray's processes get a session of their
    own: a signal to the whole process group, as `timeout`, systemd and batch systems send it, is
    for the driver, which ends them in order.
    """
    usual, get_node = ray_parameter.RayParams, services.get_node
    popen = services.ConsolePopen
    ports = dict(zip(AGENT_PORTS, _free_ports(len(AGENT_PORTS)), strict=True))

    def own_params(**options: Any) -> Any:
        return usual(**options | ports, include_log_monitor=False, no_monitor=True)

    ray_parameter.RayParams = own_params
    deadline = time.monotonic() + START_S

    def patient(*args: Any, **options: Any) -> Any:
        while True:
            try:
                return get_node(*args, **options)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                check()
                time.sleep(RESERVED_POLL_S)

    def own_process(command: list[str], **options: Any) -> Any:
        if Path(command[0]).name == "raylet":  # Ray tells it the other three
            missing = "dashboard_agent_listen_port"
            command = [*command, f"--{missing}={ports[missing]}"]
        return popen(command, start_new_session=True, **options)

    services.get_node = patient
    services.ConsolePopen = own_process
    try:
        yield
    finally:
        ray_parameter.RayParams, services.get_node = usual, get_node
        services.ConsolePopen = popen


def _free_ports(count: int) -> list[int]:
    """Return ports of `OWN_PORTS` that nothing on this machine listens at."""
    found: list[int] = []
    for port in random.SystemRandom().sample(OWN_PORTS, len(OWN_PORTS)):
        with socket.socket() as one, suppress(OSError):
            one.bind(("", port))
            found.append(port)
        if len(found) == count:
            break
    return found


@contextmanager
def _own_token() -> Iterator[None]:
    """Let Ray's processes ask for a token that is in their environment alone, which no other user
    can read, as they can `~/.ray/auth_token`, which Ray would write. One that is set is kept, and
    so is a mode.
    """
    if TOKEN in os.environ or os.environ.get(MODE, "token") != "token":
        yield
        return
    before = os.environ.get(MODE)
    os.environ |= {MODE: "token", TOKEN: secrets.token_hex(32)}
    _read_token()
    try:
        yield
    finally:  # what Ray has read stays
        del os.environ[TOKEN]
        os.environ.pop(MODE) if before is None else None


def _read_token() -> None:
    """Let Ray read anew, in this process, whether tokens are asked for and which one it has."""
    ray_tokens.AuthenticationTokenLoader.instance().reset_cache()
    ray_tokens.Config.initialize("")


@ray.remote
def _probe_storage(path: str, token: str, node_id: str) -> bool:
    """Read the driver's file and write one beside it; runs on a node."""
    probe = Path(path)
    if not probe.is_file() or probe.read_text() != token:
        return False
    probe.with_name(f"{probe.name}-{node_id}").write_text(token)
    return True


@ray.remote
def _smallest_gpu() -> int | None:
    """Return the memory of the smallest GPU of this node in bytes; runs on a node."""
    return gpu_bytes()


def gpu_bytes() -> int | None:
    """Return the memory of this machine's smallest GPU in bytes, without touching it; None where
    the driver does not say.
    """
    try:
        pynvml.nvmlInit()
        gpus = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return min((pynvml.nvmlDeviceGetMemoryInfo(gpu).total for gpu in gpus), default=None)
    except pynvml.NVMLError:
        return None


@ray.remote
def _here() -> None:
    """Run on a node, which shows that it takes work."""


def answers(calls: list[Any], *, timeout_s: float) -> list[Any]:
    """Wait for remote calls together: their results, or an error in the place of each."""
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
    late = TimeoutError(f"no answer within {timeout_s:g} s")
    return [_answer(call) if call in ready else late for call in calls]


def _answer(call: Any) -> Any:
    try:
        return ray.get(call)
    except ray.exceptions.RayError as error:
        return error


async def settled(call: Awaitable[Any]) -> Any:
    """Await a remote call: its result, or the error that Ray raised."""
    try:
        return await call
    except ray.exceptions.RayError as error:
        return error


async def _created(group: PlacementGroup) -> None:
    """Wait until all bundles of a placement group are reserved."""
    while not _is_created(group):
        await asyncio.sleep(RESERVED_POLL_S)


def _is_created(group: PlacementGroup) -> bool:
    """Tell whether all bundles of a placement group are reserved."""
    return placement_group_table(group)["state"] == "CREATED"


def _join(options: Mapping[str, Any]) -> None:
    """Join the cluster of RAY_ADDRESS. Raises SetupError."""
    address = os.environ["RAY_ADDRESS"]
    _refuse_silent_head(address)
    try:
        ray.init(address="auto", **options)
    except Exception as error:  # plain ones among them
        raise SetupError(
            f"RAY_ADDRESS is {address}, and that cluster cannot be joined "
            f"({one_line(error).rstrip('.')}); Ray and Python must be those of the cluster; start "
            "one, or unset RAY_ADDRESS"
        ) from error


def _refuse_silent_head(address: str) -> None:
    """Raise SetupError after seconds where Ray would try for minutes to reach a cluster."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return  # `auto`, or a scheme that Ray resolves itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise SetupError(
            f"RAY_ADDRESS is {address}, and no Ray cluster answers there ({error}); start "
            "one, or unset RAY_ADDRESS"
        ) from error


LOCAL = "this machine"


@dataclass(frozen=True, slots=True)
class Survey:
    """nodes; cluster: the address that was asked, None for this machine alone."""

    nodes: list[Node]
    cluster: str | None


def survey(*, processes: int) -> Survey:
    """Nodes that a run would use. Raises SetupError for a silent RAY_ADDRESS."""
    address = "this process's Ray" if ray.is_initialized() else os.environ.get("RAY_ADDRESS")
    if address:
        session = RaySession.open(processes=processes)
        try:
            memory = session.gpu_memory()
            nodes = [replace(node, gpu_bytes=memory.get(node.node_id)) for node in session.nodes()]
            return Survey(nodes, address)
        finally:
            session.close()
    real = os.cpu_count() or 1
    here = Node(
        LOCAL,
        LOCAL,
        cpus=max(real, processes),
        gpus=_gpus(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        real_cpus=real,
        gpu_bytes=gpu_bytes(),
    )
    return Survey([here], None)


def _gpus() -> int:
    """As Ray counts them when it is started here."""
    visible = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    found = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
    return found if visible is None else min(found, len(visible))
