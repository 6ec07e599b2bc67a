"""The classes that Ray runs: thin shells around plain ones.

Runs in: rollout actors, learner ranks (`queue` has the queue's). A shell adds what only Ray can
give: handles to other actors as ordinary clients, packing of byte buffers for out-of-band
transport, and environment variables before a library reads them.

All calls of one actor run on one event loop (or one thread, in a learner rank). Ray gives every
concurrency group a thread and a loop of its own, which an asyncio object does not survive; so
rollout actors have none, and a limit that waiting calls cannot reach instead.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from async_grpo.cluster.deaths import death_as
from async_grpo.cluster.queue import CALL_TIMEOUT_S, ActorQueue, queue_died
from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.rollout.producer import GroupProducer
from async_grpo.runtime import stacks
from async_grpo.runtime.lifetime import die_with_parent
from async_grpo.runtime.storage import FileSum, StorageFailure, Written, reason
from async_grpo.weights.transport import Staged, TokenSequence, WeightSender

if TYPE_CHECKING:  # torch, which only a rank needs
    from async_grpo.learner.checkpoint import Saving
    from async_grpo.learner.learner import Learner

MAX_CALLS = 10_000
TRANSFER = "transfer"
SAVING = "saving"


class RolloutProcess(GroupProducer):
    """A rollout actor whose queue is a Ray actor."""

    def __init__(self, config: Config, *, actor_id: str, queue: Any, **place: Any) -> None:
        """queue: the Ray actor. place: see `GroupProducer`."""
        die_with_parent()
        stacks.register(actor_id, stacks.home(config.run.dir))
        handle = ActorQueue(queue, patience_s=config.watchdog.step_timeout_s)
        super().__init__(config, actor_id=actor_id, queue=handle, **place)
        self._run: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Produce groups, once: who asks again, since its connection broke, gets the same end."""
        if self._run is None:
            self._run = asyncio.ensure_future(super().run())
        await asyncio.shield(self._run)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine."""
        return await getattr(self.parts.engine, method)(*args)

    async def apply(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call function(this actor, *arguments) here: on the event loop if it is a coroutine
        function, else in a thread.
        """
        if inspect.iscoroutinefunction(function):
            return await function(self, *arguments)
        return await asyncio.to_thread(function, self, *arguments)

    async def pid(self) -> int:
        """Process id, for tests and post-mortems."""
        return os.getpid()


@dataclass(frozen=True)
class RankParts:
    """What a learner rank has once it is set up."""

    learner: Learner
    sender: WeightSender
    saving: Saving


class LearnerProcess:
    """One learner rank: the learner, its half of the weight transport, its place in the process
    group.

    All that computes runs in one thread. The transport has a thread of its own for what needs no
    model (TRANSFER), since a publication that is cut off is repeated while a learner step runs; so
    has what brings a checkpoint to the disk (SAVING).
    """

    def __init__(
        self, config: Config, *, rank: int, cores: Sequence[int], queue: Any, threads: int = 0
    ) -> None:
        """cores: to stay on. threads: of computing on the CPU; 0: as Ray says."""
        die_with_parent()
        if cores:
            # Ray has started those that will run the calls
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), cores)
        if threads:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        stacks.register(f"learner-{rank}", stacks.home(config.run.dir))
        self._config, self._rank = config, rank
        self._queue = queue
        self._listener: socket.socket | None = None
        self._parts: RankParts | None = None

    def address(self) -> tuple[str, int]:
        """Return this rank's address, and a port for the rendezvous that nobody else can take."""
        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        return host, self._listener.getsockname()[1]

    def setup(
        self,
        *,
        master: tuple[str, int],
        model_dir: str,
        device: str,
        backend: str,
        key: str,
        total_updates: int,
        checkpoint: str | None,
    ) -> dict[str, Any] | None:
        """Join the group, load the model (and the checkpoint, whose state is returned)."""
        os.environ.update(
            RANK=str(self._rank),
            WORLD_SIZE=str(self._config.learner.ranks),
            LOCAL_RANK="0",
            MASTER_ADDR=master[0],
            MASTER_PORT=str(master[1]),
        )
        if self._listener is not None:
            os.environ["MASTER_LISTEN_FD"] = str(self._listener.detach())
        from async_grpo.runtime import light_imports  # noqa: F401, I001 - before transformers
        from async_grpo.learner.learner import Learner
        from async_grpo.learner.checkpoint import Saving
        from async_grpo.weights.transport import make_sender

        try:
            learner = Learner(
                self._config,
                model_dir=model_dir,
                fetch=self._fetch,
                device="cpu" if device == "cpu" else "cuda:0",
                total_updates=total_updates,
            )
            state = learner.load(checkpoint) if checkpoint is not None else None
        except ValueError as error:
            raise SetupError(str(error)) from error
        sender = make_sender(backend, learner, config=self._config, key=key)
        self._parts = RankParts(learner, sender, Saving(learner, key=key))
        return state

    @property
    def _up(self) -> RankParts:
        assert self._parts is not None, "setup comes first"
        return self._parts

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the learner."""
        return getattr(self._up.learner, name)(*args, **kwargs)

    def write_checkpoint(self, directory: str, state: dict[str, Any]) -> Written | str:
        """Write this rank's part of a checkpoint, with all ranks; or why one of them could not."""
        try:
            return self._up.saving.write(directory, state)
        except StorageFailure as error:
            return str(error)

    @ray.method(concurrency_group=SAVING)
    def finish_checkpoint(self, directory: str) -> dict[str, FileSum] | str:
        """Bring it to the disk; the files, or why not."""
        try:
            return self._up.saving.finish(directory)
        except OSError as error:
            return f"learner rank {self._rank}: {reason(error)}"

    @ray.method(concurrency_group=TRANSFER)
    def connect(self, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        """Prepare the transport for these engines; one init payload per engine."""
        host = ray.util.get_node_ip_address()
        return self._up.sender.connect(host, tensor_parallel_sizes)

    @ray.method(concurrency_group=TRANSFER)
    def rendezvous(self) -> str:
        """Complete the transport's group; why it failed, or ""."""
        return self._up.sender.rendezvous()

    @ray.method(concurrency_group=TRANSFER)
    def send(self) -> str:
        """Push the staged copy; why it is torn, or ""."""
        return self._up.sender.send()

    def stream(self) -> str:
        """Push the weights of the model itself, with all ranks; why it is torn, or ""."""
        return self._up.sender.send()

    def release(self) -> None:
        """Free the copy that was staged apart."""
        self._up.sender.release()

    def note(self) -> str:
        """Return what the user should know about the transport."""
        return self._up.sender.note

    def stage(self, label: str, *, verify: bool, sequences: list[TokenSequence]) -> Staged:
        """Stage the weights, with their log-probs of the sequences."""
        announcement = self._up.sender.stage(label, verify=verify)
        logprobs = self._up.learner.logprobs(sequences, temperature=1.0) if sequences else []
        return Staged(announcement, logprobs)

    def stage_perturbed(
        self, label: str, *, scale: float, sequences: list[TokenSequence]
    ) -> Staged:
        """Stage perturbed weights; the true ones are back, bit for bit, on return."""
        learner, sender = self._up.learner, self._up.sender
        sender.reserve()
        with learner.perturbed(scale=scale, seed=self._config.seed):
            announcement = sender.stage(label, verify=True, apart=True)
            logprobs = learner.logprobs(sequences, temperature=1.0)
        return Staged(announcement, logprobs, learner.logprobs(sequences, temperature=1.0))

    def weights(self) -> dict[str, Any]:
        """Copy all weights to host memory, with all ranks; {} on ranks other than the first."""
        taken = {}
        for name, weight in self._up.learner.named_weights():
            if self._rank == 0:
                taken[name] = weight.detach().cpu().clone()
        return taken

    def pid(self) -> int:
        """Process id, for tests and post-mortems."""
        return os.getpid()

    def close(self) -> None:
        """Free the transport and leave the process group."""
        self._up.sender.close()
        self._up.saving.discard()
        self._up.learner.close()

    def _fetch(self, step: int, group_ids: Sequence[int]) -> np.ndarray:
        with death_as(queue_died):
            return ray.get(
                self._queue.payload.remote(step, list(group_ids)), timeout=CALL_TIMEOUT_S
            )
