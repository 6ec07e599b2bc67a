"""The learner ranks as one object: the same calls for 1 or M ranks.

    LearnerGroup.train (driver) --Ray--> LearnerProcess.call (every rank) -> Learner.train

Runs in: the driver (`LearnerGroup`), learner ranks (`LearnerProcess`). Hides the number of ranks: a
call goes to all of them and returns when all are done. Invariants: every collective call is made on
every rank; a rank that dies or does not answer ends the call with LearnerLost, since the other
ranks would wait for it for ever; a GPU that is out of memory ends the run, as it would be again;
after `kill` only `start` may be called, and a rank is never replaced alone.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from async_grpo.cluster.deaths import death_as, is_death, told
from async_grpo.cluster.placement import Placement, shared_threads
from async_grpo.cluster.queue import CALL_TIMEOUT_S, queue_died
from async_grpo.cluster.watchdog import Calls
from async_grpo.config.schema import Config
from async_grpo.config.transports import TRANSPORTS
from async_grpo.errors import LearnerLost, RunError, SetupError
from async_grpo.learner.batching import RankPlan, RowKey, RowValue
from async_grpo.runtime import stacks
from async_grpo.runtime.cores import compute_in, stay_on
from async_grpo.runtime.garbage import keep_startup
from async_grpo.runtime.lifetime import die_with_parent
from async_grpo.runtime.storage import FileSum, StorageFailure, Written, reason
from async_grpo.weights.shared_gpu import Apart
from async_grpo.weights.transport import (
    Announcement,
    Staged,
    TokenSequence,
    WeightSender,
    merged_payloads,
    merged_stage,
)

if TYPE_CHECKING:  # torch, which only a rank needs
    from async_grpo.learner.checkpoint import Saving
    from async_grpo.learner.learner import Learner

TRANSFER, SAVING = "transfer", "saving"
CLOSE_TIMEOUT_S = 10.0
OUT_OF_MEMORY = re.compile(r"CUDA (error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED")
FREED_S = 3.0
"""Seconds after which the memory of a killed rank is free."""
DEATH_NOTICE_S = 10.0
"""Seconds for Ray to tell that a rank is dead, once another complains of a broken connection."""


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
            stay_on(cores)  # with the threads that will run the calls, which Ray has started
        if threads > len(cores) > 0:
            compute_in(threads)
        elif threads:
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
        from async_grpo.learner.backend.process_group import leave_room
        from async_grpo.learner.learner import Learner
        from async_grpo.learner.checkpoint import Saving
        from async_grpo.rollout.engine.choice import ENGINE
        from async_grpo.weights.layout import Layout
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
        if device != "cpu" and TRANSPORTS[backend].colocated:
            cache = ENGINE.kv_cache_gb(self._config, device=device, backend=backend) or 0.0
            weights = Layout(learner.published.weight_metadata()).nbytes
            asleep = self._config.cluster.engine.sleep is True
            leave_room(ENGINE.gpu_bytes + (0 if asleep else weights + int(cache * 2**30)))
        sender = make_sender(
            backend, learner.sent, config=self._config, key=key, pushing=ENGINE.pushing_sender
        )
        self._parts = RankParts(learner, sender, Saving(learner, key=key))
        keep_startup()
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
        with learner.sent.perturbed(scale=scale, seed=self._config.seed):
            announcement = sender.stage(label, verify=True, apart=True)
            logprobs = learner.logprobs(sequences, temperature=1.0)
        return Staged(announcement, logprobs, learner.logprobs(sequences, temperature=1.0))

    def weights(self) -> dict[str, Any]:
        """Copy all weights to host memory, with all ranks; {} on ranks other than the first."""
        taken = {}
        for name, weight in self._up.learner.published.named_weights():
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


class LearnerFailed(RunError):
    """The learner raised an error; its ranks may be out of step with each other."""


class LearnerGroup:
    """M DeepSpeed ranks, once `start` has returned."""

    def __init__(
        self,
        config: Config,
        *,
        placement: Placement,
        options: list[dict[str, Any]],
        queue: Any,
        model_dir: str,
        backend: str,
        key: str,
        total_updates: int,
        gpu: Apart | None = None,
    ) -> None:
        """options: Ray's, one per rank. queue: the handle from which ranks fetch their groups. gpu:
        whose turn it is on GPUs that engines share.
        """
        self._config, self._queue = config, queue
        self._gpu, self._resident = gpu or Apart(), False  # resident: its memory is on the GPUs
        self._placement, self._options = placement, options
        self._setup = {
            "model_dir": model_dir,
            "device": placement.device,
            "backend": backend,
            "key": key,
            "total_updates": total_updates,
        }
        self._handles: list[Any] = []
        self._serves = asyncio.Event()
        self.less_memory: Callable[[], str] = lambda: "`async-grpo check` shows the parts"
        self.calls = Calls()
        """The calls under way, for post-mortems."""
        self.state: dict[str, Any] | None = None
        """The state in the checkpoint from which the learner resumed."""

    async def start(self, checkpoint: str | None) -> None:
        """Start all ranks, and load the model or the checkpoint."""
        async with self._gpu.turn("learner"):
            self._resident = True
            await self._start(checkpoint)

    async def _start(self, checkpoint: str | None) -> None:
        actor = ray.remote(concurrency_groups={TRANSFER: 1, SAVING: 1})(LearnerProcess)
        self._handles = [
            actor.options(**option).remote(
                self._config,
                rank=rank,
                cores=slot.cores,
                threads=shared_threads(self._config, self._placement, slot)
                or len(slot.cores)
                or slot.threads,
                queue=self._queue,
            )
            for rank, (slot, option) in enumerate(
                zip(self._placement.learners, self._options, strict=True)
            )
        ]
        deadline = self._config.watchdog.start_timeout_s
        master = await self._within(
            self._handles[0].address.remote(), deadline, "the start of the learner"
        )
        states = await self._all(
            "setup", timeout_s=deadline, master=master, checkpoint=checkpoint, **self._setup
        )
        self.state = states[0]
        self._serves.set()

    def kill(self) -> None:
        """End all ranks at once; calls that are under way raise LearnerLost."""
        self._serves.clear()
        self._resident = False
        for handle in self._handles:
            ray.kill(handle)

    async def give_back(self) -> None:
        """See `Lender.give_back`."""
        if not self._resident:
            return
        self._resident = False
        try:
            if self._serves.is_set():
                await self._all("call", "give_back")
                return
        except (LearnerLost, ray.exceptions.RayError):
            pass  # the next call finds that it is gone
        self.kill()
        await asyncio.sleep(FREED_S)

    async def take_back(self) -> None:
        """See `Lender.take_back`."""
        if not self._resident and self._serves.is_set():
            await self._all("call", "take_back")
            self._resident = True

    async def back(self) -> None:
        """Wait until lost ranks have been started again, or the run has ended."""
        await self._serves.wait()

    async def prepare(self, plans: Sequence[RankPlan]) -> dict[RowKey, float]:
        """Let every rank fetch its sequences. Token KL summed per sequence, if rewarded."""
        async with self._gpu.turn("learner"):
            calls = [
                handle.call.remote("prepare", plan)
                for handle, plan in zip(self._handles, plans, strict=True)
            ]
            sums = await self._answers("call prepare", calls)
        return {key: value for rank in sums for key, value in rank.items()}

    async def train(
        self, values: dict[RowKey, RowValue], kl_coef: float, lr_factor: float
    ) -> list[dict[str, Any]]:
        """Make the step's optimizer steps; metrics of each rank in the wire form of MetricSums."""
        return await self._in_turn("call", "train", values, kl_coef, lr_factor)

    async def write_checkpoint(self, directory: str, state: dict[str, Any]) -> Written:
        """Write learner and exported model of all ranks. Raises StorageFailure."""
        return _unless_failed(await self._in_turn("write_checkpoint", directory, state))[0]

    async def finish_checkpoint(self, directory: str) -> dict[str, FileSum]:
        """Write the files into `directory` during training; lists them. Raises StorageFailure."""
        return {
            name: entry
            for files in _unless_failed(await self._all("finish_checkpoint", directory))
            for name, entry in files.items()
        }

    async def connect(self, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        """Prepare the transport for these engines; one init payload per engine."""
        return merged_payloads(await self._all("connect", tensor_parallel_sizes))

    async def rendezvous(self) -> str:
        """Complete the transport's group, while the engines connect; why it failed, or ""."""
        return next(filter(None, await self._all("rendezvous")), "")

    async def stage(self, label: str, *, verify: bool, sequences: list[TokenSequence]) -> Staged:
        """Copy the weights out of the model, and compute their log-probs of the sequences."""
        deadline = self._config.weight_sync.deadlines.stage_s
        return merged_stage(
            await self._in_turn(
                "stage", label, verify=verify, sequences=sequences, timeout_s=deadline
            )
        )

    async def stage_perturbed(
        self, label: str, *, scale: float, sequences: list[TokenSequence]
    ) -> Staged:
        """Stage visibly perturbed weights, with their log-probs and those of the true weights,
        which are back at once; waits for the end of a step that trains. Raises LearnerFailed, no
        fault of the engine.
        """
        try:
            return merged_stage(
                await self._in_turn(
                    "stage_perturbed",
                    label,
                    scale=scale,
                    sequences=sequences,
                    timeout_s=self._behind_a_step_s,
                )
            )
        except ray.exceptions.RayTaskError as error:
            raise LearnerFailed(
                f"the learner could not stage its weights for a check: {error.cause}"
            ) from error

    async def send(self, announcement: Announcement) -> str:
        """Push staged weights where the transport does; why the transfer is torn, or ""."""
        if not TRANSPORTS[announcement.backend].pushes:
            return ""
        if announcement.streamed:
            return next(filter(None, await self._all("stream")), "")
        deadline = self._config.weight_sync.deadlines.acknowledge_s
        return next(filter(None, await self._all("send", timeout_s=deadline)), "")

    async def release(self) -> None:
        """Free the copy that `stage_perturbed` made."""
        await self._all("release", timeout_s=self._behind_a_step_s)

    async def transport_note(self) -> str:
        """Return the transport's note for the user, or ""."""
        return (await self._all("note"))[0]

    async def logprobs(self, sequences: list[TokenSequence]) -> list[np.ndarray]:
        """Compute log-probs of (prompt, response) token lists under the current weights."""
        return (await self._in_turn("call", "logprobs", sequences))[0]

    async def get_weights(self) -> dict[str, Any]:
        """Copy the weights of now: full torch tensors in host memory, under Hugging Face names,
        adapters merged, a tied head left out.
        """
        return (await self._in_turn("weights"))[0]

    async def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return await self._all("pid")

    async def stop(self) -> None:
        """Stop the ranks; one that does not answer within its deadline is killed."""
        try:
            await asyncio.wait_for(
                asyncio.gather(*[handle.close.remote() for handle in self._handles]),
                CLOSE_TIMEOUT_S,
            )
        except (TimeoutError, ray.exceptions.RayError):
            pass  # killed below either way
        finally:
            for handle in self._handles:
                ray.kill(handle)

    @property
    def _behind_a_step_s(self) -> float:
        """Seconds for a call that may come while a rank trains a step, and has to wait for it."""
        return 2 * self._config.watchdog.step_timeout_s

    async def _in_turn(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Let all ranks compute something, on GPUs that are theirs meanwhile."""
        async with self._gpu.turn("learner"):
            return await self._all(method, *args, **kwargs)

    async def _all(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        calls = [getattr(handle, method).remote(*args, **kwargs) for handle in self._handles]
        name = next((arg for arg in args if isinstance(arg, str)), "")
        return await self._answers(f"{method} {name}".rstrip(), calls, timeout_s=timeout_s)

    async def _answers(
        self, what: str, asked: Sequence[Any], *, timeout_s: float | None = None
    ) -> list[Any]:
        """Wait for the answers of all ranks. Raises LearnerLost."""
        deadline = timeout_s if timeout_s is not None else self._config.watchdog.step_timeout_s
        calls, what = [asyncio.ensure_future(one) for one in asked], f"the learner's {what}"
        try:
            with self.calls.under_way(what, calls) as late:
                return await self._within(asyncio.gather(*calls), deadline, what, late)
        except ray.exceptions.RayTaskError as error:
            if OUT_OF_MEMORY.search(said := str(error.cause)):
                raise SetupError(
                    f"a learner rank ran out of GPU memory during {what} "
                    f"({said.partition(' GPU ')[0]}): {self.less_memory()}"
                ) from error
            # a rank that dies breaks the connections of the others, whose error may come first
            if len(calls) > 1 and (death := await _death(calls)) is not None:
                raise self._lost(what, death) from death
            raise

    async def _within(
        self, work: Any, seconds: float, what: str, late: Callable[[], str] = lambda: "rank 0"
    ) -> Any:
        try:
            # not `wait_for`, which leaves the error of a cancelled `gather` to be found by asyncio
            async with asyncio.timeout(seconds):
                with death_as(lambda error: self._lost(what, error)):
                    return await work
        except ray.exceptions.RayTaskError:  # a TimeoutError too, if it carries one
            raise
        except TimeoutError as error:
            self._serves.clear()
            raise LearnerLost(
                f"{what} did not finish within {seconds:g} s; waiting for {late()}", silent=True
            ) from error

    def _lost(self, what: str, error: BaseException) -> LearnerLost:
        self._serves.clear()
        return LearnerLost(f"a learner rank died during {what}: {told(error)}")


def _unless_failed(answers: list[Any]) -> list[Any]:
    """Return the answers of all ranks. Raises StorageFailure with the texts among them."""
    if texts := {answer: None for answer in answers if isinstance(answer, str)}:
        raise StorageFailure("; ".join(texts))
    return answers


async def _death(calls: Sequence[asyncio.Future[Any]]) -> BaseException | None:
    """Return the error of a dead rank, if Ray tells of one in time."""
    deadline = time.monotonic() + DEATH_NOTICE_S
    pending = set(calls)
    while pending:
        done, pending = await asyncio.wait(
            pending,
            timeout=max(0.0, deadline - time.monotonic()),
            return_when=asyncio.FIRST_COMPLETED,
        )
        for call in done:
            if not call.cancelled() and is_death(call.exception()):
                return call.exception()
        if not done:
            return None
    return None
