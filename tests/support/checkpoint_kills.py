"""Processes that are killed while they save a checkpoint. Run by test_saving.

    python -m tests.support.checkpoint_kills DIRECTORY POINTS     kills at so many points of each
                                                                  case, spread evenly; prints what
                                                                  it saw as JSON

A point is an access to a file of the run or of its draft (audit events of the interpreter). Cases:
`later`, a checkpoint of step 1 is complete and that of step 2 is being written; `again`, that of
step 1 is being replaced. Every broken rule is an AssertionError.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed  # noqa: F401 - before the forks, which would import it once each

from async_grpo.learner import drafts
from async_grpo.run.checkpoint import directory as checkpoint
from tests.support.listener import RecordingListener
from tests.support.savers import BytesLearner, OneRank, join_alone, make_saver

KEY = "testkills"
WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir"}


def in_child(work, *arguments) -> int:
    """Run `work` in a forked process; its wait status."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            work(*arguments)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def save(run_dir: Path, step: int, keep: int = 2) -> None:
    async def live() -> None:
        await make_saver(run_dir, RecordingListener(), keep=keep).save(
            OneRank(BytesLearner(), key=KEY), step=step, facts={}, forget=False, wait=True
        )

    join_alone(run_dir)
    asyncio.run(live())


def save_and_die(run_dir: Path, step: int, point: int) -> None:
    """Save, and be killed at this access; without dying, their number is left in a file."""
    seen = 0

    def watch(event: str, arguments: tuple) -> None:
        nonlocal seen
        if (
            event in WATCHED
            and isinstance(arguments[0], str | os.PathLike)
            and _ours(run_dir, os.fspath(arguments[0]))
        ):
            seen += 1
            if seen == point:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    save(run_dir, step)
    Path(f"{run_dir}.points").write_text(str(seen))


def _ours(run_dir: Path, path: str) -> bool:
    return path.startswith(
        (str(run_dir / "checkpoints"), str(drafts.SEGMENT_DIR / f"async_grpo-{KEY}"))
    )


def kill_at(home: Path, case: str, point: int) -> int:
    """One kill and what comes after it; the step that the next start finds."""
    run_dir = home / f"{case}-{point}"
    run_dir.mkdir()
    assert in_child(save, run_dir, 1) == 0
    first = json.loads((checkpoint.path_for(run_dir, 1) / checkpoint.MANIFEST).read_text())["files"]
    status = in_child(save_and_die, run_dir, 2 if case == "later" else 1, point)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (
        f"{case} {point} was not killed: {status}"
    )
    final = checkpoint.path_for(run_dir, 2)
    there = final.exists()
    found = checkpoint.latest(run_dir)
    assert found.with_suffix("") == (final if there else checkpoint.path_for(run_dir, 1)), (
        f"{case} {point}: {found}"
    )
    manifest = checkpoint.verify(found)
    step = manifest["step"]
    assert in_child(save, run_dir, 3, 1) == 0
    assert checkpoint.steps(run_dir) == [3] and [
        path.name for path in (run_dir / "checkpoints").iterdir()
    ] == ["step_000003"]
    assert not list(drafts.SEGMENT_DIR.glob(f"async_grpo-{KEY}-*"))
    return step if case == "later" else int(manifest["files"] != first) + 1


def main(home: Path, points: int) -> None:
    report = {}
    for case in ("later", "again"):
        run_dir = home / case
        run_dir.mkdir()
        assert in_child(save, run_dir, 1) == 0
        assert in_child(save_and_die, run_dir, 2 if case == "later" else 1, -1) == 0
        total = int(Path(f"{run_dir}.points").read_text())
        chosen = sorted({1 + round(k * (total - 1) / max(points - 1, 1)) for k in range(points)})
        report[case] = {
            "accesses": total,
            "found": {point: kill_at(home, case, point) for point in chosen},
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
