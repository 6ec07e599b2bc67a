"""The settings of a run as a whole: the command with a system that trains nothing, and its
tracking.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

from async_grpo.config.load import dump
from async_grpo.config.schema import Config
from async_grpo.contrib.warm_start import cache as warm_start_cache
from async_grpo.observe.tracking import tracker as tracker_module
from async_grpo.observe.tracking.sink import Point, RunFacts, TrackingError
from async_grpo.observe.tracking.tracker import Tracker
from async_grpo.run import running, summary
from async_grpo.run import system as system_module
from async_grpo.run import trainer as trainer_module
from async_grpo.run.callbacks.base import Callback
from async_grpo.run.checkpoint import saver as saver_module
from async_grpo.run.preflight import architecture
from async_grpo.runtime.storage import StorageFailure, Written
from async_grpo.tools import hub
from async_grpo.tools.report import launch
from tests.support.models import write_model
from tests.support.verbs import train
from tests.support.wiring import Wire, recorded_waits, tiny_model, workplace
from tests.wiring.tasks import rows

MARKS = "tests.wiring.run:Marks"


class System:
    """A system whose steps cost nothing. `seen`: what it was asked."""

    run_epoch = 0
    cores, max_num_seqs = None, 16

    def __init__(self, facts: Any, listener: Any, seen: list[Any], *, disk: bool) -> None:
        self.seen, self._disk, self._listener, self.steps_done = seen, disk, listener, 0
        self.event_loop = asyncio.get_running_loop()
        self.loop = SimpleNamespace(latest={}, steps_done=0, lengths=[], generation_s=[])
        self.actors = SimpleNamespace(alive=lambda: [None])
        seen += [facts.total_steps, facts.model_dir]

    async def start(self) -> None: ...

    async def open_weights(self) -> dict[str, float]:
        return {}

    async def step(self) -> dict[str, float]:
        self.steps_done += 1
        self.seen.append(self.steps_done)
        metrics = {"train/loss": 0.0, "time/step": 0.0}
        self._listener.logged(self.steps_done, metrics)
        return metrics

    async def settle(self) -> None: ...

    async def evaluate(self, total: int) -> tuple[dict[str, float], list[Any]]:
        self.seen.append(("evaluate", total))
        return {}, []

    async def evaluate_beside(self, total: int, done: Any) -> None:
        self.seen.append(("evaluate beside", total))

    async def save(self, directory: Path) -> tuple[dict[str, Any], Written]:
        if not self._disk:
            raise StorageFailure("no space")
        return {"segment": 1}, Written(nbytes=1, in_memory=False, note="", updates=1)

    async def restore(self, origin: Any) -> None:
        self.steps_done = origin.step

    async def finish_save(self, directory: Path) -> dict[str, Any]:
        for path in (directory / "learner" / "state.pt", directory / "hf" / "model.safetensors"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(2**16))
        return {}

    async def forget(self, *, segment: int, step: int) -> None: ...

    async def stop(self, *, orderly: bool) -> None: ...

    def request_stop(self) -> None: ...

    def scene(self) -> Any:
        return SimpleNamespace(session=None, queue=None, actors=None, learner=None, loop=None)


class Marks(Callback):
    """Leaves a file after a learner step; or raises an error instead."""

    def __init__(self, *, breaks: bool = False) -> None:
        self._breaks = breaks

    def on_step(self, trainer: Any, result: dict[str, Any]) -> None:
        if self._breaks:
            raise KeyError("broken")
        (trainer.run_dir / "marked").touch()


class Sink:
    """MLflow that takes everything, or is not `there`. `seen`: of which run; `charts`: points."""

    title, ends_last = "MLflow", False
    seen: ClassVar[list[Any]]
    charts: ClassVar[list[str]]
    there = True

    def __init__(self, uri: str | None, run_dir: Path) -> None:
        self.address = "file:///nowhere"

    def where(self) -> str:
        return ""

    def start(self, run: RunFacts) -> str:
        if not self.there:
            raise ConnectionError("refused")
        name = re.sub(r"-\d{8}-\d{6}$", "", run.name)  # the time of the start
        self.seen.insert(0, (run.uri, run.experiment, name))  # whenever the thread gets to it
        return "id"

    def log(self, run_id: str, *, points: Sequence[Point] = (), **_: Any) -> None:
        self.charts.extend(point.name for point in points)

    def set_status(self, *_: Any) -> None: ...

    show_samples = put = register = set_status


@contextmanager
def doubles(seen: list[Any], *, disk: bool = True) -> Iterator[set[str]]:
    """Inside the block a trainer has a system that trains nothing, and no Ray. Gives the waits that
    were asked for. seen: gets what system, tracker and report were asked.
    """
    artifact, kind = Tracker.log_artifact, _sink()
    kind.seen = seen

    def keep(tracker: Tracker, path: Path, **options: Any) -> None:
        seen.append((Path(path).name, options))
        artifact(tracker, path, **options)

    def warm(*_: Any, **__: Any) -> str:
        seen.append("warm start")
        return tiny_model()

    with ExitStack() as stack:
        for target, name, fake in (
            (architecture, "_ask", lambda _: {"refused": "", "sure": False}),
            (running, "Connection", lambda *_, **__: _connection()),
            (system_module, "System", _system(seen, disk=disk)),
            (system_module, "reserve", _reserve),
            (trainer_module, "SAVING_AFTER_FAILURE_S", 1.0),
            (summary, "summarise", lambda *_: []),
            (saver_module, "code_version", dict),
            (tracker_module, "write_code_state", lambda _: []),
            (tracker_module, "tags", dict),
            (hub, "push_at_end", lambda _, name: (seen.append(name), ("on the hub", name))[1]),
            (hub, "check_target", lambda name: seen.append(f"may push to {name}")),
            (launch, "write_report", lambda _: (seen.append("report"), (None, ""))[1]),
            (warm_start_cache, "ensure_warm_start", warm),
            (tracker_module, "Tracker", partial(Tracker, kind=kind)),
            (tracker_module, "SystemMetrics", lambda _: _metrics(seen)),
            (Tracker, "log_artifact", keep),
        ):
            stack.enter_context(mock.patch.object(target, name, fake))
        yield stack.enter_context(recorded_waits())


def ran(config: Config, *, disk: bool = True) -> list[Any]:
    """Exit code of a run, what its system, its tracker and its report were asked, and what is in
    its directory.
    """
    place, seen = workplace(), list[Any]()
    (place / "config.yaml").write_text(dump(config))
    with doubles(seen, disk=disk) as waits, redirect_stdout(io.StringIO()):
        code = train([str(place / "config.yaml")])
    directory = Path(config.run.dir)
    files = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    kept = sorted(path.name for path in directory.glob("checkpoints/*"))
    status = directory / "status.json"
    name = json.loads(status.read_text())["run"] if status.is_file() else ""
    return [code, seen, files, kept, name, sorted(waits)]


def unsaved(config: Config) -> list[Any]:
    """The same with a disk that takes no checkpoint."""
    return ran(config, disk=False)


def _connection() -> Any:
    return SimpleNamespace(
        session=SimpleNamespace(exposed_token=lambda: None),
        key="wires",
        left="",
        close=lambda: None,
        remove_leftovers=lambda: None,
    )


async def _reserve(*_: Any) -> Any:
    rank = SimpleNamespace(node_id="n", slots=())
    placement = SimpleNamespace(device="cpu", colocated=False, learners=(rank,), engines=())
    return SimpleNamespace(placement=placement, backend="shared_memory", slots=())


def _system(seen: list[Any], *, disk: bool) -> Any:
    return lambda config, facts, *, listener, **_: System(facts, listener, seen, disk=disk)


def _sink(*, there: bool = True) -> type[Sink]:
    return type("Sink", (Sink,), {"seen": [], "charts": [], "there": there})


def _metrics(seen: list[Any]) -> Any:
    seen.append("system metrics")
    return SimpleNamespace(start=lambda: None, stop=lambda: None)


def unreached(config: Config) -> str:
    """What becomes of a run whose MLflow is not there."""
    Path(config.run.dir).mkdir(parents=True)
    tracker = Tracker(
        config, run_dir=Path(config.run.dir), resume_run_id=None, kind=_sink(there=False)
    )
    try:
        tracker.start()
    except TrackingError:
        return "the run does not begin"
    finally:
        tracker.finish("FINISHED")
    return "the run begins"


def charts(config: Config) -> list[str]:
    """The metrics of a line that MLflow gets."""
    run_dir, kind = Path(config.run.dir), _sink()
    run_dir.mkdir(parents=True)
    tracker = Tracker(config, run_dir=run_dir, resume_run_id=None, kind=kind)
    tracker.start()
    tracker.log(1, {"train/entropy": 1.0, "train/abs_log_ratio": 1.0})
    tracker.finish("FINISHED")
    return kind.charts


def trackers(config: Config) -> list[str]:
    """The trackers of a run."""
    run_dir = Path(config.run.dir)
    run_dir.mkdir(parents=True)
    return list(Tracker(config, run_dir=run_dir, resume_run_id=None, kind=_sink()).summary)


def _other_model() -> str:
    return write_model(workplace(), hidden=32, seed=1)


def wires() -> list[Wire]:
    """Made when they are asked for, since they name a model."""
    data = {"task.name": "jsonl", "task.train": rows("epoch", 8), "task.eval": rows("held", 5)}
    given = {"model.path": tiny_model(), "run.total_steps": 6, "evaluation.max_samples": 5}
    table: list[tuple[Any, ...]] = [
        ("run.name", "another"),
        ("run.total_steps", 4),
        ("run.callbacks", {MARKS: {}}),
        ("run.on_callback_error", "count", {"run.callbacks": {MARKS: {"breaks": True}}}),
        ("model.path", _other_model()),
        ("model.warm_start", {}),
        ("rollout.rollout_batch_size", 2, {**data, "run.epochs": 2}),
        ("evaluation.every_steps", 2),
        ("evaluation.before", False),
        ("evaluation.max_samples", 4),
        ("checkpoint.every_steps", 2),
        ("checkpoint.keep", 1, {"checkpoint.every_steps": 2}),
        ("checkpoint.push", "me/adder"),
        ("tracking.mlflow", False),
        ("tracking.uri", "http://localhost:1"),
        ("tracking.experiment", "another"),
        ("tracking.system_metrics", False),
        ("tracking.log_model_max_gb", 1e-6),
        ("tracking.register_model", "named"),
        ("tracking.report", False),
        ("watchdog.step_timeout_s", 1700.0),
    ]
    return [
        *[
            Wire(key, value, ran, {**given, **(more[0] if more else {})})
            for key, value, *more in table
        ],
        Wire("run.epochs", 3, ran, {**given, **data}, against=2),
        Wire("checkpoint.max_failures", 1, unsaved, {**given, "checkpoint.every_steps": 1}),
        Wire("checkpoint.mirror", f"file://{workplace()}/copies", ran, given),
        Wire("tracking.offline_ok", True, unreached),
        Wire("tracking.metrics", "all", charts),
        Wire("tracking.also", ["tensorboard"], trackers),
    ]
