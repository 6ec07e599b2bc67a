"""Where segments go when shared memory is small."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.weights import shared_memory
from async_grpo.weights.shared_memory import SEGMENT_DIR, choose_directory

NBYTES = 2**20


@pytest.mark.parametrize(
    ("in_memory", "on_disk", "says"),
    [
        (2**40, 0, ""),
        (2**20, 2**40, "has 1 MiB free and three copies of the weights take 3 MiB: weights are"),
    ],
)
def test_a_directory_with_room_is_taken_and_the_slower_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int, on_disk: int, says: str
) -> None:
    room = {SEGMENT_DIR: in_memory, tmp_path / "weights": on_disk}
    monkeypatch.setattr(shared_memory, "free_bytes", room.__getitem__)
    directory, said = choose_directory(NBYTES, tmp_path / "weights")
    assert directory == (tmp_path / "weights" if says else SEGMENT_DIR)
    assert says in said and bool(says) == bool(said) == directory.is_relative_to(tmp_path)


def test_no_room_at_all_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "free_bytes", lambda directory: 2**20)
    with pytest.raises(OSError, match=r"has no room for them either; .*--shm-size"):
        choose_directory(NBYTES, tmp_path / "weights")
