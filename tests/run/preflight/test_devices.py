"""What a run that has its places is refused for, and how the memory of GPUs is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.cluster import session
from async_grpo.cluster.placement import Node, place
from async_grpo.cluster.session import gpu_bytes
from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.learner import drafts
from async_grpo.run.preflight.devices import check_device, look_at_memory
from tests.support.wiring import tiny_model

GIB = 2**30


def places(config: Config, backend: str = "nccl") -> Any:
    return SimpleNamespace(
        placement=place(config, [Node("n", "n", cpus=8.0, gpus=2.0)]), backend=backend
    )


def config_of(**engine: Any) -> Config:
    return Config.model_validate(
        {"run": {"total_steps": 1}, "model": {"path": tiny_model()}, "cluster": {"engine": engine}}
    )


@pytest.mark.parametrize("known", [{}, {"other": 1}, {"n": 24 * GIB}])
def test_what_fits_or_is_not_known_begins(known: dict[str, int]) -> None:
    config = config_of()
    look_at_memory(config, tiny_model(), places(config), known)


def test_what_is_chosen_is_said_and_stands_in_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    settled, lines = look_at_memory(config, tiny_model(), places(config), {"n": 24 * GIB})
    learner = settled.learner
    assert (learner.tokens_per_micro_batch, learner.gradient_checkpointing) == (16384, False)
    [line] = lines
    assert line.startswith("learner: 16,384 tokens per micro-batch without gradient checkpointing")
    assert look_at_memory(settled, tiny_model(), places(config), {"n": 24 * GIB}) == (settled, [])
    monkeypatch.setattr("async_grpo.learner.drafts.host_bytes", lambda: 1)
    cpu = Config.model_validate(config.model_dump() | {"cluster": {"device": "cpu"}})
    settled, [line] = look_at_memory(cpu, tiny_model(), places(cpu, "shared_memory"), {})
    assert settled.learner.tokens_per_micro_batch == cpu.rollout.longest_row == 1024
    assert settled.learner.gradient_checkpointing is True and "the least there is" in line


def test_the_memory_of_a_container_counts_where_it_has_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "_CGROUP", tmp_path)
    machine = drafts.host_bytes()
    for limit, counted in (("max", machine), (f"{10**15}", machine), (f"{3 * 2**20}", 3 * 2**20)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert drafts.host_bytes() == counted
    assert machine > drafts.host_bytes()


def test_what_cannot_fit_is_refused_with_the_arithmetic() -> None:
    config = config_of()
    with pytest.raises(SetupError, match=r"a learner rank needs about 1\.\d GiB and a GPU has 1.0"):
        look_at_memory(config, tiny_model(), places(config), {"n": GIB})
    small = config_of(gpu_memory_utilization=0.1)
    with pytest.raises(SetupError, match=r"an engine needs at least 3.0 GiB .* and has 2.4 GiB"):
        look_at_memory(small, tiny_model(), places(small), {"n": 24 * GIB})


class Driver:
    """NVIDIA's management library, of a machine with these GPUs."""

    NVMLError = session.pynvml.NVMLError

    def __init__(self, *sizes: int, fails: bool = False) -> None:
        self._sizes, self._fails = sizes, fails

    def nvmlInit(self) -> None:
        if self._fails:
            raise self.NVMLError(1)

    def nvmlDeviceGetCount(self) -> int:
        return len(self._sizes)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=self._sizes[handle])


@pytest.mark.parametrize(
    ("driver", "found"),
    [
        (lambda: Driver(80 * GIB, 24 * GIB), 24 * GIB),
        (lambda: Driver(), None),
        (lambda: Driver(1, fails=True), None),
    ],
)
def test_the_smallest_gpu_counts(
    monkeypatch: pytest.MonkeyPatch, driver: Callable[[], Driver], found: int | None
) -> None:
    monkeypatch.setattr(session, "pynvml", driver())
    assert gpu_bytes() == found


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"cluster": {"engine": {"vllm": {"speculative_config": {}}}}}, "speculative decoding"),
        ({"model": {"path": "m", "dtype": "bfloat16"}, "learner": {"zero_stage": 0}}, "bfloat16"),
        ({"cluster": {"device": "cuda"}}, "the run asks for 1 learner rank with a GPU"),
    ],
)
def test_what_this_machine_cannot_run_with_is_refused_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], says: str
) -> None:
    base: dict[str, Any] = {"run": {"total_steps": 1}, "model": {"path": "m"}}
    config = Config.model_validate(base | settings)
    monkeypatch.setattr(session, "_gpus", lambda: 0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SetupError, match=says):
        check_device(config)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_device(config)  # the cluster may have GPUs
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(session, "_gpus", lambda: 2)
    check_device(config)
