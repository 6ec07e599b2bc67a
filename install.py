"""Makes `.venv` with everything that async_grpo needs, or returns at once when nothing changed. The
Makefile runs it.

Runs in: the machine's own Python, standard library only. It hides which package set fits the
machine (CUDA or CPU), where the CPU build of torch comes from, and that uv, which resolves the
packages, does not read pip's configuration. Invariants: the stamp in `.venv` names the packages
only after a complete installation; an environment holds one set, and a change of set starts an
empty environment; each error is one sentence that says what to do.
"""

import sys

PYTHONS = ((3, 11), (3, 12), (3, 13))


def check_python(version: tuple) -> None:
    """Return for a supported Python; otherwise start this program again with one from PATH, or exit
    with a sentence.
    """
    import os
    import shutil
    import subprocess

    if tuple(version[:2]) in PYTHONS:
        return
    for major, minor in PYTHONS:
        other = shutil.which(f"python{major}.{minor}")
        # A name on PATH may be a shim that starts nothing, so the candidate has to answer.
        if (
            other
            and subprocess.call([other, "-c", "import venv"], stderr=subprocess.DEVNULL, timeout=60)
            == 0
        ):
            os.execv(other, [other, *sys.argv])
    found = f"{version[0]}.{version[1]}"
    sys.exit(
        f"async_grpo needs Python 3.11, 3.12 or 3.13, and this is Python {found}: make "
        "install PYTHON=/path/to/python3.12"
    )


# Before anything that an older Python cannot load, so that it too gives the sentence above.
check_python(sys.version_info)

import argparse
import ast
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sysconfig
import threading
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "async_grpo.stamp"
EXTRAS = "tasks,agents,trackers,storage,tune,real,dev"
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
FREE_GB = {"cpu": 6, "gpu": 16}
PROBE_SECONDS = 180
INSTALL_SECONDS = 3600
LEAST_DRIVER = {"12": "525", "13": "580"}
"""First NVIDIA driver that runs programs of a CUDA version, by NVIDIA's table of compatibility."""

NETWORK = (
    r"dns error|error sending request|Failed to fetch|[Cc]onnection "
    r"(refused|reset|error|broken)|NewConnectionError|ProxyError|timed out"
)
KNOWN_ERRORS = (
    (
        NETWORK + "|from versions: none",
        "a package source could not be reached: check the network, or the proxy and index "
        "settings that `pip config list` shows",
    ),
    (
        r"No space left on device|os error 28",
        "the disk is full: free space, or move the checkout to a larger disk",
    ),
    (
        r"(gcc|cc|c\+\+|g\+\+)['\"`]? failed|unable to execute|No such file or directory: "
        r"'(gcc|cc)'|CompileError",
        "a package has to be compiled and no working C compiler was found: install one "
        "(Debian, Ubuntu: apt install build-essential)",
    ),
    (
        r"No solution found|ResolutionImpossible|No matching distribution",
        "the package sources of this machine do not offer a fitting set of the packages "
        "in packages.toml: the lines above name the package",
    ),
    (r"[Pp]ermission denied", "a file may not be written: check who owns the checkout and .venv"),
)


class InstallError(Exception):
    """One sentence for the user: what is wrong and what to do."""


@dataclass(frozen=True)
class Sources:
    """Where packages come from, as pip is configured; empty means PyPI alone."""

    index: str | None = None
    extra_indexes: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    trusted_hosts: tuple[str, ...] = ()
    certificate: str | None = None

    def environment(self) -> dict[str, str]:
        """The same sources as uv's variables; variables (not arguments), so that passwords in an
        address stay out of process lists.

        What the user set for uv comes first. pip takes the best version over all indexes, uv the
        first index that knows a name; uv is told to do as pip does, because the sources were
        written for pip.
        """
        env = dict(os.environ)
        if self.index and not env.keys() & {"UV_DEFAULT_INDEX", "UV_INDEX_URL"}:
            env["UV_DEFAULT_INDEX"] = self.index
        for name, values, separator in (
            ("UV_EXTRA_INDEX_URL", self.extra_indexes, " "),
            ("UV_FIND_LINKS", self.find_links, ","),
            ("UV_INSECURE_HOST", self.trusted_hosts, " "),
        ):
            if values:
                env[name] = separator.join(filter(None, (env.get(name, ""), *values)))
        if self.no_index:
            env["UV_NO_INDEX"] = "1"
        if self.certificate:
            env.setdefault("SSL_CERT_FILE", self.certificate)
        env.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
        env.setdefault("UV_HTTP_TIMEOUT", "120")
        return env


@dataclass(frozen=True)
class Answer:
    """What the resolver would take for one requirement: the version, or None and why not."""

    version: str | None
    output: str = ""


def parse_pip_config(listing: str) -> Sources:
    """Sources out of `pip config list`, whose lines are `section.key='value'`.

    pip's order of precedence: `:env:` over a command's own section over `global`. Addresses that
    add up are united over all sections.
    """
    sections = {"global": 0, "install": 1, ":env:": 2}
    lines = [
        m.groups()
        for m in re.finditer(r"^(global|install|:env:)\.([a-z-]+)=(.*)$", listing, re.MULTILINE)
    ]
    settings = [
        (key, ast.literal_eval(value))
        for _, key, value in sorted(lines, key=lambda line: sections[line[0]])
    ]

    def united(key: str) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(word for name, value in settings if name == key for word in value.split())
        )

    last = dict(settings)
    return Sources(
        index=last.get("index-url"),
        extra_indexes=united("extra-index-url"),
        find_links=tuple(os.path.expanduser(place) for place in united("find-links")),
        no_index=last.get("no-index", "").lower() in ("1", "true", "yes", "on"),
        trusted_hosts=united("trusted-host"),
        certificate=last.get("cert"),
    )


def choose_sources(
    kind: str, configured: Sources, pins: dict, probe: Callable[[str, Sources], Answer]
) -> Sources:
    """Sources that give the torch build of this set; `probe(requirement, sources)` asks the
    resolver.

    CPU: what the machine is configured with and, only if that lacks the CPU build, PyTorch's own
    index in addition. GPU: a local version such as 2.13.0+cpu sorts above PyPI's CUDA build, so
    find-links that hold one are left out.
    """
    index = pins["installer"]["cpu_torch_index"]
    if kind == "cpu":
        wanted = pins["installer"]["cpu_torch"]
        answer = probe(wanted, configured)
        if answer.version:
            return configured
        print(
            f"      {wanted} is not in the configured package sources; asking {index} as well",
            flush=True,
        )
        extended = replace(configured, extra_indexes=(*configured.extra_indexes, index))
        answer = probe(wanted, extended)
        if answer.version:
            return extended
        why = (
            "which cannot be reached from here"
            if re.search(NETWORK, answer.output)
            else "for this Python and processor"
        )
        raise InstallError(
            f"{wanted} is neither in the configured package sources nor at {index}, {why}: "
            "download its wheel elsewhere and run `pip config set global.find-links "
            "/folder/of/the/wheel`"
        )
    wanted = next(line for line in pins["base"] if line.startswith("torch=="))
    for sources in (configured, replace(configured, find_links=())):
        answer = probe(wanted, sources)
        if not answer.version:
            raise InstallError(explain(answer.output))
        if "+cpu" not in answer.version:
            return sources
    raise InstallError(
        f"the configured package sources give a CPU build for {wanted}: remove it from "
        "them, or make install SET=cpu"
    )


def explain(output: str) -> str:
    """One sentence for the output of a failed command."""
    for pattern, sentence in KNOWN_ERRORS:
        if re.search(pattern, output):
            return sentence
    last = next(
        (line.strip() for line in reversed(output.splitlines()) if line.strip()), "no output"
    )
    return f"the installation stopped with: {last}"


def detect() -> str:
    """`gpu` where an NVIDIA driver shows a GPU, else `cpu`."""
    if any(DRIVER_GPUS.glob("*")):
        return "gpu"
    smi = shutil.which("nvidia-smi") or "/usr/lib/wsl/lib/nvidia-smi"
    if not os.access(smi, os.X_OK):
        return "cpu"
    answer = subprocess.run([smi, "-L"], check=False, capture_output=True, text=True, timeout=60)
    return "gpu" if answer.returncode == 0 and "GPU " in answer.stdout else "cpu"


def can_compile() -> bool:
    """Whether a C extension can be built: a compiler and Python's headers."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return headers.exists() and bool(shutil.which("cc") or shutil.which("gcc"))


def compiler_hint() -> str:
    """What to install so that `can_compile` becomes true."""
    return (
        "install them (Debian, Ubuntu: apt install build-essential "
        f"python{sys.version_info[0]}.{sys.version_info[1]}-dev) and repeat"
    )


def state(kind: str) -> dict[str, str]:
    """What the stamp records: another value of any entry means that the environment is not the
    wanted one.
    """
    digest = hashlib.sha256(
        b"".join((ROOT / name).read_bytes() for name in ("packages.toml", "setup.py"))
    )
    return {
        "set": kind,
        "root": str(ROOT),
        "compiler": "yes" if can_compile() else "no",
        "packages": digest.hexdigest(),
    }


def installed() -> dict[str, str]:
    """The stamp of `.venv`, in which `packages` is empty until an installation is complete; {}
    without a stamp or a working Python.
    """
    return json.loads(STAMP.read_text()) if STAMP.exists() and PYTHON.exists() else {}


def resolve_set(wanted: str) -> str:
    """The set to use: an explicit one, else the one that `.venv` has, else the one that fits the
    machine.
    """
    return wanted if wanted != "auto" else installed().get("set") or detect()


def run(command: list[str], *, env: dict[str, str], deadline_s: float) -> None:
    """Run a command and pass its lines on as they come, without the list of single packages; raise
    InstallError if it fails.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    timer = threading.Timer(deadline_s, process.kill)
    timer.start()
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if not re.match(r" [+~-] \S+==", line):
            print("      " + line.rstrip(), flush=True)
    code = process.wait()
    timed_out = not timer.is_alive()
    timer.cancel()
    if code:
        raise InstallError(
            f"gave up after {deadline_s:.0f} s: try again" if timed_out else explain("".join(lines))
        )


def make_venv(kind: str) -> None:
    """An environment with this Python, emptied first when it belongs to another set or another
    place; a foreign one is adopted.
    """
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise InstallError(
                f"this Python has no {module} module: install it (Debian, Ubuntu: apt "
                f"install python{version}-venv)"
            )
    if shutil.disk_usage(ROOT).free < FREE_GB[kind] * 1e9:
        raise InstallError(
            f"the {kind} packages need {FREE_GB[kind]} GB and {ROOT} has less: free space, "
            "or move the checkout"
        )
    if kind == "gpu" and not can_compile():
        raise InstallError(
            f"Triton compiles GPU kernels at run time and needs gcc and Python.h: {compiler_hint()}"
        )
    before, now = installed(), state(kind)
    place, foreign = VENV.resolve(), before.get("root", now["root"]) != now["root"]
    if VENV.is_symlink() and foreign:
        raise InstallError(
            f".venv is a link to {place}, the environment of {before['root']}: remove the link"
        )
    # pip comes last when an environment is made: without it the making was interrupted.
    usable = PYTHON.exists() and (VENV / "bin" / "pip").exists()
    if not usable or (before and (before["set"], before["root"]) != (now["set"], now["root"])):
        # Not sys.executable: that may be the Python inside the very environment that is emptied
        # here.
        base = Path(sys.base_prefix) / "bin" / f"python{version}"
        run(
            [str(base if base.exists() else sys.executable), "-m", "venv", "--clear", str(place)],
            env=dict(os.environ),
            deadline_s=300,
        )
    STAMP.write_text(json.dumps({**now, "packages": ""}))


def probe_with_uv(requirement: str, sources: Sources) -> Answer:
    """Ask uv which version of one requirement it would take for `.venv`; nothing is downloaded but
    index pages.
    """
    options = ["--no-deps", "--no-header", "--no-annotate", "--quiet", "--python", str(PYTHON)]
    command = [str(VENV / "bin" / "uv"), "pip", "compile", *options, "-"]
    done = subprocess.run(
        command,
        check=False,
        input=requirement,
        env=sources.environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROBE_SECONDS,
    )
    found = (
        re.search(r"^[\w.-]+==(\S+)", done.stdout, re.MULTILINE) if done.returncode == 0 else None
    )
    return Answer(version=found and found[1], output=done.stderr)


def install_packages(kind: str, pins: dict, sources: Sources) -> None:
    """All packages in one call of the resolver, async_grpo itself editable."""
    command = [
        str(VENV / "bin" / "uv"),
        "pip",
        "install",
        "--python",
        str(PYTHON),
        "-e",
        f".[{kind},{EXTRAS}]",
    ]
    left_out = list(pins["installer"]["leave_out"])
    left_out += pins["installer"]["cpu_leave_out"] if kind == "cpu" else []
    if not can_compile():
        left_out += pins["installer"]["needs_compiler"]
        names = ", ".join(pins["installer"]["needs_compiler"])
        print(f"      without {names}, which needs gcc and Python.h: {compiler_hint()}", flush=True)
    # A marker that is never true removes a package from the resolution; a constraint could not.
    overrides = VENV / "overrides.txt"
    overrides.write_text("".join(f'{name} ; python_version < "3"\n' for name in left_out))
    command += ["--override", str(overrides)]
    run(command, env=sources.environment(), deadline_s=INSTALL_SECONDS)


def check(kind: str, *, no_gpu: bool = False) -> None:
    """Load torch, for the gpu set also touch a GPU, and say what it sees: devices are counted
    without the driver's help, so a count says nothing about a driver that is too old. no_gpu: the
    GPU is another machine's.
    """
    touch = "; torch.zeros(1, device='cuda') if torch.cuda.device_count() else 0"
    code = (
        "import torch; print('torch', torch.__version__, torch.version.cuda or 'CPU', "
        f"torch.cuda.device_count(), flush=True){touch if kind == 'gpu' else ''}"
    )
    done = subprocess.run(
        [str(PYTHON), "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    seen = re.search(r"^torch (\S+) (\S+) (\d+)$", done.stdout, re.MULTILINE)
    last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no output"
    if not seen:
        raise InstallError(f"torch does not load: {last}; make clean, then make install")
    version, cuda, gpus = seen.groups()
    print(
        f"      torch {version}, " + (f"CUDA {cuda}, {gpus} GPU(s)" if kind == "gpu" else "CPU"),
        flush=True,
    )
    if kind == "gpu" and not no_gpu and (done.returncode or gpus == "0"):
        least = LEAST_DRIVER.get(cuda.partition(".")[0])
        driver = f"NVIDIA driver {least} or newer" if least else "a newer NVIDIA driver"
        what = f"cannot use a GPU ({last})" if done.returncode else "sees no GPU"
        raise InstallError(
            f"torch {what}: the packages are built for CUDA {cuda}, which needs {driver} "
            "(`nvidia-smi` shows yours): update it, or make install SET=cpu"
        )
    if done.returncode:
        raise InstallError(f"torch does not load: {last}; make clean, then make install")


def install(kind: str, *, no_gpu: bool = False) -> None:
    """Bring `.venv` to the wanted set. Errors: InstallError, after which a repeated call goes on
    where this one stopped.
    """
    start = time.monotonic()
    pins = tomllib.loads((ROOT / "packages.toml").read_text(encoding="utf-8"))
    print(f"[1/4] {VENV} for the {kind} packages", flush=True)
    if kind == "cpu" and detect() == "gpu":
        print(
            "      this machine has an NVIDIA GPU: `make install SET=gpu` would use it", flush=True
        )
    make_venv(kind)
    print("[2/4] resolver", flush=True)
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", pins["installer"]["uv"]], env=dict(os.environ), deadline_s=600)
    listing = subprocess.run(
        [*pip, "config", "list"], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    ).stdout
    sources = choose_sources(kind, parse_pip_config(listing), pins, probe_with_uv)
    print(
        "[3/4] packages: about 4 GB (CPU) or 10 GB (GPU), which takes minutes the first time",
        flush=True,
    )
    install_packages(kind, pins, sources)
    print("[4/4] check", flush=True)
    check(kind, no_gpu=no_gpu)
    STAMP.write_text(json.dumps(state(kind)))
    print(f"Installed in {time.monotonic() - start:.0f} s.", flush=True)


def light_packages() -> list[str]:
    """Requirements of an environment without torch, on a Python for which there is none."""
    pins = tomllib.loads((ROOT / "packages.toml").read_text(encoding="utf-8"))
    made_on_torch = re.compile(rf"({'|'.join(pins['installer']['made_on_torch'])})\b")
    names = [
        *pins["base"],
        *(name for extra in EXTRAS.split(",") for name in pins["extras"][extra]),
    ]
    return [name for name in names if not made_on_torch.match(name)]


def main() -> int:
    """Exit code 0 with a complete `.venv`, 1 with one sentence on stderr otherwise."""
    parser = argparse.ArgumentParser(
        description="Make .venv with everything that async_grpo needs."
    )
    parser.add_argument(
        "--set",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="package set; auto keeps that of an existing .venv",
    )
    parser.add_argument(
        "--which", action="store_true", help="only print the set that would be used"
    )
    parser.add_argument(
        "--light",
        action="store_true",
        help="only print the packages of the tests that need no torch",
    )
    parser.add_argument(
        "--no-gpu", action="store_true", help="install without a GPU, as when an image is built"
    )
    args = parser.parse_args()
    try:
        kind = resolve_set(args.set)
        if args.which:
            print(kind)
        elif args.light:
            print(*light_packages(), sep="\n")
        elif sys.platform != "linux":
            raise InstallError(
                "vLLM's packages exist for Linux only: use a Linux machine, WSL or a container"
            )
        elif installed() != state(kind):
            install(kind, no_gpu=args.no_gpu)
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.TimeoutExpired as error:
        name = Path(error.cmd[0]).name
        print(
            f"error: {name} gave no answer within {error.timeout:.0f} s: check the network "
            "and try again",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; the same command goes on from here", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
