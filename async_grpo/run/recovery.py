"""Recovery of a learner that died: back to the step that the queue is at.

Runs in: the driver. A learner rank cannot be replaced alone (the others wait for it in a
collective), so all ranks start again, while queue, rollout actors and engines stay as they are:

    rank dies or is silent -> kill all -> newest checkpoint -> repeat the recorded steps
        -> connect the engines -> go on

The same, without the engines, brings a run that starts again to where it was. After two deaths in
the training of one step, or where the journal cannot repeat a step, the steps after the checkpoint
are discarded: the queue takes their batches back and the run epoch is raised. A user who goes back
to a checkpoint (`restore`) asks for the same.

Invariants: the learner makes no step of its own before it is where the queue is; every death counts
against `cluster.restart_budget`, apart from those of rollout actors; nothing but a whole checkpoint
is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from async_grpo.cluster.examination import examine, findings_of
from async_grpo.cluster.learner_group import LearnerGroup
from async_grpo.cluster.placement import Placement
from async_grpo.cluster.queue import DriverQueue
from async_grpo.cluster.remote_engine import RemoteEngine
from async_grpo.cluster.restart_budget import back_off_s
from async_grpo.cluster.session import RaySession
from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent, LearnerLost, RunError, Stalled
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.checkpoint.directory import Origin
from async_grpo.run.checkpoint.saver import Saver
from async_grpo.run.loop import Loop
from async_grpo.runtime.listener import RunListener
from async_grpo.weights.coordinator import Coordinator
from async_grpo.weights.transport import TransferStuck, Version

Result = TypeVar("Result")


class LearnerSupervisor:
    """Keeps the learner of one run alive. `restarts`: how often its ranks were started again."""

    def __init__(
        self,
        config: Config,
        *,
        learner: LearnerGroup,
        loop: Loop,
        coordinator: Coordinator[RemoteEngine],
        queue: DriverQueue,
        session: RaySession,
        placement: Placement,
        origin: Origin,
        saver: Saver,
        listener: RunListener,
    ) -> None:
        """origin: where this start of the run began."""
        self._config, self._queue = config, queue
        self._learner, self._loop = learner, loop
        self._coordinator = coordinator
        self._session, self._nodes = session, {slot.node_id for slot in placement.learners}
        self._origin = origin
        self._saver, self._listener = saver, listener
        self._died_at: int | None = None
        self.run_epoch = 0
        self.restarts = 0

    async def start(self, until: int, *, run_epoch: int) -> None:
        """Load the model or the checkpoint, and repeat the recorded steps up to `until`; again
        where a rank dies.
        """
        self.run_epoch = self._coordinator.run_epoch = run_epoch
        while True:
            try:
                await self._learner.start(self._origin.learner)
                await self._repeat(self._origin, until)
                return
            except LearnerLost as error:
                if error.silent:  # it would be again
                    raise Stalled(str(error)) from error
                await self._may_restart(error)
                self._learner.kill()
                self._listener.note(f"{error}; the learner starts again ({self._counted()})")
                await asyncio.sleep(back_off_s(self.restarts))

    async def restore(self, origin: Origin) -> None:
        """Set learner and queue back to an earlier checkpoint of this run, and make its weights
        live. Raises RunError where the run cannot go back.
        """
        reached = self._loop.steps_done
        if not self._config.replay.journal.enable:
            raise RunError("without replay.journal.enable a run that is started cannot go back")
        if reached == self._loop.total_steps:
            raise RunError(
                "all learner steps of this run are trained, and its queue is closed: go back with "
                "Trainer.from_checkpoint"
            )
        self._loop.phase = f"going back to the checkpoint of step {origin.step}"
        self._learner.kill()
        with self._loop.time.during("restarting"):
            try:
                async with self._coordinator.without_learner():
                    await self._discard(origin, reached, "the user restored a checkpoint")
                    self._origin = min(self._origin, origin, key=lambda one: one.step)
                    self._loop.go_back(origin.step, None)
                    await self._learner.start(origin.learner)
                    await self._repeat(origin, origin.step)
                    await self._coordinator.relink(origin.step, run_epoch=self.run_epoch)
            except (LearnerLost, TransferStuck) as error:  # a death like any other
                await self._bring_back(error, blame=False)

    async def surviving(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Do `work`, again after each recovery of the learner. Raises FaultBudgetSpent or
        Stalled.
        """
        while True:
            try:
                return await work()
            except (LearnerLost, TransferStuck) as error:
                await self.recover(error)

    async def recover(self, error: LearnerLost | TransferStuck, *, blame: bool = False) -> None:
        """Bring the learner back from what befell it. Raises FaultBudgetSpent or Stalled.

        blame: it trained a step; two deaths in it at the same step speak against its batch.
        """
        with self._loop.time.during("restarting"):
            await self._bring_back(error, blame=blame and isinstance(error, LearnerLost))

    async def _bring_back(self, error: LearnerLost | TransferStuck, *, blame: bool) -> None:
        reached, self._loop.phase = self._loop.steps_done, "bringing the learner back"
        while True:
            await self._may_restart(error)
            seen = findings_of(await examine(self._config.run.dir, "learner", error))
            self._learner.kill()
            # A checkpoint under way is complete without the ranks, or fails at once.
            await self._saver.wait()
            origin = await self._newest(reached)
            self._listener.note(
                f"{error}{seen}; the learner starts again from "
                f"{origin.path or 'the initial model'} ({self._counted()}), the rollout actors go "
                "on meanwhile"
            )
            await asyncio.sleep(back_off_s(self.restarts))
            try:
                async with self._coordinator.without_learner():
                    if why := await self._reason_to_discard(origin, reached, blame=blame):
                        reached = await self._discard(origin, reached, why)
                    blame = False  # a death at the start says nothing of a batch
                    await self._learner.start(origin.learner)
                    blame = True
                    await self._repeat(origin, reached)
                    blame = False
                    await self._coordinator.relink(reached, run_epoch=self.run_epoch)
                return
            except (LearnerLost, TransferStuck) as another:
                error = another

    async def _may_restart(self, error: LearnerLost | TransferStuck) -> None:
        """Count a death. Raises where the learner cannot be started again."""
        budget = self._config.cluster.restart_budget
        kind = Stalled if getattr(error, "silent", False) else FaultBudgetSpent
        if not self._config.replay.journal.enable:
            raise kind(
                f"{error}; without replay.journal.enable a learner that died cannot be restarted"
            ) from error
        if self.restarts >= budget:
            raise kind(
                f"{error}; the learner was started again {self.restarts} times already "
                "(cluster.restart_budget)"
            ) from error
        if not await self._nodes_serve():
            raise kind(
                f"{error}; a node of the learner is gone, and the learner does not move: "
                "start the same command again"
            ) from error
        self.restarts += 1
        self._listener.fault(str(error))

    def _counted(self) -> str:
        return f"restart {self.restarts} of at most {self._config.cluster.restart_budget}"

    async def _nodes_serve(self) -> bool:
        """Whether the nodes of all ranks still run processes."""
        timeout_s = self._config.cluster.resources_timeout_s
        checks = [self._session.node_serves(node, timeout_s=timeout_s) for node in self._nodes]
        return all(await asyncio.gather(*checks))

    async def _newest(self, reached: int) -> Origin:
        """Find the newest whole checkpoint up to `reached`, or where this start began. Raises
        FaultBudgetSpent where damage would let the run begin there anew.
        """
        run_dir, steps = Path(self._config.run.dir), range(self._origin.step + 1, reached + 1)
        found, damaged = await asyncio.to_thread(
            checkpoint.newest_whole, run_dir, check=checkpoint.verify, steps=steps
        )
        for error in damaged:
            self._listener.note(f"{error}; an older checkpoint is used")
        if found is not None:
            return Origin(found, checkpoint.step_of(found))
        if damaged and (why := await self._queue.obstacle(after=self._origin.step, until=reached)):
            raise FaultBudgetSpent(f"{damaged[0]}, no other checkpoint is whole, and {why}")
        return self._origin

    async def _reason_to_discard(self, origin: Origin, reached: int, *, blame: bool) -> str:
        if blame and self._died_at == reached:
            return f"the learner died twice in step {reached + 1}"
        if blame:
            self._died_at = reached
        return await self._queue.obstacle(after=origin.step, until=reached)

    async def _discard(self, origin: Origin, reached: int, why: str) -> int:
        """Take the steps after the checkpoint back; the step to go on from."""
        if reached == self._loop.total_steps:  # no actor works any more
            raise FaultBudgetSpent(
                f"the learner died at the end of the run, and {why}; start the same command again"
            )
        report, self.run_epoch = await self._queue.discard(
            step=origin.step, snapshot=origin.snapshot(), why=why
        )
        self._listener.rolled_back(origin.step)
        self._listener.note(f"replay queue: {report}")
        return origin.step

    async def _repeat(self, origin: Origin, until: int) -> None:
        state = self._learner.state
        self._loop.go_back(origin.step, None if state is None else state["rows"])
        if until <= origin.step:
            return
        recorded = await self._queue.digests()
        await self._learner.connect([])
        weights = await self._loop.repeat(until, recorded=recorded, digest=self._digest)
        same, compared = len(weights.same), len(weights.same) + len(weights.different)
        found = f"the weights are the same bits at {same} of {compared} recorded versions"
        self._listener.note(
            f"learner steps {origin.step + 1} to {until} are trained again from their recorded "
            f"batches; {found if compared else 'no digests to compare with'}"
        )
        if weights.different:
            self._listener.note(
                f"the weights differ from version {weights.different[0]} on, because of "
                "kernels that are not deterministic. Tokens keep the log-probs with which they "
                "were sampled, so the importance ratios stay correct"
            )

    async def _digest(self, version: int) -> str:
        staged = await self._learner.stage(
            Version(self.run_epoch, version).label, verify=True, sequences=[]
        )
        return staged.announcement.digest
