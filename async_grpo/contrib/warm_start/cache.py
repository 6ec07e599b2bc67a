"""A small model that already knows the task a little, for RL to sharpen: built once, then cached.

Runs in: the driver (`ensure_warm_start`, without torch when the model is cached) and its child
(`warm_start`, with all cores as torch threads), which keeps the driver small. Hides the child, and
where models are kept and under which key; `model` hides how the model is taught.

Invariants: a directory under its final name is complete; two processes that build the same model
end with one of the two, equal in all that matters; the key covers everything that the weights
depend on.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from async_grpo.config.schema import Config, WarmStart
from async_grpo.environments.base import HasPlayers
from async_grpo.errors import SetupError
from async_grpo.runtime.lifetime import die_with_parent
from async_grpo.tasks.base import Problem, Problems
from async_grpo.tasks.mixture import load_tasks
from async_grpo.tasks.registry import problem_index

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=%^()<>[]{}.,:;?!'\"_ \n"
"""The characters that a warm-started model knows, each a token."""
Pair = tuple[str, str | tuple[str, ...]]
"""Prompt and solution: a text, or what policy and environment say in turn."""
RECIPE_VERSION = 3
"""Raised whenever the same settings would lead to other weights."""

_REPORT = "warm_start.json"
_PROGRESS, _REFUSED = "progress: ", "refused: "
"""Begin the lines of the child that are for the user; `_REFUSED` is its last one."""
_LAST_LINES = 15
TIMEOUT_S = 1800.0
POLL_S = 0.2
"""How often somebody who waits for the child looks whether to go on."""


class WarmStartError(SetupError):
    """The model could not be built; the message ends with what the child process printed last."""


def ensure_warm_start(
    config: Config,
    *,
    progress: Callable[[str], None],
    timeout_s: float = TIMEOUT_S,
    check: Callable[[], None] = lambda: None,
) -> str:
    """Directory of the warm-started model, cached or built by a child within `timeout_s`;
    `progress` gets lines, and what `check` raises ends the child. Raises TaskError, and
    WarmStartError if the child failed or took too long.
    """
    directory = cache_path(config, load_tasks(config))
    if is_cached(directory):
        progress(f"warm start: the model is there already, in {directory}")
        return str(directory)
    _run_child(config, progress, timeout_s, check)
    if not is_cached(directory):
        raise WarmStartError(
            f"the warm start ended without a model in {directory}; is something deleting "
            "files there?"
        )
    return str(directory)


def warm_start(config: Config, *, progress: Callable[[str], None], draft_of: str = "") -> str:
    """Directory with a Qwen2 model (safetensors, float32), its tokenizer and `warm_start.json`
    (what was done), built in this process unless cached. `draft_of` is in the name of the draft's
    directory, for whoever ends this process. Raises ValueError if the task has no solutions or uses
    characters that the model does not know.
    """
    settings = _settings(config)
    task = load_tasks(config)
    directory = cache_path(config, task)
    if is_cached(directory):
        return str(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    from async_grpo.contrib.warm_start import model as warm_start_model

    draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}-{draft_of}-", dir=directory.parent))
    try:
        report = warm_start_model.train(
            settings,
            seed=config.seed,
            batch=lambda start, count: _pairs(config.seed, task, start, count),
            progress=progress,
            out=draft,
        )
        (draft / _REPORT).write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
        draft.chmod(0o755)
        _publish(draft, directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # still there only after an error or a lost race
    progress(
        f"warm start: built a model in {report.clean_steps} + {report.blur_steps} supervised steps "
        f"({report.seconds:.0f} s): "
        f"greedy accuracy {report.blurred.greedy:.0%}, sampled {report.blurred.sampled:.0%}"
    )
    return str(directory)


def cache_path(config: Config, task: Problems) -> Path:
    """Directory that the model of this configuration and task has in the cache."""
    settings, posed = _settings(config), task.posed if isinstance(task, HasPlayers) else config.task
    key = {
        "recipe": RECIPE_VERSION,
        "settings": settings.model_dump(mode="json", exclude={"cache_dir"}),
        "seed": config.seed,
        "task": posed.name,
        "train": posed.train,
        "options": posed.options,
        "fingerprint": task.fingerprint,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:20]
    return _cache(config) / digest


def _cache(config: Config) -> Path:
    return Path(_settings(config).cache_dir).expanduser().absolute() / "warm_start"


def is_cached(directory: Path) -> bool:
    """Whether this directory of the cache holds a finished model."""
    return (directory / _REPORT).is_file()


def _settings(config: Config) -> WarmStart:
    if config.model.warm_start is None:
        raise ValueError("model.warm_start is not set; there is nothing to warm-start")
    return config.model.warm_start


def _pairs(seed: int, task: Problems, start: int, count: int) -> list[Pair]:
    """Training pairs at these positions of an order that RL's order of problems does not follow."""
    pairs = []
    for position in range(start, start + count):
        index = problem_index(seed, f"{task.fingerprint} warm start", position, len(task))
        problem = task.train(index)
        if not isinstance(problem.prompt, str) or problem.solution is None:
            raise ValueError(unfit(problem))
        pairs.append((problem.prompt, problem.solution))
    return pairs


def unfit(problem: Problem) -> str:
    """Why a model cannot be warm-started on this problem; "" where it can."""
    prompt, solution = problem.prompt, problem.solution
    if isinstance(prompt, str) and solution is not None:
        text = prompt + "".join(solution)
        return next((unknown(letter) for letter in text if letter not in ALPHABET), "")
    lack = "solutions" if isinstance(prompt, str) else "plain-text prompts"
    return (
        f"the task has no {lack}, which model.warm_start needs: give its problems a text as prompt "
        "and a solution (docs/how-to/data.md), or set model.path to your own model "
        "and model.warm_start=null"
    )


def unknown(character: str) -> str:
    """Say that a warm-started model has no token for `character`."""
    return (
        f"the task uses the character {character!r}, which a warm-started model does not know; "
        f"set model.path, or use only {ALPHABET!r}"
    )


def _publish(draft: Path, directory: Path) -> None:
    try:
        os.replace(draft, directory)
    except OSError:
        # A directory that is not empty cannot be replaced: another process was faster with the same
        # model.
        if not is_cached(directory):
            raise


def _run_child(
    config: Config, progress: Callable[[str], None], timeout_s: float, check: Callable[[], None]
) -> None:
    """Run this module as a process until the deadline at most, with all cores in OMP_NUM_THREADS:
    the caller's value is for processes that share the machine, and nothing else runs now.
    """
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    threads = str(len(os.sched_getaffinity(0)))
    deadline, token = time.monotonic() + timeout_s, uuid.uuid4().hex
    child = subprocess.Popen(
        [sys.executable, "-m", "async_grpo.contrib.warm_start.cache", token],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # a signal to the process group is for the run, which ends it
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads},
    )
    assert child.stdin is not None and child.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(
        target=_read_lines, args=(child.stdout, lines), name="warm-start-output", daemon=True
    )
    last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
    try:
        reader.start()
        try:
            child.stdin.write(config.model_dump_json())
            child.stdin.close()
        except BrokenPipeError:
            last.append("(the process ended before it read its settings)")
        while (line := _next_line(lines, deadline, check)) is not None:
            if line.startswith(_PROGRESS):
                progress(line.removeprefix(_PROGRESS))
            elif line.startswith(_REFUSED):
                raise WarmStartError(line.removeprefix(_REFUSED))
            else:
                last.append(line)
        code = child.wait(max(0.1, deadline - time.monotonic()))
    except (queue.Empty, subprocess.TimeoutExpired) as error:
        raise WarmStartError(
            f"the warm start took longer than {timeout_s:.0f} s; lower "
            f"model.warm_start.max_steps{_tail(last)}"
        ) from error
    finally:
        child.kill()
        child.wait()
        for draft in _cache(config).glob(f"*-{token}-*"):
            shutil.rmtree(draft, ignore_errors=True)  # of a child that was ended here
    if code != 0:
        raise WarmStartError(f"the warm start failed with exit code {code}{_tail(last)}")


def _next_line(
    lines: queue.Queue[str | None], deadline: float, check: Callable[[], None]
) -> str | None:
    """Return the child's next line, None at its end. Raises queue.Empty at the deadline."""
    while True:
        check()
        left = deadline - time.monotonic()
        try:
            return lines.get(timeout=max(0.0, min(left, POLL_S)))
        except queue.Empty:
            if left <= POLL_S:
                raise


def _read_lines(stream: TextIO, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _tail(last: collections.deque[str]) -> str:
    return f"; its last lines:\n{chr(10).join(last)}" if last else ""


def main() -> None:
    """Run the child: configuration as JSON on standard input, progress lines on standard output."""
    die_with_parent()
    config = Config.model_validate_json(sys.stdin.read())
    try:
        warm_start(
            config,
            progress=lambda text: print(f"{_PROGRESS}{text}", flush=True),
            draft_of=sys.argv[1],
        )
    except ValueError as error:  # the task does not fit: nothing that a traceback would explain
        print(f"{_REFUSED}{' '.join(str(error).split())}", flush=True)


if __name__ == "__main__":
    main()
