"""Which tests make a system, in which order they run, and what several modules share.

`make test` runs `tests/system/test_system.py` (a real run, a kill, a resume) beside all tests that
need no system, a module at a time on each core (pytest-xdist). `make test-system` runs the tests
marked `system`: first those marked `alone`, which look at everything that the machine has or use it
up, then the others, two modules at a time. `make test-all` runs the slow ones, too. Tests marked
`later` and modules in `LATER` are slow on a machine that computes much slower than usual.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from async_grpo.runtime.garbage import keep_startup
from tests.support.machine_speed import TOO_SLOW, slowness

hypothesis.settings.register_profile("no deadline", deadline=None)  # no test asserts a time
hypothesis.settings.load_profile("no deadline")

FIRST = "tests/system/test_system.py"
"""The system of `make test`: it begins first, and runs beside the rest."""
LONG = ("tests/wiring/", "tests/replay/test_journal.py", "tests/learner/", "tests/observe/")
"""The longest modules and folders without one: early, so that no core waits for them at the end."""
SYSTEM = (
    "tests/chaos/test_resume.py",
    "tests/chaos/test_chaos.py",
    "tests/chaos/test_chaos_episodes.py",
    "tests/chaos/test_chaos_taught.py",
    "tests/hosts/",
    "tests/system/test_jobs.py",
    "tests/system/test_command_line.py",
    "tests/weights/test_publication.py",
    "tests/cluster/test_rollout_actors.py",
    "tests/weights/test_faults.py",
    "tests/benchmarks/test_throughput.py",
    "tests/run/checkpoint/test_recorded_runs.py",
    "tests/weights/test_nccl.py",
    "tests/rollout/test_engine.py",
    "tests/weights/test_adapter_sync.py",
    "tests/tools/evaluate",
    "tests/cluster/",
    "tests/run/test_recovery.py",
    "tests/real/",
    "tests/replay/test_queue_kills.py",
    "tests/system/",
    "tests/replay/test_schedules.py",
    "tests/learner/test_sharded_memory.py",
    "tests/rollout/test_bfloat16_check.py",
    "tests/agents/endpoint/test_publications.py",
    "tests/tools/serve/test_command.py",
    "tests/learner/test_adapters.py",
    "tests/learner/test_checkpoint.py",
    "tests/observe/test_bottleneck.py",
    "tests/replay/test_outstanding.py",
    "tests/tools/predict/test_rehearsal.py",
    "tests/run/preflight/test_architecture_check.py",
    "tests/models/test_learner_passes.py",
    "tests/tools/check/test_dry_run.py",
)
"""Modules and folders whose tests start Ray, engines or learner ranks, or simulate for long; the
longest first, so that none of them is begun last."""
SLOW = (
    "tests/chaos/test_resume.py",
    "tests/system/test_learning.py",
    "tests/system/test_chain.py",
    "tests/system/test_library_runs.py",
    "tests/system/test_model_runs.py",
    "tests/system/test_post_mortem_system.py",
    "tests/system/test_doctor_system.py",
    "tests/system/test_recipes_system.py",
    "tests/learner/test_sharded_memory.py",
    "tests/models/test_learner_passes.py",
)
"""Systems that are `slow` as a whole: `make test-all` runs them."""
LATER = (
    "tests/system/test_jobs.py",
    "tests/weights/test_publication.py",
    "tests/weights/test_faults.py",
    "tests/cluster/test_rollout_actors.py",
    "tests/run/checkpoint/test_recorded_runs.py",
    "tests/weights/test_adapter_sync.py",
    "tests/cluster/test_queue_death.py",
    "tests/cluster/test_autoscaling.py",
    "tests/cluster/test_elastic_engine.py",
    "tests/run/test_recovery.py",
    "tests/system/test_kept_sets.py",
    "tests/system/test_chain_controls.py",
    "tests/system/test_core_alone.py",
    "tests/rollout/test_bfloat16_check.py",
    "tests/tools/serve/test_command.py",
    "tests/hosts/",
    "tests/replay/test_queue_kills.py",
    "tests/agents/endpoint/test_publications.py",
    "tests/learner/test_adapters.py",
    "tests/learner/test_checkpoint.py",
    "tests/tools/predict/test_rehearsal.py",
    "tests/run/preflight/test_architecture_check.py",
)
"""Systems that are `later` as a whole."""
IN_TIME = slowness() <= TOO_SLOW
"""Whether tests marked `later` are not `slow` here."""
LEFT_OUT = SLOW if IN_TIME else SLOW + LATER
"""Modules that are not run here where `-m` says "not slow"."""
LIGHT = (
    FIRST,
    "tests/cluster/test_placement.py",
    "tests/cluster/test_bundles.py",
    "tests/cluster/test_deaths.py",
    "tests/cluster/test_evaluation.py",
    "tests/cluster/test_frozen_models.py",
    "tests/system/test_synchronous.py",
)
"""Modules of those folders that belong to `make test`."""


def system_rank(path: str) -> int | None:
    """Position in `SYSTEM` of a module, or of a test in it; None where no system is needed."""
    if path.startswith(LIGHT):
        return None
    return next((rank for rank, place in enumerate(SYSTEM) if path.startswith(place)), None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave modules aside that `-m` leaves out as a whole: importing them takes seconds."""
    path, wanted = collection_path.relative_to(config.rootpath).as_posix(), config.option.markexpr
    if not collection_path.name.startswith("test_"):
        return None
    needs_system = system_rank(path) is not None
    left_out = "not system" in wanted if needs_system else wanted.startswith("system")
    left_out = left_out or ("not slow" in wanted and path.startswith(LEFT_OUT))
    if "and alone" in wanted:
        left_out = left_out or "mark.alone" not in collection_path.read_text(encoding="utf-8")
    return True if left_out else None


def pytest_report_header() -> list[str]:
    """Say on a slow machine what is left out: a result that shows less must look like it."""
    if IN_TIME:
        return []
    return [f"{slowness():.1f} times slower than a usual machine: tests marked `later` are slow"]


def pytest_collectstart() -> None:
    """Thousands of modules are imported now: to look for garbage meanwhile takes as long again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What was imported is not looked through again."""
    keep_startup()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("system") is not None:
            # a mark of its own would leave it out of `make test`, and its module out of the other
            raise pytest.UsageError(f"{item.nodeid}: list the module in SYSTEM, do not mark it")
        if system_rank(item.nodeid) is not None:
            item.add_marker("system")
        later = not IN_TIME and item.get_closest_marker("later") is not None
        if later or item.nodeid.startswith(LEFT_OUT):
            item.add_marker("slow")
        if slowness() > 1:
            _give_time(item)
    items.sort(key=_place)


def _give_time(item: pytest.Item) -> None:
    """Let a test take as much longer as this machine is slower."""
    given = item.get_closest_marker("timeout")
    seconds, named = (given.args[0], given.kwargs) if given else (item.config.getini("timeout"), {})
    item.add_marker(pytest.mark.timeout(float(seconds) * slowness(), **named), append=False)


def _place(item: pytest.Item) -> int:
    if item.nodeid.startswith(FIRST):
        return -2
    if (rank := system_rank(item.nodeid)) is not None:
        return rank
    return -1 if item.nodeid.startswith(LONG) else len(SYSTEM)


@pytest.fixture(scope="module", autouse=True)
def _environment_of_its_own() -> Iterator[None]:
    """What a module leaves in the environment (ranks and ports of learners, the stacks of a run) is
    nothing for the next one.
    """
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    joined = getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)()
    assert not joined, "this module leaves a process group behind; the next one cannot join its own"


@pytest.fixture(scope="module")
def shared_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the module's function `story(home)` returns, told once for all tests of the module."""
    return request.module.story(tmp_path_factory.mktemp("story"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The models are so small that a second thread costs more than it does, and where others use
    the cores it spins while it waits for them.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def counted_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of `tests.support.recorded_run`."""
    # here, since it imports half of the product, which most tests do without
    from tests.support import recorded_run

    return recorded_run.tell(tmp_path_factory.mktemp("counted"))
