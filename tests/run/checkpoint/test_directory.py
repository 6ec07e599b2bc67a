"""Complete or not there: what a checkpoint directory promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.run.checkpoint import directory as checkpoint


def _write(run_dir: Path, step: int, text: str = "weights") -> Path:
    directory = checkpoint.begin(run_dir, step)
    (directory / "learner" / "rank0.pt").write_text(text)
    (directory / "hf" / "config.json").write_text("{}")
    (directory / "queue.json").write_text("[]")
    return checkpoint.commit(directory, {"step": step})


def test_commit_writes_a_manifest_of_every_file(tmp_path: Path) -> None:
    path = _write(tmp_path, 123)
    assert path == checkpoint.path_for(tmp_path, 123) == tmp_path / "checkpoints" / "step_000123"
    manifest = checkpoint.verify(path)
    assert manifest["step"] == 123
    assert set(manifest["files"]) == {"learner/rank0.pt", "hf/config.json", "queue.json"}
    assert manifest["files"]["hf/config.json"] == {
        "size": 2,
        "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
    }
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_latest_ignores_unfinished_and_damaged_checkpoints(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    first, second, third = (_write(tmp_path, step) for step in (9, 10, 1_000_000))
    (checkpoint.begin(tmp_path, 1_000_001) / "queue.json").write_text("[]")
    assert checkpoint.latest(tmp_path) == third
    (third / "learner" / "rank0.pt").write_text("weight")
    with pytest.raises(checkpoint.CheckpointError, match=r"rank0\.pt has 6 bytes instead of 7"):
        checkpoint.read(third)
    assert checkpoint.latest(tmp_path) == second
    (second / "hf" / "config.json").unlink()
    assert checkpoint.latest(tmp_path) == first
    (first / checkpoint.MANIFEST).write_text('{"files": {')
    assert checkpoint.latest(tmp_path) is None


def test_changed_contents_of_equal_size_are_found_by_verify(tmp_path: Path) -> None:
    path = _write(tmp_path, 1)
    (path / "learner" / "rank0.pt").write_text("wEights")
    checkpoint.read(path)
    with pytest.raises(checkpoint.CheckpointError, match=r"contents of learner/rank0.pt"):
        checkpoint.verify(path)


def test_a_second_attempt_starts_empty_and_replaces_the_first(tmp_path: Path) -> None:
    (checkpoint.begin(tmp_path, 5) / "learner" / "stale").write_text("x")
    path = _write(tmp_path, 5, "first")
    assert not (path / "learner" / "stale").exists()
    assert _write(tmp_path, 5, "second") == path
    assert (path / "learner" / "rank0.pt").read_text() == "second"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_only_a_begun_directory_can_be_committed(tmp_path: Path) -> None:
    path = _write(tmp_path, 5)
    with pytest.raises(checkpoint.CheckpointError, match="not made by"):
        checkpoint.commit(path, {})


def test_prune_keeps_complete_checkpoints_and_what_is_being_written(tmp_path: Path) -> None:
    steps = {step: _write(tmp_path, step) for step in (1, 2, 3, 4, 5)}
    (steps[5] / "queue.json").unlink()
    old_draft, new_draft = checkpoint.begin(tmp_path, 2), checkpoint.begin(tmp_path, 6)
    assert set(checkpoint.prune(tmp_path, 2)) == {steps[1], steps[2], old_draft}
    assert {entry.name for entry in steps[1].parent.iterdir()} == {
        steps[3].name,
        steps[4].name,
        steps[5].name,
        new_draft.name,
    }
    assert checkpoint.prune(tmp_path / "nothing", 1) == []
    with pytest.raises(ValueError, match="at least 1"):
        checkpoint.prune(tmp_path, 0)


def test_later_checkpoints_are_set_aside_and_neither_found_nor_pruned(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        _write(tmp_path, step)
    renamed = checkpoint.set_aside(tmp_path, 10)
    assert [path.name for path in renamed] == [
        "step_000020.superseded-1",
        "step_000030.superseded-1",
    ]
    assert checkpoint.steps(tmp_path) == [10] and checkpoint.latest(
        tmp_path
    ) == checkpoint.path_for(tmp_path, 10)
    assert checkpoint.read(renamed[0])
    _write(tmp_path, 20)
    assert checkpoint.set_aside(tmp_path, 0)[1].name == "step_000020.superseded-2"
    _write(tmp_path, 40)
    _write(tmp_path, 50)
    checkpoint.prune(tmp_path, 1)
    assert checkpoint.steps(tmp_path) == [50] and all(path.exists() for path in renamed)


def test_a_replacement_that_was_cut_off_leaves_the_old_one_to_be_found(tmp_path: Path) -> None:
    path = _write(tmp_path, 5, "first")
    retired = path.with_name(path.name + ".old")
    path.rename(retired)
    _write(tmp_path, 4)
    assert checkpoint.latest(tmp_path) == retired, "who only reads renames nothing"
    assert checkpoint.finish_replacing(tmp_path) and not checkpoint.finish_replacing(tmp_path)
    assert checkpoint.latest(tmp_path) == path and not retired.exists()
    retired.mkdir()  # of an attempt that was cut off after its last renaming
    assert _write(tmp_path, 5, "second") == path
    assert (path / "learner" / "rank0.pt").read_text() == "second" and not retired.exists()


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '{"format_version": 2, "files": []}', '{"format_version": 99, "files": {}}'],
)
def test_what_is_no_manifest_of_ours_is_refused(tmp_path: Path, text: str) -> None:
    path = _write(tmp_path, 5)
    (path / checkpoint.MANIFEST).write_text(text)
    with pytest.raises(checkpoint.CheckpointError, match="not a manifest of format"):
        checkpoint.read(path)


def test_a_name_tells_the_step_or_is_refused(tmp_path: Path) -> None:
    assert checkpoint.step_of(tmp_path / "step_000007") == 7
    with pytest.raises(checkpoint.CheckpointError, match="best is not named like a checkpoint"):
        checkpoint.step_of(tmp_path / "best")
