"""What is done to a run, and when it has recovered from it.

A fault strikes at a moment at which at least `rollout_batch_size` groups are ready and every
rollout actor is generating: the learner is held at its gate in a step (which is when the queue
fills), and the record is read again afterwards for the moment of the blow.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.harness import Moment, Run, alive, born, kill

KINDS = (
    "kill rollout actor",
    "kill EngineCore",
    "kill queue",
    "kill learner rank",
    "kill verifier",
    "kill driver",
    "stop engine",
    "stop learner rank",
    "hang verifier",
    "fill disk",
    "kill MLflow",
)
"""Of a run of episodes, `verifier` is a process with environments."""
OF_TEACHERS = ("kill teacher", "kill teacher's engine", "stop teacher", "stop teacher's engine")
"""Of a run with a frozen model."""
SHORT = tuple(kind for kind in KINDS[:9] if kind != "kill driver")
READY_S, RECOVERY_S, START_S = 300.0, 600.0, 900.0
HOLD_S = 20.0
FULL = "No space left on device"

Prepared = tuple[Callable[[], float | None], Callable[[float], bool], set[int]]


@dataclass
class Blow:
    """A fault that struck. `recovered`: whether what it broke works again; None once it does."""

    kind: str
    at: float
    moment: Moment
    recovered: Callable[[], bool] | None
    seconds: float | None = None


class Chaos:
    """Strikes one run, with a seed."""

    def __init__(
        self, run: Run, *, batch: int, actors: int, seed: int, server: object | None = None
    ) -> None:
        """batch: groups of a learner step. actors: rollout actors of the whole run. server: its
        MLflow server, if there is one.
        """
        self.run, self.batch, self.actors, self.random, self.server = (
            run,
            batch,
            actors,
            random.Random(seed),
            server,
        )
        self.gate = run.side.folder / "gate"
        self._spoiled: set[int] = set()
        self.blows: list[Blow] = []

    def start(self) -> None:
        """Start the run, and wait until every rollout actor has produced and a learner step is
        done.
        """
        self.run.start()
        self.whole(since=time.monotonic(), seconds=START_S)

    def whole(self, *, since: float, seconds: float) -> None:
        """Wait until the run works as at the beginning: all actors, and a learner step that was
        begun after `since`.
        """
        self.run.wait(
            lambda: len(self._serving()) >= self.actors and self._stepped(since),
            seconds,
            f"{self.actors} actors and a learner step",
        )

    def strike(self, kind: str) -> Blow:
        """Wait for the moment, do it, and see by the record that it was the moment."""
        if (
            kind == "kill driver"
        ):  # else it may die right after a checkpoint, and the next start has nothing to repeat
            self.run.wait(
                lambda: 2 <= self.run.side.steps() - self._saved() <= 4,
                READY_S,
                "two learner steps after a checkpoint",
            )
        serving = self._serving()
        actor = self.random.choice(serving)
        blow, recovered, spoilt = self._prepare(kind, actor)
        ranks = self._at_the_moment(serving)
        at = blow() or time.monotonic()
        self.run.side.poll()
        moment = self.run.side.moment(at)
        self._spoiled.update(spoilt)
        self.gate.unlink()
        assert len(moment.ready) >= self.batch and ranks <= moment.at_gate, f"{kind}: {moment}"
        if kind != "hang verifier":  # which strikes when a response is scored
            assert all(moment.generating.get(pid, 0) > 0 for pid in serving), f"{kind}: {moment}"
        self.blows.append(Blow(kind, at, moment, lambda: recovered(at)))
        return self.blows[-1]

    def recover(self, blow: Blow) -> float:
        """Wait until the run has recovered; seconds since the blow."""
        seconds = START_S if blow.kind == "kill driver" else RECOVERY_S
        self.run.wait(blow.recovered, seconds, f"recovery from: {blow.kind}")
        blow.seconds = time.monotonic() - blow.at
        return blow.seconds

    # ---- the moment ----

    def _at_the_moment(self, serving: list[int]) -> set[int]:
        """Hold the learner in a step until the queue is full enough and all these actors work; the
        ranks that are held.
        """
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            before = self.run.side.steps()
            self.gate.touch()
            held = time.monotonic()
            while time.monotonic() < held + HOLD_S:
                self.run.side.poll()
                assert self.run.process.poll() is None, (
                    f"the run ended with {self.run.process.returncode}:\n{self.run.text()[-4000:]}"
                )
                moment = self.run.side.moment(time.monotonic())
                if self._fits(moment, serving):
                    return set(self.run.ranks()) - self._spoiled
                if moment.at_gate and not any(moment.generating.get(pid, 0) for pid in serving):
                    break  # all slots are taken and nobody works: one step has to go on
                time.sleep(0.003)
            self.gate.unlink()
            self.run.wait(
                lambda before=before: self.run.side.steps() > before, READY_S, "a learner step"
            )
        raise AssertionError(
            f"no moment with {self.batch} ready groups and all actors at work within "
            f"{READY_S:.0f} s"
        )

    def _fits(self, moment: Moment, serving: list[int]) -> bool:
        """Two groups per actor, which its engine generates one after the other: both cannot be done
        before the blow.
        """
        ranks = set(self.run.ranks()) - self._spoiled
        return (
            len(moment.ready) >= self.batch
            and all(moment.generating.get(pid, 0) > 1 for pid in serving)
            and bool(ranks)
            and ranks <= moment.at_gate
        )

    def _serving(self) -> list[int]:
        return [pid for pid in self.run.actors() if pid not in self._spoiled]

    def _saved(self) -> int:
        """The step of the newest checkpoint that was begun."""
        return max(
            (
                entry.values[1]
                for entry in self.run.side.having("state")
                if entry.values[0] == "saved"
            ),
            default=0,
        )

    def _stepped(self, since: float) -> bool:
        begun = {entry.values[0] for entry in self.run.side.having("fetch") if entry.at > since}
        return any(
            entry.at > since and entry.values[0] in begun
            for entry in self.run.side.having("trained")
        )

    def _advanced(self, since: float) -> bool:
        """Whether the learner is further than it was."""
        before = max(
            (entry.values[0] for entry in self.run.side.having("trained") if entry.at <= since),
            default=0,
        )
        return self.run.side.steps() > before + 1

    def _produced(self, since: float, pid: int | None = None) -> bool:
        """Whether a put was acknowledged since; of this actor, if one is named."""
        return any(
            entry.at > since and pid in (None, entry.pid) for entry in self.run.side.having("ack")
        )

    # ---- the blows ----

    def _prepare(self, kind: str, actor: int) -> Prepared:
        """What to do at the moment (it may return the time at which it happened), how its recovery
        is seen, and which processes are spoilt by it.
        """
        run = self.run
        if kind in ("kill rollout actor", "kill EngineCore", "stop engine"):
            target = actor if kind == "kill rollout actor" else run.engine_of(actor)
            return (
                signal_to(target, kind),
                lambda at: (
                    not alive(target)
                    and not alive(actor)
                    and len(self._serving()) >= self.actors
                    and any(
                        self._produced(at, entry.pid)
                        for entry in run.side.having("actor")
                        if entry.at > at
                    )
                ),
                {actor},
            )
        if kind in ("kill learner rank", "stop learner rank"):
            target = self.random.choice(run.ranks())
            return (
                signal_to(target, kind),
                lambda at: not alive(target) and self._advanced(at),
                set(run.ranks()),
            )
        if kind == "kill queue":
            target = run.queue()
            return (
                signal_to(target, kind),
                lambda at: not alive(target) and self._produced(at) and self._advanced(at),
                set(),
            )
        if kind == "kill verifier":
            target = run.children_of(actor)[0]
            return (
                signal_to(target, kind),
                lambda at: not alive(target) and self._all_verify(at),
                set(),
            )
        if kind in OF_TEACHERS:
            teacher = run.teacher()
            target = run.engine_of(teacher) if kind.endswith("engine") else teacher
            return (
                signal_to(target, kind),
                lambda at: (
                    not alive(target)
                    and bool(engines := run.engines_of_teacher(but=teacher))
                    and self._produced(max(at, born(engines[0])))
                    and self._advanced(at)
                ),
                set(),
            )
        return {
            "kill driver": self._driver,
            "hang verifier": self._hang,
            "fill disk": self._disk,
            "kill MLflow": self._mlflow,
        }[kind]()

    def _all_verify(self, since: float) -> bool:
        """Whether all actors have a child for the task's code, and have put groups since."""
        serving = self._serving()
        return len(serving) >= self.actors and all(
            self._produced(since, actor) and self.run.children_of(actor) for actor in serving
        )

    def _driver(self) -> Prepared:
        """The run is given up by its processes, and the same command is given again."""

        def again(at: float) -> bool:
            return len(self._serving()) >= self.actors and self._advanced(at)

        def blow() -> float:
            at = time.monotonic()
            self.run.kill_driver()
            self.run.start()
            return at

        return blow, again, set()

    def _hang(self) -> Prepared:
        """The next response that is scored never comes to an end."""
        side, before = self.run.side.folder, set(self.run.side.folder.glob("hangs-*"))
        hanging: list[int] = []

        def blow() -> float:
            (side / "hang").touch()
            [sign] = self.run.wait(
                lambda: set(side.glob("hangs-*")) - before, READY_S, "a verifier that hangs"
            )
            hanging.append(int(sign.name.partition("-")[2]))
            return time.monotonic()

        return blow, lambda at: not alive(hanging[0]) and self._all_verify(at), set()

    def _disk(self) -> Prepared:
        """The checkpoints' disk is full until the run has said so."""
        run, filler, sign = (
            self.run,
            self.run.dir / "checkpoints" / "filler",
            self.run.side.folder / "full",
        )

        def blow() -> float:
            at = time.monotonic()  # writing takes long enough for engines to finish their groups
            if is_mount(filler.parent):
                subprocess.run(
                    ["dd", "if=/dev/zero", f"of={filler}", "bs=1M"],
                    check=False,
                    capture_output=True,
                    timeout=60,
                )
            sign.touch()
            return at

        said = run.text().count(FULL)

        def recovered(at: float) -> bool:
            if sign.exists():
                if run.text().count(FULL) > said:
                    filler.unlink(missing_ok=True)
                    sign.unlink()
                return False
            return "training waited" in run.text()[run.text().rfind(FULL) :]

        return blow, recovered, set()

    def _mlflow(self) -> Prepared:
        """The server is gone until the run has shown that it goes on without."""
        again: list[float] = []

        def recovered(at: float) -> bool:
            if not again and self._advanced(at):
                self.server.start()
                again.append(time.monotonic())
            return bool(again) and self.server._answers() and self._advanced(again[0])

        def blow() -> float:
            at = time.monotonic()  # engines may finish their groups before the server is gone
            self.server.kill()
            return at

        return blow, recovered, set()


def signal_to(pid: int, kind: str) -> Callable[[], None]:
    """SIGSTOP for kinds that stop something, else SIGKILL."""
    return lambda: os.kill(pid, signal.SIGSTOP if kind.startswith("stop") else signal.SIGKILL)


def is_mount(path: Path) -> bool:
    """Whether something is mounted there."""
    return os.path.ismount(path)


def end(run: Run) -> None:
    """SIGTERM: the run saves and ends with 0."""
    kill(run.process.pid, signal.SIGTERM)
    code = run.ends(START_S)
    assert code == 0, f"exit code {code}:\n{run.text()[-4000:]}"
    run.wait_until_gone()
