"""An environment with TRL, apart from the project's own: its pins move nothing of ours.

Runs in: the process of `benchmarks.vs_trl`. Hides how it is made: by the project's own resolver,
from the package sources that the machine is configured with. Invariants: nothing is installed into
the environment that runs this; the stamp is written after a complete installation; a directory that
is neither empty nor an environment is left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import install

PINS = Path(__file__).with_name("requirements.txt")
DEFAULT = Path("~/.cache/async_grpo/trl")
STAMP = "async_grpo.stamp"


class BadEnvironment(SystemExit):
    """One sentence: what is wrong with the place or the packages."""


def requirements() -> list[str]:
    """TRL's packages, and the build of torch for CPU that the project itself uses."""
    pins = tomllib.loads((install.ROOT / "packages.toml").read_text(encoding="utf-8"))
    lines = [
        line.partition("#")[0].strip() for line in PINS.read_text(encoding="utf-8").splitlines()
    ]
    return [pins["installer"]["cpu_torch"], *filter(None, lines)]


def wanted() -> dict[str, str]:
    """What the stamp says of a complete environment."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return {
        "python": version,
        "packages": hashlib.sha256("\n".join(requirements()).encode()).hexdigest(),
    }


def python_of(directory: Path) -> Path:
    """Its Python, without following links: that is what makes it another environment."""
    return directory / "bin" / "python"


def complete(directory: Path) -> bool:
    """Whether it is there as it should be."""
    stamp = directory / STAMP
    return (
        stamp.exists()
        and python_of(directory).exists()
        and json.loads(stamp.read_text(encoding="utf-8")) == wanted()
    )


def ensure(directory: Path) -> Path:
    """Its Python; the environment is made unless it is complete. Raises BadEnvironment."""
    directory = directory.expanduser().absolute()
    if complete(directory):
        return python_of(directory)
    if directory.resolve() in (Path(sys.prefix).resolve(), install.VENV.resolve()):
        raise BadEnvironment(
            f"{directory} is the project's own environment, which gets nothing of TRL: "
            "name another with --environment"
        )
    if directory.exists() and any(directory.iterdir()) and not (directory / "pyvenv.cfg").exists():
        raise BadEnvironment(
            f"{directory} holds something that is no Python environment: name another with "
            "--environment"
        )
    uv = install.VENV / "bin" / "uv"
    if not uv.exists():
        raise BadEnvironment(f"{uv} is missing: `make install` puts it there")
    print(f"making an environment with TRL in {directory}", file=sys.stderr, flush=True)
    try:
        install.run(
            [sys.executable, "-m", "venv", "--without-pip", "--clear", str(directory)],
            env=dict(os.environ),
            deadline_s=300,
        )
        listing = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        pins = tomllib.loads((install.ROOT / "packages.toml").read_text(encoding="utf-8"))
        sources = install.choose_sources(
            "cpu", install.parse_pip_config(listing), pins, install.probe_with_uv
        )
        command = [
            str(uv),
            "pip",
            "install",
            "--python",
            str(python_of(directory)),
            *requirements(),
        ]
        install.run(command, env=sources.environment(), deadline_s=install.INSTALL_SECONDS)
    except install.InstallError as error:
        raise BadEnvironment(f"error: {error}") from error
    (directory / STAMP).write_text(json.dumps(wanted()), encoding="utf-8")
    return python_of(directory)


def versions(python: Path) -> str:
    """The versions that matter, as the environment itself reports them."""
    code = (
        "from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in "
        "('trl', 'transformers', 'torch')))"
    )
    return subprocess.run(
        [str(python), "-I", "-c", code], capture_output=True, text=True, timeout=120, check=True
    ).stdout.strip()
