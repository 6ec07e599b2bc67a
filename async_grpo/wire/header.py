"""The header of a frame: which columns it has, and what each may hold.

Runs in: wherever groups are decoded. Hides every rule that needs no token. Invariant: whatever
msgpack gave, the result is a group's facts or a WireError.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, get_args

from async_grpo.wire.groups import FINISH_REASONS, GroupMeta, Role, RowMeta, WireError

INTEGER, TEXT, NUMBER = frozenset({int}), frozenset({str}), frozenset({int, float})
_KEYS = frozenset(
    {
        "group_id",
        "attempt",
        "policy_version",
        "run_epoch",
        "actor_id",
        "times",
        "prompt_lengths",
        "row_prompts",
        "episodes",
        "segment_counts",
        "segments",
        "roles",
        "verdicts",
        "finish_reasons",
        "reward_names",
        "rewards",
        "turn_rewards",
        "span_counts",
        "span_versions",
        "span_tokens",
        "plane_names",
        "plane_types",
        "plane_widths",
    }
)
_NUMBER_OR_NONE = NUMBER | {type(None)}
_ROLES, _FINISH_REASONS = frozenset(get_args(Role)), frozenset(FINISH_REASONS)


def facts(header: dict[str, Any], *, nbytes: int) -> GroupMeta:
    """Return what a header says of its group; nbytes: of the frame. Raises WireError."""
    if header.keys() != _KEYS:
        raise WireError(
            "the header has other keys than those of a group; missing: "
            f"{sorted(_KEYS - header.keys())}"
        )
    segments = _segments(header)
    n_rows = len(segments.lengths)
    rows = map(
        RowMeta,
        _one_of(header, "roles", n_rows, _ROLES),
        segments.lengths,
        _rewards(header, n_rows),
        _finite(header, "verdicts", n_rows),
        _one_of(header, "finish_reasons", n_rows, _FINISH_REASONS),
        _versions(header, segments.lengths),
        segments.contexts,
        segments.turns,
        _row_prompts(header, n_rows),
        segments.rewards,
    )
    if type(header["actor_id"]) is not str:
        raise WireError("actor_id must be a string")
    meta = GroupMeta(
        natural(header, "group_id"),
        natural(header, "attempt"),
        natural(header, "policy_version"),
        header["actor_id"],
        tuple(header["prompt_lengths"]),
        tuple(rows),
        _times(header["times"]),
        nbytes,
        natural(header, "run_epoch"),
        tuple(column(header, "episodes", INTEGER)),
    )
    if meta.forks:
        _check_episodes(meta)
    return meta


def _check_episodes(meta: GroupMeta) -> None:
    """Rows of an episode agree in what is known of it, and episodes are numbered as they come."""
    firsts: list[tuple[Any, ...]] = []
    if len(meta.forks) != len(meta.rows):
        raise WireError(f"episodes has {len(meta.forks)} entries instead of {len(meta.rows)}")
    for index, (number, row) in enumerate(zip(meta.forks, meta.rows, strict=True)):
        facts = row.role, row.rewards, row.verdict, row.finish_reason
        if number == len(firsts):
            firsts.append(facts)
        if not 0 <= number < len(firsts) or firsts[number] != facts:
            raise WireError(
                f"sequence {index} is of episode {number}, which is not the next one, or whose "
                "first sequence has another role, reward, correctness or finish reason"
            )
    if len(firsts) == len(meta.rows):
        raise WireError("episodes must be empty where every sequence is its own episode")


def _row_prompts(header: dict[str, Any], n_rows: int) -> list[int]:
    """Which prompt every row answers; all prompts are answered."""
    count = len(header["prompt_lengths"])
    if count == 1:
        column(header, "row_prompts", INTEGER, 0)
        return [0] * n_rows
    prompts = column(header, "row_prompts", INTEGER, n_rows)
    if set(prompts) != set(range(count)):
        raise WireError(f"row_prompts must name each of the {count} prompts, and no others")
    return prompts


class _Segments(NamedTuple):
    """The turns of n rows: sampled and context tokens, number of turns and their rewards."""

    lengths: list[int]
    contexts: list[int]
    turns: list[int]
    rewards: list[tuple[float, ...] | None]


def _segments(header: dict[str, Any]) -> _Segments:
    prompts = column(header, "prompt_lengths", INTEGER)
    turns = column(header, "segment_counts", INTEGER)
    segments = column(header, "segments", INTEGER)
    if min(prompts, default=0) < 1 or not turns:
        raise WireError(
            f"{len(prompts)} prompts and {len(turns)} sequences; there must be at least 1 of both, "
            "and at least 1 token of a prompt"
        )
    contexts, lengths = segments[::2], segments[1::2]
    if min(turns) < 1 or 2 * sum(turns) != len(segments) or min(contexts) < 0 or min(lengths) < 1:
        raise WireError(
            f"{len(segments)} segments for {len(turns)} sequences; every sequence has turns, each "
            "with a number of context tokens and at least 1 sampled token"
        )
    given = _finite(header, "turn_rewards", len(lengths)) if header["turn_rewards"] != [] else []
    values = [value for value in given if value is not None]
    if len(values) != len(given):
        raise WireError("turn_rewards must be numbers")
    if len(lengths) == len(turns) and not values:  # the usual case, and so the fast one
        return _Segments(lengths, contexts, turns, [None] * len(turns))
    cuts = list(pairwise([0, *accumulate(turns)]))
    return _Segments(
        [sum(lengths[start:stop]) for start, stop in cuts],
        [sum(contexts[start:stop]) for start, stop in cuts],
        turns,
        [tuple(values[start:stop]) if values else None for start, stop in cuts],
    )


def _times(times: Any) -> dict[str, float]:
    if (
        type(times) is not dict
        or not TEXT.issuperset(map(type, times))
        or not NUMBER.issuperset(map(type, times.values()))
    ):
        raise WireError("times must be numbers by name")
    if not all(map(math.isfinite, times.values())):
        raise WireError("times must be finite")
    return {name: float(value) for name, value in times.items()}


def column(
    header: dict[str, Any], name: str, types: frozenset[type], count: int | None = None
) -> list[Any]:
    """Return a flat list of `count` values, all exactly of these types. A boolean is not an
    integer.
    """
    values = header[name]
    if type(values) is not list or not types.issuperset(map(type, values)):
        raise WireError(
            f"{name} must be a list of {' or '.join(sorted(kind.__name__ for kind in types))}"
        )
    if count is not None and len(values) != count:
        raise WireError(f"{name} has {len(values)} entries instead of {count}")
    return values


def _one_of(header: dict[str, Any], name: str, count: int, allowed: frozenset[str]) -> list[str]:
    values = column(header, name, TEXT, count)
    if not allowed.issuperset(values):
        index = next(index for index, value in enumerate(values) if value not in allowed)
        raise WireError(
            f"sequence {index} has {values[index]!r:.40} in {name}, not one of {sorted(allowed)}"
        )
    return values


def _finite(header: dict[str, Any], name: str, count: int) -> list[float | None]:
    """Return a column of finite numbers, or None where a row has none."""
    values = column(header, name, _NUMBER_OR_NONE, count)
    # the filter takes None away, and zeros, which are finite
    if not all(map(math.isfinite, filter(None, values))):
        raise WireError(f"{name} must be finite")
    return [None if value is None else float(value) for value in values]


def _rewards(header: dict[str, Any], n_rows: int) -> list[dict[str, float]]:
    names = column(header, "reward_names", TEXT)
    width = len(names)
    if width < 1 or len(set(names)) != width:
        raise WireError("reward_names must name at least one component, and none of them twice")
    values = _finite(header, "rewards", n_rows * width)
    columns = [values[start : start + n_rows] for start in range(0, len(values), n_rows)]
    rewards = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    if None in values:
        rewards = [
            {name: value for name, value in row.items() if value is not None} for row in rewards
        ]
        for index, (row, role) in enumerate(zip(rewards, header["roles"], strict=True)):
            if not row and role != "demonstration":
                raise WireError(f"sequence {index} has no reward")
    return rewards


def _versions(header: dict[str, Any], lengths: list[int]) -> list[tuple[tuple[int, int], ...]]:
    """(version, tokens) of each span of each row; they cover the tokens that were sampled."""
    counts = column(header, "span_counts", INTEGER, len(lengths))
    versions = column(header, "span_versions", INTEGER)
    tokens = column(header, "span_tokens", INTEGER, len(versions))
    if min(counts) < 1 or sum(counts) != len(versions) or min(versions) < 0 or min(tokens) < 1:
        raise WireError(
            f"{len(versions)} version spans for {len(lengths)} sequences, or a negative "
            "version, or a span without tokens"
        )
    if tokens == lengths and len(counts) == len(tokens):
        return [(span,) for span in zip(versions, tokens, strict=True)]
    bounds = list(accumulate(lengths))
    stops, covered = list(accumulate(counts)), list(accumulate(tokens))
    for index, (stop, bound) in enumerate(zip(stops, bounds, strict=True)):
        if covered[stop - 1] != bound:
            raise WireError(f"sequence {index} has version spans that do not cover its tokens")
    spans = list(zip(versions, tokens, strict=True))
    return [tuple(spans[stop - count : stop]) for count, stop in zip(counts, stops, strict=True)]


def natural(header: dict[str, Any], name: str) -> int:
    """Return a natural number. Raises WireError."""
    value = header[name]
    if type(value) is not int or value < 0:
        raise WireError(f"{name} must be a natural number")
    return value
