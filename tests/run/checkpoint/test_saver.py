"""Checkpoints beside training: order, a full disk, processes killed at any point; and ranks that
cannot write, or are other ones than before.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from async_grpo.errors import FaultBudgetSpent, SetupError
from async_grpo.learner import drafts
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.runtime import storage
from async_grpo.runtime.provenance import check_origin, code_version, tokenizer_fingerprint
from tests.support.listener import RecordingListener
from tests.support.models import write_model
from tests.support.savers import KEY, BytesLearner, OneRank, join_alone, make_saver

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    join_alone(tmp_path_factory.mktemp("group"))
    yield
    dist.destroy_process_group()
    assert not in_memory()


def in_memory() -> list[Path]:
    """Drafts of these tests."""
    return list(drafts.SEGMENT_DIR.glob(f"async_grpo-{KEY}-*"))


async def save(saver, parts: OneRank, step: int, *, wait: bool = True) -> Path:
    return await saver.save(parts, step=step, facts={"run_epoch": 0}, forget=True, wait=wait)


# -- beside training
# --------------------------------------------------------------------------------------------------


async def test_training_goes_on_while_a_checkpoint_is_brought_to_the_disk(tmp_path: Path) -> None:
    said, parts = RecordingListener(), OneRank(BytesLearner())
    saver = make_saver(tmp_path, said, keep=1)
    await save(saver, parts, 1)
    go = asyncio.Event()
    parts.before_finish = go.wait
    path = await asyncio.wait_for(save(saver, parts, 2, wait=False), 10)
    assert len(in_memory()) == 1, "it lies in memory meanwhile"
    assert not path.exists() and checkpoint.steps(tmp_path) == [1], (
        "nothing is pruned before the new one is complete"
    )
    assert parts.forgotten == [(1, 1)] and saver.saved_at == 1
    third = asyncio.create_task(save(saver, parts, 3, wait=False))
    await asyncio.sleep(0)
    assert parts.segment == 2, "the next one waits for it"
    go.set()
    await asyncio.wait_for(third, 10)
    await saver.wait()
    assert (
        checkpoint.steps(tmp_path) == [3]
        and parts.forgotten == [(1, 1), (2, 2), (3, 3)]
        and saver.saved_at == 3
    )
    assert not in_memory()
    assert [step for step, _ in said.metrics] == [1, 2, 3]
    assert all(
        metrics["checkpoint/failures"] == 0
        and metrics["time/checkpoint_stall_s"] <= metrics["checkpoint/seconds"]
        for _, metrics in said.metrics
    )
    assert said.text.count("training waited") == 1, "nobody waits for the others, and all is well"
    assert "room" not in said.text


async def test_the_manifest_says_where_a_checkpoint_comes_from(tmp_path: Path) -> None:
    path = await save(make_saver(tmp_path, RecordingListener()), OneRank(BytesLearner()), 7)
    manifest = checkpoint.verify(path)
    assert {
        key: manifest[key] for key in ("step", "policy_version", "updates", "run_epoch", "code")
    } == {"step": 7, "policy_version": 7, "updates": 12, "run_epoch": 0, "code": {}}
    assert set(manifest["files"]) == {
        "learner/state_0.pt",
        "learner/state_1.pt",
        "hf/model.safetensors",
        "hf/tokenizer.json",
        "queue.json",
    }
    (path / "learner" / "state_9.pt").write_text("a pickle from elsewhere")
    with pytest.raises(checkpoint.CheckpointError, match=r"state_9\.pt has been added"):
        checkpoint.verify(path)


async def test_without_room_in_memory_the_ranks_write_to_the_disk_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "room", lambda: ("here", 100))
    said, parts = RecordingListener(), OneRank(BytesLearner())
    path = await save(make_saver(tmp_path, said), parts, 1)
    assert "have room for 0 MiB" in said.text
    assert set(path.iterdir()) == {
        path / name for name in ("learner", "hf", "queue.json", checkpoint.MANIFEST)
    }
    checkpoint.verify(path)


def test_all_ranks_have_room_or_none_writes_into_memory() -> None:
    assert drafts.fits([("a", 100, 60), ("b", 100, 60)])
    assert not drafts.fits([("a", 100, 60), ("a", 100, 60)])
    assert not drafts.fits([("a", 100, 1), ("b", 0, 1)])
    assert drafts.fits([("a", 100, 40), ("a", 90, 50)]) and not drafts.fits(
        [("a", 100, 40), ("a", 80, 50)]
    )


async def test_a_checkpoint_of_the_same_step_is_not_written_twice(tmp_path: Path) -> None:
    said, parts = RecordingListener(), OneRank(BytesLearner())
    saver = make_saver(tmp_path, said)
    assert await save(saver, parts, 4, wait=False) == await save(saver, parts, 4)
    assert parts.segment == 1 and checkpoint.steps(tmp_path) == [4]
    assert "checkpoint of step 4: " in said.text, "somebody has asked for it meanwhile"


async def test_an_old_checkpoint_that_cannot_be_removed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(run_dir: Path, keep: int) -> list[Path]:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), "step_000001")

    said, parts = RecordingListener(), OneRank(BytesLearner())
    saver = make_saver(tmp_path, said, keep=1)
    monkeypatch.setattr(checkpoint, "prune", stuck)
    await save(saver, parts, 1)
    assert checkpoint.steps(tmp_path) == [1] and parts.forgotten == []
    assert (
        "old checkpoints could not be removed: Device or resource busy (step_000001)" in said.text
        and "could not be written" not in said.text
    )


async def test_ranks_that_die_cost_a_checkpoint_and_not_the_run(tmp_path: Path) -> None:
    async def die() -> None:
        raise FaultBudgetSpent("a learner rank died during finish_checkpoint")

    said, parts = RecordingListener(), OneRank(BytesLearner())
    saver = make_saver(tmp_path, said)
    parts.before_finish = die
    await save(saver, parts, 1, wait=False)
    await saver.wait()
    saver.check()
    assert "checkpoint of step 1 could not be written: a learner rank died" in said.text
    parts.before_finish = None
    await save(saver, parts, 2)
    assert checkpoint.steps(tmp_path) == [2]


# -- a full disk
# --------------------------------------------------------------------------------------------------


class SmallDisk:
    """A disk of 1 MiB; where none can be mounted, one that says so."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self._monkeypatch = path, monkeypatch
        path.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
        self.mounted = (
            os.geteuid() == 0
            and subprocess.run(mount, check=False, capture_output=True, timeout=10).returncode == 0
        )

    def fill(self) -> None:
        if self.mounted:
            with pytest.raises(OSError, match="No space left"):
                (self.path / "filler").write_bytes(bytes(2**21))
        else:

            def full(source: Path, target: Path) -> storage.FileSum:
                target.write_bytes(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

            self._monkeypatch.setattr(storage, "move", full)

    def free(self) -> None:
        if self.mounted:
            (self.path / "filler").unlink()
        else:
            self._monkeypatch.undo()

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", str(self.path)], check=True, timeout=10)


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk", monkeypatch)
    yield disk
    disk.close()


@pytest.mark.parametrize("room", [True, False])
async def test_a_full_disk_costs_checkpoints_until_there_were_too_many(
    small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    said, parts = RecordingListener(), OneRank(BytesLearner(size=100_000))
    run_dir = small_disk.path
    saver = make_saver(run_dir, said, max_failures=2)

    async def attempt(step: int) -> None:
        with monkeypatch.context() as patch:
            if not room:
                patch.setattr(drafts, "room", lambda: ("here", 0))
            await save(saver, parts, step, wait=False)
            await saver.wait()

    await attempt(1)
    small_disk.fill()
    await attempt(2)
    saver.check()
    assert checkpoint.latest(run_dir) == checkpoint.path_for(run_dir, 1) and [
        path.name for path in (run_dir / "checkpoints").iterdir()
    ] == ["step_000001"]
    assert (
        "checkpoint of step 2 could not be written: " in said.text
        and "No space left on device" in said.text
    )
    assert (
        "the last good checkpoint is of step 1 (failure 1 in a row, checkpoint.max_failures is 2)"
        in said.text
    )
    assert not in_memory()
    small_disk.free()
    await attempt(3)
    assert checkpoint.steps(run_dir) == [1, 3] and parts.forgotten == [(1, 1), (1, 1)]
    told = [note.partition(":")[0] for note in said.notes]
    after_failure = ["checkpoint of step 3"]
    assert told == (after_failure if room else ["checkpoint of step 1", *after_failure])
    small_disk.fill()
    await attempt(4)
    saver.check()
    await attempt(5)
    with pytest.raises(
        FaultBudgetSpent,
        match=r"2 checkpoints in a row.*No space left on device.*the last good checkpoint is of "
        r"step 3",
    ):
        saver.check()
    logged = [metrics["checkpoint/failures"] for _, metrics in said.metrics]
    assert logged == [0, 1, 1, 2, 3]
    checkpoint.verify(checkpoint.latest(run_dir))


async def test_a_complete_checkpoint_of_the_same_step_survives_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await save(make_saver(tmp_path, RecordingListener()), OneRank(BytesLearner()), 4)

    def full(run_dir: Path, step: int) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "begin", full)
    with pytest.raises(
        FaultBudgetSpent,
        match="step 4 could not be written: No space left on device; the last good checkpoint "
        "is of step 4",
    ):
        await save(make_saver(tmp_path, RecordingListener()), OneRank(BytesLearner()), 4)
    checkpoint.verify(path)


async def test_who_waits_for_a_checkpoint_learns_that_it_is_not_there(
    small_disk: SmallDisk,
) -> None:
    small_disk.fill()
    with pytest.raises(
        FaultBudgetSpent,
        match=r"the checkpoint of step 1 could not be written: .*No space left.*there is no "
        r"checkpoint yet",
    ):
        await save(
            make_saver(small_disk.path, RecordingListener()), OneRank(BytesLearner(size=100_000)), 1
        )


def test_errors_of_libraries_that_mean_a_full_disk() -> None:
    assert storage.storage_error(RuntimeError("os error 28: No space")).errno == errno.ENOSPC
    try:
        try:
            raise OSError(errno.EDQUOT, "over quota")
        except OSError:
            raise RuntimeError("unexpected pos 768 vs 662")  # noqa: B904 - as torch does it
    except RuntimeError as error:
        assert storage.storage_error(error).errno == errno.EDQUOT
    assert storage.storage_error(RuntimeError("shapes do not fit")) is None


# -- killed at any point
# ----------------------------------------------------------------------------------------------


def killed(home: Path, points: int, seconds: float) -> dict[str, dict]:
    """What tests.support.checkpoint_kills saw."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.checkpoint_kills", str(home), str(points)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("points", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_process_killed_while_it_saves_leaves_the_newest_complete_checkpoint(
    tmp_path: Path, points: int
) -> None:
    for case, seen in killed(tmp_path, points, 250).items():
        found = list(seen["found"].values())
        assert len(found) == points and seen["accesses"] > 2 * points
        assert found == sorted(found) and {found[0], found[-1]} == {1, 2}, f"{case}: {found}"


# -- where a checkpoint comes from
# ------------------------------------------------------------------------------------


def test_another_tokenizer_is_refused_and_other_data_are_said(tmp_path: Path) -> None:
    one, same, other = (write_model(tmp_path / name) for name in ("one", "same", "other"))
    tokenizer = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    prints = [tokenizer_fingerprint(model, trust_remote_code=False) for model in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]
    manifest = {"step": 3, "tokenizer_fingerprint": prints[0], "data_fingerprint": "d"}
    assert check_origin(manifest, data="d", tokenizer=prints[0]) is None
    assert "other problems" in check_origin(manifest, data="e", tokenizer=prints[0])
    with pytest.raises(SetupError, match=r"checkpoint of step 3 .* Restore the tokenizer"):
        check_origin(manifest, data="d", tokenizer=prints[2])


def test_the_code_is_a_commit_or_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from async_grpo.runtime import provenance

    if "commit" in (version := code_version()):
        assert len(version["commit"]) == 40 and isinstance(version["dirty"], bool)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text("x = 1")
    monkeypatch.setattr(provenance, "_PACKAGE", tmp_path / "package")
    first = code_version()["digest"]
    (tmp_path / "package" / "a.py").write_text("x = 2")
    assert code_version()["digest"] != first
