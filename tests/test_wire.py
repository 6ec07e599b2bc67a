"""The codec: groups survive it, damaged and hostile bytes are refused with one error type, limits hold before anything is allocated."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.wire import (
    MAX_DEPTH,
    WIRE_VERSION,
    Group,
    GroupTicket,
    Rollout,
    VersionSpan,
    WireError,
    decode_group,
    decode_meta,
    encode_group,
    pack_frames,
    peek_ticket,
    unpack_frames,
)
from tests.wire_case import HEAD, frame_of, make_group, with_header

FUZZ_FRAMES = 100_000


@st.composite
def groups(draw: st.DrawFn) -> Group:
    finite = st.floats(-1e6, 1e6, width=32)
    rollouts = []
    for _ in range(draw(st.integers(1, 4))):
        pieces = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        ends = list(np.cumsum(pieces))
        n = int(ends[-1])
        spans = [VersionSpan(draw(st.integers(0, 9)), int(end) - size, int(end)) for size, end in zip(pieces, ends, strict=True)]
        rollouts.append(
            Rollout(
                response_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n))),
                behavior_logprobs=np.array(draw(st.lists(st.floats(-1e6, 0, width=32), min_size=n, max_size=n))),
                loss_mask=np.array(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))),
                versions=spans, rewards=draw(st.dictionaries(st.text(), finite, min_size=1, max_size=3)),
                verdict=draw(st.sampled_from([None, 0.0, 1.0])), finish_reason=draw(st.sampled_from(["stop", "length"])),
                role=draw(st.sampled_from(["train", "baseline"])),
            )
        )
    prompt = np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)))
    ids = [draw(st.integers(0, 2**40)) for _ in range(3)]
    return Group(*ids, draw(st.text()), prompt, rollouts, draw(st.dictionaries(st.text(), finite, max_size=2)))


@settings(max_examples=60, deadline=None)
@given(group=groups())
def test_a_group_survives_the_wire(group: Group) -> None:
    back = decode_group(bytearray(encode_group(group)))
    assert (back.group_id, back.attempt, back.policy_version, back.actor_id, back.times) == (
        group.group_id, group.attempt, group.policy_version, group.actor_id, group.times
    )
    np.testing.assert_array_equal(back.prompt_ids, group.prompt_ids)
    assert len(back.rollouts) == len(group.rollouts)
    for got, sent in zip(back.rollouts, group.rollouts, strict=True):
        for name in ("response_ids", "behavior_logprobs", "loss_mask"):
            np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
            assert not getattr(got, name).flags.writeable
        facts = ("versions", "rewards", "verdict", "finish_reason", "role")
        assert [getattr(got, name) for name in facts] == [getattr(sent, name) for name in facts]


@settings(max_examples=60, deadline=None)
@given(group=groups(), data=st.data())
def test_a_damaged_frame_is_refused(group: Group, data: st.DataObject) -> None:
    frame = bytearray(encode_group(group))
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at] ^= data.draw(st.integers(1, 255))
    else:
        frame = frame[: data.draw(st.integers(0, len(frame) - 1))]
    with pytest.raises(WireError):
        decode_meta(frame)
    with pytest.raises(WireError):
        decode_group(frame)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(value=values, data=st.data())
def test_a_wrong_header_is_refused_or_harmless(value: object, data: st.DataObject) -> None:
    frame = frame_of(GroupTicket(3, 1, 2), times={"start": 1.0})

    def change(header: dict) -> None:
        at: dict | list = header
        while True:
            key = data.draw(st.sampled_from(sorted(at))) if isinstance(at, dict) else data.draw(st.integers(0, len(at) - 1))
            if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
                at = at[key]
                continue
            at[key] = value
            return

    try:
        meta = decode_meta(with_header(frame, change))
    except WireError:
        return
    numbers = [meta.group_id, meta.attempt, meta.policy_version, meta.prompt_length]
    numbers += [number for row in meta.rows for number in (row.length, row.mask_tokens, row.min_version, row.max_version)]
    assert all(type(number) is int and number >= 0 for number in numbers)
    assert meta.prompt_length == 3 and [row.length for row in meta.rows] == [2, 2]
    assert all(np.isfinite(list(row.rewards.values())).all() for row in meta.rows)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_ids", np.array([1, 2**32 + 1])), ("response_ids", np.array([1, -2])), ("response_ids", np.array([0.5, 1.0])),
        ("response_ids", np.array([1])), ("behavior_logprobs", np.array([-0.5, np.nan])), ("behavior_logprobs", np.array([-0.5, -np.inf])),
        ("behavior_logprobs", np.array([-0.5, 0.2])), ("behavior_logprobs", np.array([None, -0.5])), ("loss_mask", np.array([1, 256])),
        ("loss_mask", np.array([1, 257])), ("loss_mask", np.array([1, 2])), ("versions", [VersionSpan(0, 0, 1)]), ("versions", []),
        ("versions", [VersionSpan(0, 0, 1), VersionSpan(0, 0, 2)]), ("versions", [VersionSpan(-1, 0, 2)]), ("versions", [VersionSpan(0.5, 0, 2)]),
        ("rewards", {}), ("rewards", {"correct": float("nan")}), ("rewards", {"correct": object()}), ("finish_reason", "abort"),
        ("role", "other"),
    ],
)
def test_what_must_not_be_trained_does_not_reach_the_wire(name: str, value: object) -> None:
    group = make_group(GroupTicket(0, 1, 0))
    setattr(group.rollouts[1], name, value)
    with pytest.raises(WireError):
        encode_group(group)


@given(sizes=st.lists(st.integers(0, 40), max_size=5))
def test_frames_packed_together_come_apart_again(sizes: list[int]) -> None:
    frames = [bytes(range(size)) for size in sizes]
    buffer = pack_frames(frames)
    assert [bytes(view) for view in unpack_frames(buffer)] == frames
    for broken in (buffer[:-1], buffer[1:], buffer[:7], np.append(buffer, np.uint8(0))):
        with pytest.raises(WireError):
            unpack_frames(broken)


# ---- limits ----


def test_a_frame_above_its_limit_is_neither_written_nor_read() -> None:
    frame = frame_of(GroupTicket(0, 1, 0))
    assert decode_meta(frame, max_bytes=len(frame)) == decode_meta(frame)
    with pytest.raises(WireError, match=f"{len(frame)} bytes.*wire.max_frame_bytes"):
        decode_meta(frame, max_bytes=len(frame) - 1)
    with pytest.raises(WireError, match="wire.max_frame_bytes"):
        encode_group(make_group(GroupTicket(0, 1, 0)), max_bytes=len(frame) - 1)


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(("change", "message"), [
    (lambda header: header.update(x=deep(MAX_DEPTH)), "nested"),
    (lambda header: header.update(x=deep(400)), "nested"),
    (lambda header: header.update(x=b"bytes"), "msgpack"),
    (lambda header: header.update(x=msgpack.ExtType(5, b"payload")), "msgpack"),
    (lambda header: header.update(x=msgpack.Timestamp(0)), "msgpack"),
    (lambda header: header.update(x="a" * (64 * 1024 + 1)), "msgpack"),
    (lambda header: header["rows"][0].update(versions=[0, 0]), "triples"),
    (lambda header: header["rows"][0].update(versions=[[0, 0, 2]]), "nested"),
    (lambda header: header["rows"][0].update(versions=[0.0, 0, 2]), "triples"),
], ids=["one_level_too_deep", "a_tower", "bytes", "extension", "timestamp", "long_text", "half_a_span", "nested_span", "float_version"])  # fmt: skip
def test_what_the_header_may_not_hold(change: Callable[[dict], object], message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode_meta(with_header(frame_of(GroupTicket(3, 1, 2)), change))


def test_a_tower_of_lists_overflows_no_stack() -> None:
    packed = b"\x81\xa4rows" + b"\x91" * 100_000 + b"\x90"
    packed += b"\0" * (-len(packed) % 8)
    with pytest.raises(WireError, match="msgpack"):
        decode_meta(HEAD.pack(b"AGRP", WIRE_VERSION, 0, len(packed), zlib.crc32(packed)) + packed)


def test_the_header_is_as_deep_as_it_may_be() -> None:
    frame = with_header(frame_of(GroupTicket(3, 1, 2)), lambda header: header.update(x=deep(MAX_DEPTH - 1)))
    assert decode_meta(frame).group_id == 3


def test_announced_lengths_are_checked_before_arrays_are_made() -> None:
    for huge in (2**31, 2**62, 2**64 - 1):
        for where in ("prompt_length", "length"):
            def change(header: dict, where: str = where, huge: int = huge) -> None:
                (header if where == "prompt_length" else header["rows"][0])[where] = huge

            with pytest.raises(WireError):
                decode_meta(with_header(frame_of(GroupTicket(3, 1, 2)), change))


# ---- fuzz ----


def mutated(frame: bytes, rng: random.Random) -> bytes:
    """The frame with a few bytes changed, cut, repeated or inserted; half of the time with a checksum and length that match."""
    data = bytearray(frame)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data))
        kind = rng.randrange(5)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[at : at + rng.randrange(1, 9)]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        else:
            data[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xdd\xff\xff\xff", b"\xc1\xc7\xd9\x80"))
        if not data:
            return b""
    if len(data) >= HEAD.size and rng.random() < 0.5:
        length = min(HEAD.unpack_from(frame)[3] + rng.choice((0, 0, len(data) - len(frame))), len(data))
        body = bytes(data[HEAD.size :])
        data[: HEAD.size] = HEAD.pack(b"AGRP", WIRE_VERSION, 0, max(length, 0), zlib.crc32(body))
    return bytes(data)


def test_mutated_frames_are_refused_or_whole() -> None:
    """No mutation raises anything but WireError, and what is accepted keeps every rule of a group."""
    rng = random.Random(5)
    frames = [
        frame_of(GroupTicket(index, 1, index % 3), values=(0.0, 1.0, 0.5)[: 1 + index % 3], versions=tuple(range(index % 3, index % 3 + 1 + index % 2)))
        for index in range(12)
    ]
    accepted = 0
    for _ in range(FUZZ_FRAMES):
        frame = mutated(rng.choice(frames), rng)
        peek_ticket(frame)
        try:
            meta = decode_meta(frame)
        except WireError:
            continue
        accepted += 1
        group = decode_group(frame)
        assert len(group.prompt_ids) == meta.prompt_length >= 1 and len(group.rollouts) == len(meta.rows) >= 1
        for row, rollout in zip(meta.rows, group.rollouts, strict=True):
            assert len(rollout.response_ids) == len(rollout.behavior_logprobs) == len(rollout.loss_mask) == row.length >= 1
            assert np.isfinite(rollout.behavior_logprobs).all() and set(rollout.loss_mask.tolist()) <= {0, 1}
            assert rollout.versions[0].start == 0 and rollout.versions[-1].end == row.length
            assert all(np.isfinite(value) for value in row.rewards.values())
    assert 0 < accepted < FUZZ_FRAMES / 2, "both outcomes occur"
