"""The codec: groups survive it, damaged and hostile bytes are refused with one error type, limits
hold before anything is allocated.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.wire.codec import (
    MAX_STRING_BYTES,
    WIRE_VERSION,
    Group,
    GroupMeta,
    GroupTicket,
    Row,
    VersionSpan,
    WireError,
    decode_group,
    decode_meta,
    encode_group,
    pack_frames,
    peek_ticket,
    unpack_frames,
)
from async_grpo.wire.groups import FINISH_REASONS
from async_grpo.wire.kept import KeptSets
from tests.support.frames import HEAD, frame_of, make_group, with_columns

FUZZ_FRAMES = 100_000
FACTS = ("rewards", "verdict", "finish_reason", "role")


@st.composite
def groups(draw: st.DrawFn) -> Group:
    finite, tokens = st.floats(-1e6, 1e6, width=32), st.integers(0, 2**31 - 1)
    rows: list[Row] = []
    prompts, rewarded = draw(st.integers(1, 3)), draw(st.booleans())
    forked = draw(st.booleans())
    for index in range(draw(st.integers(prompts, 5))):
        pieces = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        ends = list(np.cumsum(pieces))
        n = int(ends[-1])
        spans = [
            VersionSpan(draw(st.integers(0, 9)), int(end) - size, int(end))
            for size, end in zip(pieces, ends, strict=True)
        ]
        cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=2))) if n > 1 else []
        turns = [(draw(st.integers(0, 3)), stop - start) for start, stop in pairwise([0, *cuts, n])]
        total = sum(map(sum, turns))
        again = index > 0 and forked and (index == 1 or draw(st.booleans()))
        number = max((row.episode for row in rows), default=-1) + 1 if forked else None
        facts = {
            "rewards": draw(st.dictionaries(st.text(), finite, min_size=1, max_size=3)),
            "verdict": draw(st.sampled_from([None, 0.0, 1.0])),
            "finish_reason": draw(st.sampled_from(FINISH_REASONS)),
            "role": draw(st.sampled_from(["train", "baseline"])),
            "episode": number,
        }
        if again:
            facts = {name: getattr(draw(st.sampled_from(rows)), name) for name in ("episode",)}
            first = next(row for row in rows if row.episode == facts["episode"])
            facts |= {name: getattr(first, name) for name in FACTS}
        rows.append(
            Row(
                response_ids=np.array(draw(st.lists(tokens, min_size=total, max_size=total))),
                behavior_logprobs=np.array(
                    draw(st.lists(st.floats(-1e6, 0, width=32), min_size=n, max_size=n))
                ),
                segments=turns,
                versions=spans,
                prompt=index if index < prompts else draw(st.integers(0, prompts - 1)),
                turn_rewards=[draw(finite) for _ in turns] if rewarded else None,
                **facts,
            )
        )
    if forked and len(rows) == 1:
        rows[0].episode = None
    ids = [draw(st.integers(0, 2**40)) for _ in range(3)]
    sampled = sum(len(row.behavior_logprobs) for row in rows)
    planes = {}
    if draw(st.booleans()):
        counts = draw(st.lists(st.integers(0, 3), min_size=sampled, max_size=sampled))
        own = np.concatenate([row.response_ids[row.sampled] for row in rows]).tolist()
        pairs = zip(own, counts, strict=True)
        sets = [[*{token, *range(count)}] if count else [] for token, count in pairs]
        planes |= KeptSets.of(sets).planes
    if draw(st.booleans()):
        planes["teacher_logprobs"] = np.linspace(-2, 0, 2 * sampled, dtype=np.float32).reshape(
            -1, 2
        )
    return Group(
        *ids,
        draw(st.text()),
        [np.array(draw(st.lists(tokens, min_size=1, max_size=6))) for _ in range(prompts)],
        rows,
        draw(st.dictionaries(st.text(), finite, max_size=2)),
        planes=planes,
    )


@settings(max_examples=60)
@given(group=groups())
def test_a_group_survives_the_wire(group: Group) -> None:
    back = decode_group(bytearray(encode_group(group)))
    assert (back.group_id, back.attempt, back.policy_version, back.actor_id, back.times) == (
        group.group_id,
        group.attempt,
        group.policy_version,
        group.actor_id,
        group.times,
    )
    for got, sent in zip(back.prompts, group.prompts, strict=True):
        np.testing.assert_array_equal(got, sent)
    for got, sent in zip(back.rows, group.rows, strict=True):
        for name in ("response_ids", "behavior_logprobs", "sampled"):
            np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
        assert not got.response_ids.flags.writeable and not got.behavior_logprobs.flags.writeable
        facts = (*FACTS, "versions", "segments", "prompt", "episode", "turn_rewards")
        assert [getattr(got, name) for name in facts] == [getattr(sent, name) for name in facts]
    assert list(back.planes) == list(group.planes)
    for name, plane in group.planes.items():
        assert back.planes[name].dtype == plane.dtype
        np.testing.assert_array_equal(back.planes[name], plane)
    meta = decode_meta(encode_group(group))
    assert meta.prompt_lengths == tuple(map(len, group.prompts))
    for known, row in zip(meta.rows, group.rows, strict=True):
        assert known.length == len(row.behavior_logprobs) == len(row.sampled)
        assert known.length + known.context == len(row.response_ids)
        assert known.turns == len(row.segments) and known.prompt == row.prompt
        assert sum(tokens for _, tokens in known.versions) == known.length
    members: dict[int, list[int]] = {}
    for place, row in enumerate(group.rows):
        members.setdefault(place if row.episode is None else row.episode, []).append(place)
    assert meta.places == list(members.values())
    for one, places in zip(meta.episodes, meta.places, strict=True):
        assert one.length == sum(len(group.rows[place].behavior_logprobs) for place in places)
        assert one.rewards == group.rows[places[0]].rewards


@settings(max_examples=60)
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_ids", np.array([1, 2**32 + 1])),
        ("response_ids", np.array([1, -2])),
        ("response_ids", np.array([0.5, 1.0])),
        ("response_ids", np.array([1])),
        ("behavior_logprobs", np.array([-0.5, np.nan])),
        ("behavior_logprobs", np.array([-0.5, -np.inf])),
        ("behavior_logprobs", np.array([-0.5, 0.2])),
        ("behavior_logprobs", np.array([None, -0.5])),
        ("segments", [(0, 1)]),
        ("segments", [(1, 1)]),
        ("segments", [(2, 0)]),
        ("segments", [(0, 1), (1, 0)]),
        ("segments", [(-1, 3)]),
        ("segments", []),
        ("prompt", 1),
        ("prompt", -1),
        ("episode", 0),
        ("turn_rewards", [0.5]),
        ("versions", [VersionSpan(0, 0, 1)]),
        ("versions", []),
        ("versions", [VersionSpan(0, 0, 1), VersionSpan(0, 0, 2)]),
        ("versions", [VersionSpan(0, 0, 1), VersionSpan(0, 0, 1)]),
        ("versions", [VersionSpan(0, 0, 1), VersionSpan(0, 5, 6)]),
        ("versions", [VersionSpan(0, 1, 3)]),
        ("versions", [VersionSpan(-1, 0, 2)]),
        ("versions", [VersionSpan(0.5, 0, 2)]),
        ("rewards", {}),
        ("rewards", {"correct": float("nan")}),
        ("rewards", {"correct": object()}),
        ("rewards", {"correct": None, "format": 1.0}),
        ("response_ids", np.array(["1", "2"])),
        ("behavior_logprobs", np.array(["-1", "-2"])),
        ("rewards", {"correct": True}),
        ("verdict", True),
        ("verdict", float("inf")),
        ("finish_reason", "abort"),
        ("role", "other"),
    ],
)
def test_what_must_not_be_trained_does_not_reach_the_wire(name: str, value: object) -> None:
    group = make_group(GroupTicket(0, 1, 0))
    setattr(group.rows[1], name, value)
    with pytest.raises(WireError):
        encode_group(group)


def test_lengths_that_differ_in_a_row_and_agree_in_the_group_are_refused() -> None:
    group = make_group(GroupTicket(0, 1, 0))
    group.rows[0].behavior_logprobs, group.rows[1].behavior_logprobs = (
        np.full(3, -0.5),
        np.full(1, -0.5),
    )
    with pytest.raises(WireError, match=r"sequence 0: .*must be equal"):
        encode_group(group)


@given(sizes=st.lists(st.integers(0, 40), max_size=5))
def test_frames_packed_together_come_apart_again(sizes: list[int]) -> None:
    frames = [bytes(range(size)) for size in sizes]
    dirty = [np.full(size, 255, np.uint8) for size in [len(pack_frames(frames))] * 8]
    del dirty  # so that the memory of the next array is not zero by luck
    buffer = pack_frames(frames)
    padding = -[0, *sizes][-1] % 8
    assert not buffer[len(buffer) - padding :].any(), "memory of this process does not travel"
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
    with pytest.raises(WireError, match=r"wire.max_frame_bytes"):
        encode_group(make_group(GroupTicket(0, 1, 0)), max_bytes=len(frame) - 1)


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


def two_version_frame() -> bytes:
    """Two rollouts of four tokens: two of version 2, two of version 3."""
    return frame_of(GroupTicket(3, 1, 2), versions=(2, 3), times={"start": 1.0})


def header_of(frame: bytes) -> dict:
    seen: dict = {}
    with_columns(frame, seen.update)
    return seen


KEYS = list(header_of(two_version_frame()))
COLUMNS = KEYS[6:]
EMPTY = ["row_prompts", "episodes", "turn_rewards", "plane_names", "plane_types", "plane_widths"]
"""Columns of a plain group without entries."""
WRONG = {
    "none": None,
    "boolean": True,
    "negative": -1,
    "huge_negative": -(2**63),
    "fraction": 0.5,
    "nan": float("nan"),
    "infinite": float("inf"),
    "text": "1",
    "bytes": b"bytes",
    "no_bytes": b"",
    "extension": msgpack.ExtType(5, b""),
    "long_extension": msgpack.ExtType(5, b"payload"),
    "timestamp": msgpack.Timestamp(0),
    "empty_list": [],
    "list": [1],
    "map": {},
    "tower": deep(400),
    "long_text": "a" * (MAX_STRING_BYTES + 1),
    "huge": 2**63,
    "largest": 2**64 - 1,
}
NUMBERS = frozenset({"negative", "huge_negative", "fraction", "huge", "largest"})
NATURALS = frozenset({"huge", "largest"})
ALLOWED = {
    "group_id": NATURALS,
    "attempt": NATURALS,
    "policy_version": NATURALS,
    "run_epoch": NATURALS,
    "span_versions": NATURALS,
    "actor_id": {"text"},
    "times": {"map"},
    "verdicts": NUMBERS | {"none"},
    "reward_names": {"text"},
    "rewards": NUMBERS | {"none"},
}
"""What is right in a place of the header, of the values of WRONG. In a reward, None is a component
that the rollout lacks.
"""


def test_the_header_is_what_the_tests_below_take_it_for() -> None:
    seen: dict = {}
    assert with_columns(two_version_frame(), seen.update) == two_version_frame()
    assert seen == {
        "group_id": 3,
        "attempt": 1,
        "policy_version": 2,
        "run_epoch": 0,
        "actor_id": "a",
        "times": {"start": 1.0},
        "prompt_lengths": [3],
        "segment_counts": [1, 1],
        "segments": [0, 4, 0, 4],
        "roles": ["train", "train"],
        "verdicts": [0.0, 1.0],
        "finish_reasons": ["stop", "stop"],
        "reward_names": ["correct", "format"],
        "rewards": [0.0, 1.0, 1.0, 1.0],
        "span_counts": [2, 2],
        "span_versions": [2, 3, 2, 3],
        "span_tokens": [2, 2, 2, 2],
    } | {name: [] for name in EMPTY}


@pytest.mark.parametrize("key", KEYS)
def test_a_header_has_exactly_its_keys(key: str) -> None:
    frame = two_version_frame()
    for change in (
        lambda header: header.pop(key),
        lambda header: header.update({key + "s": header.pop(key)}),
    ):
        with pytest.raises(WireError, match=f"keys.*{key}"):
            decode_meta(with_columns(frame, change))


@pytest.mark.parametrize("key", ["other", "", "a" * 100_000, b"group_id", b"", 7])
def test_a_header_has_no_other_key(key: object) -> None:
    with pytest.raises(WireError, match=r"keys|msgpack"):
        decode_meta(with_columns(two_version_frame(), lambda header: header.update({key: 1})))


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("key", KEYS)
def test_a_wrong_value_in_the_header(key: str, wrong: str) -> None:
    """In the place of a value, and in each place of a column: refused, unless it is one of the
    values that belong there.
    """
    frame, value, allowed = two_version_frame(), WRONG[wrong], wrong in ALLOWED.get(key, ())
    changes: list[Callable[[dict], object]] = [lambda header: header.update({key: value})]
    if key in COLUMNS:
        if not (key in EMPTY and value == []):
            with pytest.raises(WireError):
                decode_meta(with_columns(frame, changes[0]))
        changes.clear()
        size = len(header_of(frame)[key])
        changes = [lambda header, at=at: header[key].__setitem__(at, value) for at in range(size)]
    for change in changes:
        if allowed:
            assert decode_meta(with_columns(frame, change)).prompt_lengths == (3,)
        else:
            with pytest.raises(WireError):
                decode_meta(with_columns(frame, change))


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_time(wrong: str) -> None:
    changed = with_columns(
        two_version_frame(), lambda header: header["times"].update(start=WRONG[wrong])
    )
    if wrong in NUMBERS:
        assert decode_meta(changed).times == {"start": float(WRONG[wrong])}
    else:
        with pytest.raises(WireError):
            decode_meta(changed)


def test_a_time_has_a_name_of_text() -> None:
    for name in (b"start", b"", 1):
        with pytest.raises(WireError, match=r"times|msgpack"):
            decode_meta(
                with_columns(
                    two_version_frame(), lambda header, name=name: header.update(times={name: 1.0})
                )
            )


@pytest.mark.parametrize("key", [key for key in COLUMNS if key not in EMPTY])
def test_a_column_has_one_entry_for_each_row_turn_or_span(key: str) -> None:
    frame = two_version_frame()
    for change in (
        lambda header: header[key].pop(),
        lambda header: header[key].append(header[key][-1]),
        lambda header: header[key].clear(),
        lambda header: header.update({key: header[key] * 1000}),
    ):
        with pytest.raises(WireError):
            decode_meta(with_columns(frame, change))


def test_a_group_without_rows_or_prompt_is_refused() -> None:
    empty = HEAD.size + HEAD.unpack_from(two_version_frame())[3] + 4 * 3

    def no_rows(header: dict) -> None:
        kept = ("reward_names", "prompt_lengths")
        header.update({column: [] for column in COLUMNS if column not in kept})

    with pytest.raises(WireError, match="at least 1"):
        decode_meta(with_columns(two_version_frame()[:empty], no_rows))
    group = make_group(GroupTicket(0, 1, 0))
    for name, value in (("rows", []), ("prompts", []), ("prompts", [np.empty(0, np.int32)])):
        with pytest.raises(WireError, match="at least 1"):
            encode_group(replace(group, **{name: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"span_tokens": [2, 1, 2, 2]}, "sequence 0.*cover"),  # a gap at the end
        ({"span_tokens": [2, 2, 2, 3]}, "sequence 1.*cover"),
        (
            {"span_tokens": [2, 3, 1, 2]},
            "sequence 0.*cover",
        ),  # the sum is right, the second rollout's tokens are the first's
        ({"span_tokens": [4, 0, 2, 2]}, "without tokens"),
        ({"span_tokens": [5, -1, 2, 2]}, "without tokens"),
        ({"span_tokens": [2, 2, 2, 2**63]}, "sequence 1.*cover"),
        ({"span_versions": [2, -1, 2, 3]}, "negative version"),
        ({"span_counts": [1, 3]}, "sequence 0.*cover"),
        ({"span_counts": [4, 0]}, "version spans"),
        ({"span_counts": [5, -1]}, "version spans"),
        ({"span_counts": [2, 1]}, "version spans"),
        ({"span_counts": [2, 2**64 - 1]}, "version spans"),
        (
            {
                "span_counts": [2, 3],
                "span_versions": [2, 3, 2, 3, 3],
                "span_tokens": [2, 2, 2, 2, 1],
            },
            "sequence 1.*cover",
        ),
        (
            {"span_versions": [2, 3, 2, 3, 3], "span_tokens": [2, 2, 2, 2, 1]},
            "5 version spans for 2",
        ),  # one of no rollout
        ({"span_counts": [0, 0], "span_versions": [], "span_tokens": []}, "version spans"),
        ({"span_versions": [2, 3, 2]}, "span_tokens has 4"),
        ({"segments": [0, 5, 0, 3]}, "sequence 0.*cover"),
        ({"segments": [1, 4, 0, 4]}, "tokens, 8 of them sampled, has .* bytes"),
        ({"segments": [0, 8, 0, 0]}, "at least 1"),
        ({"segments": [0, 9, 0, -1]}, "at least 1"),
        ({"segments": [-1, 5, 0, 4]}, "at least 1"),
        ({"segments": [0, 8]}, "2 segments for 2 sequences"),
        ({"segments": [0, 4, 0]}, "3 segments for 2 sequences"),
        ({"segment_counts": [2, 0]}, "segments for 2 sequences"),
        ({"segment_counts": [2]}, "instead of 1"),
        ({"segment_counts": [1, 2]}, "segments for 2 sequences"),
        ({"segments": [0, 2, 0, 2, 0, 4], "segment_counts": [1, 2]}, "sequence 0.*cover"),
        ({"row_prompts": [0, 0]}, "row_prompts has 2 entries"),
        ({"prompt_lengths": [1, 2]}, "row_prompts has 0 entries"),
        ({"prompt_lengths": [1, 2], "row_prompts": [0, 0]}, "each of the 2 prompts"),
        ({"prompt_lengths": [1, 2], "row_prompts": [0, 2]}, "each of the 2 prompts"),
        ({"prompt_lengths": [3, 0], "row_prompts": [0, 1]}, "at least 1 token of a prompt"),
        ({"episodes": [0, 1]}, "must be empty"),
        ({"episodes": [0]}, "episodes has 1 entries"),
        ({"episodes": [1, 0]}, "sequence 0 is of episode 1"),
        ({"episodes": [0, -1]}, "sequence 1 is of episode -1"),
        ({"episodes": [0, 0]}, "sequence 1 is of episode 0.*another"),
        ({"turn_rewards": [1.0]}, "turn_rewards has 1 entries"),
        ({"turn_rewards": [1.0, None]}, "turn_rewards must be numbers"),
        ({"plane_names": ["routes"]}, "plane_types has 0"),
        ({"reward_names": ["correct", "correct"]}, "twice"),
        ({"reward_names": [], "rewards": []}, "at least one"),
        ({"reward_names": ["correct"]}, "rewards has 4 entries instead of 2"),
        ({"rewards": [None, 1.0, None, 1.0]}, "sequence 0 has no reward"),
        ({"rewards": [0.0, None, 1.0, None]}, "sequence 1 has no reward"),
        ({"roles": ["train", "other"]}, "sequence 1 .*'other'"),
        ({"finish_reasons": ["abort", "stop"]}, "sequence 0 .*'abort'"),
        ({"roles": ["train", "r" * 60_000]}, "sequence 1"),
    ],
)
def test_columns_that_contradict_each_other(changes: dict, message: str) -> None:
    with pytest.raises(WireError, match=message) as caught:
        decode_meta(with_columns(two_version_frame(), lambda header: header.update(changes)))
    assert len(str(caught.value)) < 300, "the queue keeps the message"


def test_rows_may_differ_in_their_reward_components() -> None:
    group = make_group(GroupTicket(0, 1, 0))
    group.rows[0].rewards, group.rows[1].rewards = (
        {"correct": 0.0, "length": 2},
        {"style": -1.0, "length": 0.5},
    )
    meta = decode_meta(encode_group(group))
    assert [row.rewards for row in meta.rows] == [
        {"correct": 0.0, "length": 2.0},
        {"style": -1.0, "length": 0.5},
    ]
    assert all(type(value) is float for row in meta.rows for value in row.rewards.values())


def test_context_is_counted_per_row_and_has_no_log_probs() -> None:
    group = make_group(GroupTicket(0, 1, 0), values=(0.0, 1.0, None), versions=(0, 1))
    turns = [[(0, 4)], [(2, 1), (1, 3)], [(0, 2), (0, 1), (5, 1)]]
    for row, segments in zip(group.rows, turns, strict=True):
        row.segments, row.response_ids = segments, np.arange(sum(map(sum, segments)))
    meta = decode_meta(encode_group(group))
    assert [(row.length, row.context, row.turns) for row in meta.rows] == [
        (4, 0, 1),
        (4, 3, 2),
        (4, 5, 3),
    ]
    assert [row.sampled.tolist() for row in decode_group(encode_group(group)).rows] == [
        [0, 1, 2, 3],
        [2, 4, 5, 6],
        [0, 1, 2, 8],
    ]
    assert [row.verdict for row in meta.rows] == [0.0, 1.0, None]
    assert [row.versions for row in meta.rows] == [((0, 2), (1, 2))] * 3
    assert (meta.min_version, meta.max_version, meta.rows[0].tokens_before(1)) == (0, 1, 2)


def test_a_token_costs_eight_bytes_and_one_of_context_four() -> None:
    def size(tokens: int, context: int) -> int:
        group = make_group(GroupTicket(0, 1, 0), values=(1.0,))
        [row] = group.rows
        row.segments, row.response_ids = [(context, tokens)], np.zeros(context + tokens)
        row.behavior_logprobs, row.versions = np.zeros(tokens), [VersionSpan(0, 0, tokens)]
        return len(encode_group(group))

    assert size(1128, 1000) - size(1000, 1000) == 8 * 128
    assert size(1000, 1128) - size(1000, 1000) == 4 * 128


def test_rows_of_an_episode_are_joined_for_statistics() -> None:
    group = make_group(GroupTicket(0, 1, 0), values=(0.0, 1.0, 1.0), versions=(0, 1))
    for row, episode in zip(group.rows, (0, 1, 1), strict=True):
        row.episode, row.turn_rewards = episode, [0.25 * episode]
    meta = decode_meta(encode_group(group))
    assert meta.places == [[0], [1, 2]] and len(meta.episodes) == 2
    one = meta.episodes[1]
    assert (one.length, one.turns, one.rewards) == (8, 2, {"correct": 1.0, "format": 1.0})
    assert one.versions == ((0, 2), (1, 2), (0, 2), (1, 2)) and one.turn_rewards == (0.25, 0.25)
    assert one.tokens_before(1) == 4 and (one.min_version, one.max_version) == (0, 1)


@pytest.mark.parametrize("name", ["episode", "turn_rewards"])
def test_what_one_row_says_all_rows_say(name: str) -> None:
    group = make_group(GroupTicket(0, 1, 0))
    setattr(group.rows[0], name, 0 if name == "episode" else [0.5])
    with pytest.raises(WireError, match=f"with and without {name}"):
        encode_group(group)


# ---- planes ----


@pytest.mark.parametrize(
    ("planes", "message"),
    [
        ({"other": np.zeros((4, 1), np.uint8)}, "no plane is 'other'"),
        ({"routes": np.zeros((7, 2), np.int32)}, "no plane is 'routes' of 2 'int32'"),
        ({"routes": np.zeros((7, 0), np.uint8)}, "no plane is 'routes' of 0"),
        ({"routes": np.zeros((6, 2), np.uint8)}, "bytes"),
        ({"routes": np.zeros((9, 2), np.uint8)}, "bytes"),
        ({"teacher_logprobs": np.full((4, 1), np.nan, np.float32)}, "not finite"),
        ({"kept_ids": np.zeros((4, 1), np.int32)}, "without kept_counts"),
        (
            {"kept_counts": np.ones((4, 1), np.uint16), "kept_ids": np.zeros((9, 1), np.int32)},
            "bytes",
        ),
    ],
)
def test_a_plane_that_does_not_fit_is_refused(planes: dict, message: str) -> None:
    group = make_group(GroupTicket(0, 1, 0))
    group.planes = planes
    with pytest.raises(WireError, match=message):
        encode_group(group)


def test_a_plane_does_not_come_twice() -> None:
    group = make_group(GroupTicket(0, 1, 0))
    group.planes = {"routes": np.zeros((7, 2), np.uint8)}

    def twice(header: dict) -> None:
        for name in ("plane_names", "plane_types", "plane_widths"):
            header[name] *= 2

    assert decode_group(encode_group(group)).planes["routes"].shape == (7, 2)
    with pytest.raises(WireError, match="comes twice"):
        decode_meta(with_columns(encode_group(group), twice))


# ---- frames of version 4 ----


def frame_of_version_4(*, mask: int = 1, **changes: object) -> bytes:
    """`two_version_frame` as older runs have written it."""
    header = header_of(two_version_frame())
    for name in ("prompt_lengths", "segment_counts", "segments", *EMPTY):
        del header[name]
    header |= {"prompt_length": 3, "lengths": [4, 4]} | changes
    packed = msgpack.packb(header)
    packed += b"\0" * (-len(packed) % 8)
    frame = two_version_frame()
    arrays = frame[HEAD.size + HEAD.unpack_from(frame)[3] :]
    body = packed + arrays + bytes([mask]) * 8
    return HEAD.pack(b"AGRP", 4, 0, len(packed), zlib.crc32(body)) + body


def test_a_frame_of_version_4_is_read_as_what_it_is() -> None:
    old, new = decode_group(frame_of_version_4()), decode_group(two_version_frame())
    assert repr(old) == repr(new)
    assert peek_ticket(frame_of_version_4()) == (3, 1)
    known = decode_meta(frame_of_version_4())
    assert replace(known, nbytes=0) == replace(decode_meta(two_version_frame()), nbytes=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": 0},
        {"mask": 2},
        {"lengths": [4, 5]},
        {"lengths": [8]},
        {"lengths": [4, "4"]},
        {"lengths": [True, 7]},
        {"lengths": [4.0, 4.0]},
        {"lengths": 8},
        {"lengths": []},
        {"lengths": [2**63, 4]},
        {"prompt_length": 2},
        {"prompt_length": None},
        {"prompt_length": "3"},
        {"span_tokens": [2, 1, 2, 2]},
        {"roles": ["train"]},
        {"other": 1},
    ],
)
def test_a_wrong_frame_of_version_4_is_refused(changes: dict) -> None:
    with pytest.raises(WireError):
        decode_meta(frame_of_version_4(**changes))


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf, 0.2])
def test_the_row_of_a_bad_token_is_named(value: float, row: int) -> None:
    """Already in arrays of the wire's types, which are taken as they are, at the first and at the
    last token of a response.
    """
    for at in (0, -1):
        group = make_group(GroupTicket(0, 1, 0), values=(0.0, 1.0, 1.0), versions=(0, 1))
        for one in group.rows:
            one.behavior_logprobs = one.behavior_logprobs.astype(np.float32)
        group.rows[row].behavior_logprobs[at] = value
        with pytest.raises(WireError, match=f"sequence {row} has a log-prob"):
            encode_group(group)


def test_a_negative_token_is_refused_in_arrays_of_the_wires_type() -> None:
    for name in ("prompt", "response"):
        group = make_group(GroupTicket(0, 1, 0))
        ids = np.array([3, -2], np.int32)
        if name == "prompt":
            group.prompts = [ids]
        else:
            group.rows[1].response_ids = ids
        with pytest.raises(WireError, match="negative"):
            encode_group(group)


def test_arrays_that_are_not_contiguous_are_written_as_their_values() -> None:
    group = make_group(GroupTicket(0, 1, 0))
    wide = np.arange(8, dtype=np.int32)
    group.rows[0].response_ids, group.rows[1].response_ids = (wide[::4], wide[::-4].astype(">i4"))
    assert [row.response_ids.tolist() for row in decode_group(encode_group(group)).rows] == [
        [0, 4],
        [7, 3],
    ]


def test_bytes_after_the_arrays_are_refused() -> None:
    frame = two_version_frame()
    for extra in (b"\0", b"\0" * 8, b"\0" * 36):
        with pytest.raises(WireError, match=r"sampled, has .* bytes"):
            decode_meta(with_columns(frame + extra, lambda header: None))


def test_what_a_header_is_not() -> None:
    frame = two_version_frame()
    payload = frame[HEAD.size + HEAD.unpack_from(frame)[3] :]
    for value in (None, 7, [1, 2], "text", list(range(15)), [KEYS]):
        body = msgpack.packb(value) + payload
        with pytest.raises(WireError, match="not a group"):
            decode_meta(
                HEAD.pack(b"AGRP", WIRE_VERSION, 0, len(body) - len(payload), zlib.crc32(body))
                + body
            )
    for version in (3, WIRE_VERSION + 1):
        with pytest.raises(WireError, match=f"wire version {version}"):
            decode_meta(
                HEAD.pack(b"AGRP", version, *HEAD.unpack_from(frame)[2:]) + frame[HEAD.size :]
            )


@pytest.mark.parametrize("levels", [300, 900, 100_000])
def test_a_tower_of_lists_overflows_no_stack(levels: int) -> None:
    packed = b"\x81\xa5roles" + b"\x91" * levels + b"\x90"
    packed += b"\0" * (-len(packed) % 8)
    frame = HEAD.pack(b"AGRP", WIRE_VERSION, 0, len(packed), zlib.crc32(packed)) + packed
    assert peek_ticket(frame) is None
    with pytest.raises(WireError, match="msgpack" if levels > 1000 else "keys"):
        decode_meta(frame)


def test_announced_lengths_are_checked_before_arrays_are_made() -> None:
    for huge in (2**31, 2**62, 2**63, 2**64 - 1):
        for change in (
            lambda header, huge=huge: header.update(prompt_lengths=[huge]),
            lambda header, huge=huge: header.update(segments=[huge, 4, 0, 4]),
            lambda header, huge=huge: header.update(
                segments=[0, huge, 0, huge], span_tokens=[huge - 2, 2, huge - 2, 2]
            ),
        ):
            with pytest.raises(WireError, match=r"sampled, has .* bytes"):
                decode_meta(with_columns(two_version_frame(), change))


# ---- fuzz ----


def episodes_group() -> Group:
    """Two prompts, an episode of two rows, turns with rewards, and planes."""
    group = make_group(GroupTicket(13, 1, 2), values=(0.0, 1.0, 1.0), versions=(2, 3))
    group.prompts.append(np.arange(2))
    turns = [[(0, 4)], [(2, 1), (1, 3)], [(0, 3), (5, 1)]]
    for row, segments, (episode, prompt) in zip(
        group.rows, turns, ((0, 0), (1, 1), (1, 0)), strict=True
    ):
        row.segments, row.response_ids = segments, np.arange(sum(map(sum, segments)))
        row.episode, row.prompt, row.turn_rewards = episode, prompt, [0.5] * len(segments)
        row.finish_reason = "env_done"
    own = np.concatenate([row.response_ids[row.sampled] for row in group.rows]).tolist()
    kept = KeptSets.of([[token, *range(90, 90 + number)] for number, token in enumerate(own)])
    group.planes = kept.planes | {"routes": np.zeros((25, 3), np.uint8)}
    return group


def check_whole(group: Group, meta: GroupMeta) -> None:
    """Every rule of a group that was accepted."""
    assert tuple(map(len, group.prompts)) == meta.prompt_lengths and min(meta.prompt_lengths) >= 1
    assert {row.prompt for row in group.rows} == set(range(len(group.prompts)))
    assert len(group.rows) == len(meta.rows) >= 1
    assert sorted(place for places in meta.places for place in places) == [*range(len(meta.rows))]
    for known, row in zip(meta.rows, group.rows, strict=True):
        assert len(row.behavior_logprobs) == len(row.sampled) == known.length >= 1
        assert len(row.response_ids) == known.length + known.context == row.sampled[-1] + 1
        assert all(context >= 0 and sampled >= 1 for context, sampled in row.segments)
        assert np.isfinite(row.behavior_logprobs).all()
        assert row.versions[0].start == 0 and row.versions[-1].end == known.length
        assert all(span.start < span.end and span.policy_version >= 0 for span in row.versions)
        assert all(before.end == after.start for before, after in pairwise(row.versions))
        assert known.rewards and np.isfinite(list(known.rewards.values())).all()
        assert row.turn_rewards is None or len(row.turn_rewards) == len(row.segments)
        assert row.role in ("train", "baseline") and row.finish_reason in FINISH_REASONS
    for places in meta.places:
        assert (
            len({repr([getattr(group.rows[place], name) for name in FACTS]) for place in places})
            == 1
        )


def mutated(frame: bytes, rng: random.Random) -> bytes:
    """The frame with a few bytes changed, cut, repeated or inserted; half of the time with a
    checksum and length that match.
    """
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
            data[at : at + 4] = rng.choice(
                (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xdd\xff\xff\xff", b"\xc1\xc7\xd9\x80")
            )
        if not data:
            return b""
    if len(data) >= HEAD.size and rng.random() < 0.5:
        length = min(
            HEAD.unpack_from(frame)[3] + rng.choice((0, 0, len(data) - len(frame))), len(data)
        )
        body = bytes(data[HEAD.size :])
        data[: HEAD.size] = HEAD.pack(b"AGRP", WIRE_VERSION, 0, max(length, 0), zlib.crc32(body))
    return bytes(data)


@pytest.mark.parametrize("count", [FUZZ_FRAMES, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_mutated_frames_are_refused_or_whole(count: int) -> None:
    """No mutation raises anything but WireError, and what is accepted keeps every rule of a
    group.
    """
    rng = random.Random(5)
    frames = [
        frame_of(
            GroupTicket(index, 1, index % 3),
            values=(0.0, 1.0, 0.5)[: 1 + index % 3],
            versions=tuple(range(index % 3, index % 3 + 1 + index % 2)),
        )
        for index in range(12)
    ]
    mixed = make_group(
        GroupTicket(12, 2, 3),
        values=(None, 1.0),
        baselines=(0.5,),
        finish="length",
        times={"queued": 1.5, "done": 2.5},
    )
    mixed.rows[0].rewards = {"style": 1.0}
    frames += [encode_group(mixed), encode_group(episodes_group()), frame_of_version_4()]
    accepted = 0
    for _ in range(count):
        frame = mutated(rng.choice(frames), rng)
        peek_ticket(frame)
        try:
            meta = decode_meta(frame)
        except WireError:
            continue
        accepted += 1
        group = decode_group(frame)
        check_whole(group, meta)
    assert 0 < accepted < count / 2, "both outcomes occur"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=120)
@given(value=values, data=st.data())
def test_a_wrong_header_is_refused_or_harmless(value: object, data: st.DataObject) -> None:
    frame = frame_of(GroupTicket(3, 1, 2), versions=(2, 3), times={"start": 1.0})

    def change(header: dict) -> None:
        at: dict | list = header
        while True:
            key = (
                data.draw(st.sampled_from(sorted(at)))
                if isinstance(at, dict)
                else data.draw(st.integers(0, len(at) - 1))
            )
            if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
                at = at[key]
                continue
            at[key] = value
            return

    try:
        meta = decode_meta(with_columns(frame, change))
    except WireError:
        return
    numbers = [meta.group_id, meta.attempt, meta.policy_version, *meta.prompt_lengths]
    numbers += [
        number
        for row in meta.rows
        for number in (row.length, row.context, row.min_version, row.max_version)
    ]
    assert all(type(number) is int and number >= 0 for number in numbers)
    assert sum(meta.prompt_lengths) + sum(row.length + row.context for row in meta.rows) == 11
    assert all(np.isfinite(list(row.rewards.values())).all() for row in meta.rows)
