"""Why a run ended badly: what is left of it is looked at before it is taken down, and written into
the run's directory.

Runs in: the driver, in plain threads: it does not need the event loop, which may be what is stuck.
Layout of a bundle:

    <run dir>/post_mortem/<UTC time>-<reason>/   summary.txt  summary.json  stacks/<role>-<pid>.txt
                                                 logs/<role>-<pid>-<file>

Invariants: it takes at most LIMIT_S seconds; every part is asked on its own, and one that does not
answer is named; nothing here raises; nobody is asked to do anything but answer.
"""

from __future__ import annotations

import json
import platform
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.cluster.examination import other_nodes, queue_of, status_of, why
from async_grpo.observe import diagnosis, evidence
from async_grpo.runtime.provenance import package_versions

if TYPE_CHECKING:
    from async_grpo.cluster.learner_group import LearnerGroup
    from async_grpo.cluster.rollout_actors import ActorManager
    from async_grpo.cluster.session import RaySession
    from async_grpo.run.loop import Loop

REASONS = {1: "error", 4: "faults", 5: "stall", 6: "numbers"}
"""Exit codes that leave a bundle, with the end of its name."""
LIMIT_S = 10.0


@dataclass
class Scene:
    """The parts of a run, as far as they were started. `queue`: Ray handle."""

    session: RaySession | None = None
    queue: Any = None
    actors: ActorManager | None = None
    learner: LearnerGroup | None = None
    loop: Loop | None = None


def write(
    run_dir: str | Path, scene: Scene, *, code: int, meaning: str, message: str
) -> tuple[str, Path | None]:
    """Look at everything and write the bundle. Returns a line on what the run was doing and who is
    to blame, if known; and the bundle, if written.
    """
    facts: dict[str, Any] = {
        "exit_code": code,
        "meaning": meaning,
        "error": message,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        facts |= _look(str(run_dir), scene)
        facts["where"], facts["findings"] = diagnosis.conclude(facts)
    except Exception as error:  # noqa: BLE001 - the run ends for another reason, which must be told
        facts["where"] = f"(the post-mortem itself failed: {type(error).__name__}: {error})"
    try:
        return facts["where"], _write(Path(run_dir), facts, REASONS[code])
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{facts['where']} (the post-mortem could not be written: {error})", None


def _look(run_dir: str, scene: Scene) -> dict[str, Any]:
    """Everything at once, each part within its own deadline."""
    parts: dict[str, Callable[[], Any]] = {
        "nodes": lambda: [evidence.gather(run_dir)],
        "versions": _versions,
    }
    actors, loop, session = scene.actors, scene.loop, scene.session
    engines = [] if actors is None else list(actors.processes())
    if session is not None:
        parts["other_nodes"] = partial(other_nodes, session, run_dir, limit_s=LIMIT_S - 2)
        if scene.queue is not None:
            parts["queue"] = lambda: queue_of(scene.queue)
        for engine in engines:
            parts[f"actor {engine.actor_id}"] = partial(status_of, engine.handle)
        if scene.learner is not None:
            parts["learner"] = scene.learner.calls.status
    told, silent = _all(parts)
    nodes = told.pop("nodes", [])
    hosts = {node["host"] for node in nodes}
    nodes += [node for node in told.pop("other_nodes", []) if node["host"] not in hosts]
    alive = set() if actors is None else {engine.actor_id for engine in actors.alive()}
    return {
        "phase": "starting" if loop is None else loop.phase,
        "steps_done": None if loop is None else loop.steps_done,
        "silent": silent,
        "versions": told.get("versions", {}),
        "queue": told.get("queue"),
        "learner": told.get("learner", []),
        "nodes": nodes,
        "actors": {
            engine.actor_id: {
                "serving_set": engine.actor_id in alive,
                "acknowledged": engine.acknowledged,
                "status": told.get(f"actor {engine.actor_id}"),
            }
            for engine in engines
        },
        "deaths": [] if actors is None else actors.deaths[-20:],
        "dropped": {} if actors is None else actors.examined,
    }


def _all(parts: dict[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Results by part, and why the others have none."""
    told: dict[str, Any] = {}
    failed: dict[str, str] = {}

    def do(name: str, work: Callable[[], Any]) -> None:
        try:
            told[name] = work()
        except Exception as error:  # noqa: BLE001 - one part of many; it is named in the bundle
            failed[name] = why(error)

    threads = {
        name: threading.Thread(target=do, args=(name, work), daemon=True)
        for name, work in parts.items()
    }
    deadline = time.monotonic() + LIMIT_S
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    late, found = f"no answer within {LIMIT_S:g} s", dict(told)
    return found, {name: failed.get(name, late) for name in threads if name not in found}


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "system": platform.platform(),
        **package_versions(),
    }


def _write(run_dir: Path, facts: dict[str, Any], reason: str) -> Path:
    path = run_dir / "post_mortem" / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{reason}"
    for folder in ("stacks", "logs"):
        (path / folder).mkdir(parents=True, exist_ok=True)
    dropped = [(f"dropped-{actor_id}", seen) for actor_id, seen in facts.get("dropped", {}).items()]
    for prefix, seen in [*(("", node) for node in facts.get("nodes", [])), *dropped]:
        for process in seen.get("processes", []):
            name = "-".join(part for part in (prefix, process["role"], str(process["pid"])) if part)
            if text := process.pop("stacks"):
                (path / "stacks" / f"{name}.txt").write_text(text, encoding="utf-8")
            for file, text in process.pop("logs").items():
                if text:
                    (path / "logs" / f"{name}-{file}").write_text(text, encoding="utf-8")
    (path / "summary.txt").write_text(diagnosis.text(facts), encoding="utf-8")
    (path / "summary.json").write_text(json.dumps(facts, indent=1, default=str), encoding="utf-8")
    return path
