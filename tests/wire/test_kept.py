"""Sets of tokens of which each token was sampled: cut, joined, padded, and checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.wire.codec import (
    Group,
    GroupTicket,
    VersionSpan,
    WireError,
    decode_group,
    decode_meta,
    encode_group,
)
from async_grpo.wire.kept import KeptSets, joined
from tests.support.frames import make_group

sets_of_tokens = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4, unique=True), min_size=1)


def listed(kept: KeptSets) -> list[list[int]]:
    return [part.ids.tolist() for part in kept.split([1] * len(kept.counts))]


@given(sets=sets_of_tokens, cut=st.integers(0, 30))
def test_sets_are_cut_joined_and_laid_out_without_loss(sets: list[list[int]], cut: int) -> None:
    kept, lengths = KeptSets.of(sets), [min(cut, len(sets)), max(len(sets) - cut, 0)]
    assert kept.counts.dtype == np.uint16 and kept.ids.dtype == np.int32
    assert listed(kept) == [sorted(one) for one in sets]
    parts = kept.split(lengths)
    assert [len(part.counts) for part in parts] == lengths
    again = joined(parts, lengths)
    assert again is not None and listed(again) == listed(kept)
    several, rows, whole = kept.by_size()
    assert several.tolist() == [at for at, one in enumerate(sets) if len(one) > 1]
    assert whole.tolist() == [at for at, one in enumerate(sets) if not one]
    assert rows.shape == (len(several), max([1, *map(len, sets)]))
    for row, at in zip(rows.tolist(), several, strict=True):
        size = len(sets[at])
        assert row[:size] == sorted(sets[at]) and {*row[size:]} <= {-1}
    back = KeptSets.in_planes(kept.planes)
    assert back is not None and listed(back) == listed(kept)


def test_a_part_without_sets_has_empty_ones_beside_others_and_none_alone() -> None:
    assert joined([], []) is joined([None, None], [2, 1]) is KeptSets.in_planes({}) is None
    whole = joined([None, KeptSets.of([[3, 1]]), None], [2, 1, 1])
    assert whole is not None and listed(whole) == [[], [], [1, 3], []]


def sampled_group() -> Group:
    """Two rows, of which the second has a turn behind context; sampled are 0 1 2 3 and 2 3 6."""
    group = make_group(GroupTicket(0, 1, 0), versions=(0, 1))
    second = group.rows[1]
    second.segments, second.response_ids = [(2, 2), (2, 1)], np.arange(7)
    second.behavior_logprobs = second.behavior_logprobs[:3]
    second.versions = [second.versions[0], VersionSpan(1, 2, 3)]
    group.planes = KeptSets.of([[0, 9], [1], [], [2, 3, 4], [0, 2], [3, 99], [5, 6]]).planes
    return group


def test_sets_survive_the_wire_and_a_group_without_has_the_bytes_that_it_had() -> None:
    group = sampled_group()
    frame = encode_group(group)
    back = decode_group(frame)
    assert back.rows[1].response_ids[back.rows[1].sampled].tolist() == [2, 3, 6]
    kept = KeptSets.in_planes(back.planes)
    assert kept is not None and listed(kept)[3:5] == [[2, 3, 4], [0, 2]]
    group.planes = {}
    plain = encode_group(group)
    assert KeptSets.in_planes(decode_group(plain).planes) is None and len(plain) < len(frame)
    # counts of 7 tokens, 12 ids, and padding; the names of the planes are in the header
    assert len(frame) - decode_meta(plain).nbytes >= 2 * 7 + 4 * 12


def change_counts(planes: dict[str, np.ndarray], index: int, by: int) -> None:
    counts = planes["kept_counts"].astype(int)
    counts[index] += by
    planes["kept_counts"] = counts.astype(np.uint16)


def swap(planes: dict[str, np.ndarray]) -> None:
    """One token fewer here and one more there: as many as before."""
    change_counts(planes, 0, -1)
    change_counts(planes, 1, 1)


def put(index: int, token: int) -> Callable[[dict[str, np.ndarray]], None]:
    def change(planes: dict[str, np.ndarray]) -> None:
        planes["kept_ids"] = planes["kept_ids"].copy()
        planes["kept_ids"][index] = token

    return change


def wide(planes: dict[str, np.ndarray]) -> None:
    planes["kept_counts"] = np.repeat(planes["kept_counts"], 2, axis=1)
    planes["kept_ids"] = np.repeat(planes["kept_ids"], 2, axis=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda planes: change_counts(planes, 0, 1), "bytes"),
        (lambda planes: change_counts(planes, 0, -1), "bytes"),
        (swap, "sampled token 1 is not in|rising"),
        (put(0, -1), "not natural numbers in rising order"),
        (put(1, 0), "not natural numbers in rising order"),  # a token twice
        (put(3, 7), "not natural numbers in rising order"),
        (put(2, 8), "sampled token 1 is not in the set it is from"),
        (put(-1, 7), "sampled token 6 is not in the set it is from"),
        (wide, "14 sets of 24 tokens"),
        (lambda planes: planes.pop("kept_ids"), "7 sets of 12 tokens in all, for 7"),
        (lambda planes: planes.pop("kept_counts"), "without kept_counts"),
    ],
)
def test_sets_that_do_not_fit_are_refused(
    change: Callable[[dict[str, np.ndarray]], object], message: str
) -> None:
    group = sampled_group()
    encode_group(group)
    change(group.planes)
    with pytest.raises(WireError, match=message):
        encode_group(group)
