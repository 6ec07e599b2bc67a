"""Where tensors lie in a publication, and checksums that see every change."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.errors import TransferMismatch
from async_grpo.weights.layout import BUCKET_BYTES, Layout, checksum, digest
from async_grpo.weights.transport import Version, is_version, parse_label

BLOCK, ODD = 2**16, 0x9E3779B97F4A7C15


def slow_checksum(data: bytes) -> int:
    """Word by word, in Python's integers."""
    data += bytes(-len(data) % 8)
    words = [
        int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, len(data), 8)
    ]
    sums = [
        sum(word * (2 * place + 1) for place, word in enumerate(words[at : at + BLOCK]))
        for at in range(0, len(words), BLOCK)
    ]
    total = len(sums)
    for value in sums:
        signed = (value + 2**63) % 2**64 - 2**63
        total = (total * ODD + signed) % 2**64
    return total


@settings(max_examples=60)
@given(st.binary(max_size=300))
def test_the_checksum_equals_a_slow_loop(data: bytes) -> None:
    assert checksum(
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.zeros(0, dtype=torch.uint8)
    ) == slow_checksum(data)


@pytest.mark.parametrize("length", [8 * BLOCK, 8 * BLOCK + 8, 24 * BLOCK - 3])
def test_the_checksum_of_several_blocks(length: int) -> None:
    data = random.Random(length).randbytes(length)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found = checksum(tensor)
    assert found == slow_checksum(data)
    for place in (0, 7, 8 * BLOCK - 1, length // 2, length - 1):
        tensor[place] ^= 1
        assert checksum(tensor) != found, f"byte {place} changed unseen"
        tensor[place] ^= 1
    words = tensor[: length // 8 * 8].view(torch.int64)
    words[0], words[-1] = words[-1].clone(), words[0].clone()
    assert checksum(tensor) != found, "two words changed places unseen"


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), max_size=3),
            st.sampled_from(["float32", "bfloat16", "float16"]),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_tensors_come_back_as_they_went_in(shapes: list) -> None:
    layout = Layout([(f"t{index}", shape, dtype) for index, (shape, dtype) in enumerate(shapes)])
    weights = [
        (name, torch.randn(shape).to(getattr(torch, dtype)))
        for name, shape, dtype in layout.metadata
    ]
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.fill(buffer, weights)
    got = list(layout.tensors(buffer))
    assert [name for name, _ in got] == [name for name, _ in weights]
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype
        for (_, a), (_, b) in zip(got, weights, strict=True)
    )
    assert layout.buckets[0].start == 0 and layout.buckets[-1].end == layout.nbytes
    assert [name for bucket in layout.buckets for name in bucket.names] == [
        name for name, _ in weights
    ]


def test_a_wrong_bucket_is_named_with_its_tensors() -> None:
    rows = BUCKET_BYTES // 4 // 1000
    layout = Layout(
        [
            ("embed", (rows, 700), "float32"),
            ("first", (rows, 400), "float32"),
            ("norm", (10,), "float32"),
            ("head", (rows, 900), "float32"),
        ]
    )
    assert [bucket.names for bucket in layout.buckets] == [("embed",), ("first", "norm"), ("head",)]
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    expected = layout.checksums(buffer)
    layout.verify(buffer, expected)
    buffer[layout.buckets[1].start + 5] = 1
    with pytest.raises(
        TransferMismatch,
        match=r"bucket 2 of 3 of the weights arrived with other bytes than were sent; "
        r"it holds first, norm",
    ):
        layout.verify(buffer, expected)
    assert digest(layout.checksums(buffer)) != digest(expected)


def test_other_weights_than_announced_are_refused() -> None:
    layout = Layout([("a", (2,), "float32"), ("b", (3,), "float32")])
    with pytest.raises(
        RuntimeError, match=r"the learner sent b \(4,\) where b \(3,\) was announced"
    ):
        layout.fill(
            torch.zeros(layout.nbytes, dtype=torch.uint8),
            [("a", torch.zeros(2)), ("b", torch.zeros(4))],
        )


def test_labels_are_ordered_pairs() -> None:
    assert parse_label(Version(2, 17).label) == Version(2, 17)
    assert Version(0, 9) < Version(0, 10) < Version(1, 0)
    for label in (
        "self-check",
        "unpublished",
        "default",
        "v3",
        "v1.",
        "v.1",
        "1.2",
        "v1.2.3",
        "v-1.2",
    ):
        assert not is_version(label)
        with pytest.raises(ValueError, match="which no weight sync set"):
            parse_label(label)
