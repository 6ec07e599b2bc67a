"""The look inside a run: the history that a journal tells is the queue's own, and the command shows
it, live, resumed or damaged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from async_grpo.config.command_line import Parser
from async_grpo.replay import history as history_module
from async_grpo.replay import journal as journal_module
from async_grpo.replay.history import History, Start, read_history
from async_grpo.replay.journal import Segment, segment_path, segments
from async_grpo.replay.ledger import Ledger, State
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.resume import open_queue
from async_grpo.tools.inspect import command
from async_grpo.tools.inspect import groups as inspection_module
from async_grpo.wire.codec import GroupTicket, WireError, decode_meta, encode_group
from tests.support import verbs
from tests.support.frames import frame_of, make_group
from tests.support.journal_life import RULES, Life, journal_in, queue_settings

STATES = [state.value for state in State]


def journal_of(directory: Path) -> Path:
    return directory / "journal"


def queue_in(run_dir: Path, **settings: Any) -> ReplayQueue:
    """The queue of a run that begins."""
    return open_queue(queue_settings(**settings), journal_in(journal_of(run_dir)))


def spoil(path: Path, at: int) -> None:
    """Turn the bits of a byte round."""
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 255
    path.write_bytes(bytes(damaged))


# ---- the history is the queue's own ----


def compare(history: History, life: Life) -> None:
    """What the journal tells is what the living queue has."""
    ledger: Ledger = life.queue._ledger
    assert (
        history.ledger.snapshot() == ledger.snapshot()
        and history.notes == []
        and history.unlisted == {}
    )
    told = Counter(record.state.value for record in history.groups.values())
    assert {state: told[state] for state in STATES} == ledger.counts()
    assert {step: set(ids) for step, ids in history.steps.items()} == {
        step: set(ids) for step, ids in life.batches.items()
    }
    for group_id, record in history.groups.items():
        if (known := ledger.record(group_id)) is not None and record.state != State.SKIPPED:
            assert (record.attempt, record.state, record.step) == known
        for attempt, _ in record.frames:
            assert history.frame(group_id, attempt) == life.frames[group_id, attempt]
        if record.state == State.REJECTED:
            assert [attempt for attempt, _ in record.frames][-1:] == [record.attempt]
    for entry in ledger.entries.values():
        assert history.groups[entry.group_id].policy_version == entry.policy_version
    for ids in life.batches.values():
        for group_id, attempt in ids.items():
            assert (
                history.frame(group_id)
                == history.frame(group_id, attempt)
                == life.frames[group_id, attempt]
            )


@pytest.mark.parametrize(("order", "on_stale"), RULES)
async def test_at_every_moment_the_history_is_that_of_the_living_queue(
    tmp_path: Path, order: str, on_stale: str
) -> None:
    states: Counter[str] = Counter()

    for seed in range(5):
        life = Life(tmp_path / str(seed), 2000 + seed, order=order, on_stale=on_stale)
        life.forgets = False
        for _ in range(150):
            await life.call()
            chance = life.random.random()
            if chance < 0.03:
                await life.die()
            elif chance < 0.05 and (life.checkpoints or not life.batches):
                await life.resume(
                    life.random.choice(life.checkpoints) if life.checkpoints else None
                )
            elif chance < 0.2:
                compare(read_history(tmp_path / str(seed)), life)
        states.update(await life.queue.counts())
        await life.finish()
        await life.queue.close()
        compare(read_history(tmp_path / str(seed)), life)
    assert all(
        states[name] for name in ("trained", "rejected", "late", "invalid", "forfeited", "restarts")
    ), states


async def test_what_deleted_segments_told_is_counted_not_listed_and_nothing_else_changes(
    tmp_path: Path,
) -> None:
    hidden = unknown = 0

    for seed in range(12):
        life = Life(tmp_path / str(seed), 3000 + seed)
        for _ in range(200):
            await life.call()
        if life.checkpoints:
            keep_checkpoint(tmp_path, life.checkpoints[0].snapshot)
        history, ledger = read_history(tmp_path / str(seed)), life.queue._ledger
        assert history.ledger.snapshot() == ledger.snapshot()
        for group_id, record in history.groups.items():
            known = ledger.record(group_id)
            assert record.state in (None, known[1]) or record.state == State.SKIPPED
        assert {entry.group_id for entry in ledger.entries.values()} <= set(history.groups)
        assert (
            history.steps.items()
            <= {step: tuple(sorted(ids)) for step, ids in life.batches.items()}.items()
        )
        missing = ledger.issued - len(history.groups)
        assert history.unlisted == ({"deleted": missing} if missing else {})
        hidden += missing
        unknown += sum(record.state is None for record in history.groups.values())
    assert hidden > 0, "no segment was deleted"


def keep_checkpoint(run_dir: Path, snapshot: dict) -> None:
    """What of a run's oldest checkpoint says which segments others may have deleted."""
    path = run_dir / "checkpoints" / "step_000005" / "queue.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(snapshot))


async def restarted(life: Life, segment_bytes: int, *, calls: int) -> None:
    """So many calls without a checkpoint, to segments of this size."""
    life.journal = replace(life.journal, segment_bytes=segment_bytes)
    life.checkpoint = life.wait
    await life.die()
    for _ in range(calls):
        await life.call()


async def test_the_bytes_that_a_dying_writer_left_are_a_note_and_every_prefix_is_a_history(
    tmp_path: Path,
) -> None:
    """Cut at any byte, as a reader may find a file that is being written: some events, in order,
    and a ledger that adds up.
    """

    life = Life(tmp_path / "whole", 1, max_attempts=3)
    await restarted(life, 2**28, calls=60)
    number = segments(tmp_path / "whole")[-1]
    data = segment_path(tmp_path / "whole", number).read_bytes()
    cut, issued = tmp_path / "cut", -1
    cut.mkdir()
    keep_checkpoint(tmp_path, {"segment": number})
    for size in range(Segment(tmp_path / "whole", number).size, len(data) + 1, 7):
        segment_path(cut, number).write_bytes(data[:size])
        history = read_history(cut)
        assert (
            history.ledger.issued >= issued
            and [note for note in history.notes if "cut off" not in note] == []
        )
        issued = history.ledger.issued
        assert Counter(record.state.value for record in history.groups.values()) == +Counter(
            history.ledger.counts()
        )
        for record in history.groups.values():
            for attempt, _ in record.frames:
                assert history.meta(record.group_id, attempt).attempt == attempt
    assert issued > 2


async def test_damage_is_a_note_where_it_is_and_the_next_snapshot_is_right_again(
    tmp_path: Path,
) -> None:
    life = Life(tmp_path, 4, max_attempts=3, retire_at=None, problem=None)
    life.forgets = False
    await restarted(life, 3000, calls=150)
    numbers, ledger = segments(tmp_path), life.queue._ledger
    assert len(numbers) > 3
    path = segment_path(tmp_path, numbers[1])
    whole = path.read_bytes()
    segment = Segment(tmp_path, numbers[1])
    start, records = segment.size, list(segment.records())
    path.write_bytes(whole[: start + 30] + b"\xff" * 8 + whole[start + 38 :])
    history = read_history(tmp_path)
    assert history.ledger.snapshot() == ledger.snapshot()
    assert (
        len(history.notes) == 1 and "damaged" in history.notes[0] and path.name in history.notes[0]
    )
    missing = set(range(ledger.issued)) - set(history.groups)
    assert missing and history.unlisted == {"damaged": len(missing)}
    path.write_bytes(b"something else")
    history = read_history(tmp_path)
    assert history.ledger.snapshot() == ledger.snapshot()
    assert history.unlisted == {"damaged": ledger.issued - len(history.groups)}
    path.unlink()
    without = read_history(tmp_path)
    assert without.unlisted == {"missing": ledger.issued - len(history.groups)}
    assert f"{path} is missing" in without.notes

    put = next(record for record in records if record.place is not None)
    path.write_bytes(whole)
    spoil(path, put.place.offset + put.place.length - 1)
    history, group_id = read_history(tmp_path), put.body[1]
    assert history.notes == []
    with pytest.raises(WireError):
        history.group(group_id, put.body[2])


async def test_another_start_is_in_the_history_and_what_it_took_back_is_not(tmp_path: Path) -> None:
    settings = queue_settings(filter=None)
    queue = open_queue(settings, journal_in(tmp_path, "first"))
    await train(queue, 1)
    checkpoint = await queue.snapshot()
    await train(queue, 2)
    before = read_history(tmp_path)
    open_queue(replace(settings, trained_steps=0), journal_in(tmp_path, "second"), snapshot=None)
    assert checkpoint["ledger"]["training_step"] == 1
    before, after = before, read_history(tmp_path)
    assert (before.steps, before.starts) == ({1: (0, 1), 2: (2, 3)}, [Start(0, 0)])
    assert (after.steps, after.starts) == ({}, [Start(0, 0), Start(1, 0)])
    assert {record.state for record in before.groups.values()} == {State.TRAINED, State.TRAINING}
    assert {group_id: (record.state, record.step) for group_id, record in after.groups.items()} == {
        group_id: (State.READY, None) for group_id in range(4)
    }


async def test_a_last_attempt_is_told_by_the_journal_itself(tmp_path: Path) -> None:
    queue = open_queue(queue_settings(max_attempts=1), journal_in(tmp_path))
    await queue.fail("a", await queue.acquire("a", 0, [], 1), "no answer")
    assert read_history(tmp_path).groups[0].state == State.FAILED
    queue.begin_segment()
    told = read_history(tmp_path)
    assert (told.groups[0].state, told.groups[0].reason, told.ledger.counts()["failed"]) == (
        State.FAILED,
        "no answer",
        1,
    )


async def test_settings_that_change_at_a_resume_do_not_change_what_was_before(
    tmp_path: Path,
) -> None:
    settings = queue_settings(max_attempts=3, filter=None)
    queue = open_queue(settings, journal_in(tmp_path, "first"))
    await queue.fail("a", await queue.acquire("a", 0, [], 1), "no answer")
    await train(queue, 1, want=3)
    queue = open_queue(replace(settings, max_attempts=1), journal_in(tmp_path, "second"))
    history = read_history(tmp_path)
    assert history.notes == [] and history.ledger.snapshot() == queue._ledger.snapshot()


async def test_when_the_run_ends_the_batch_in_training_is_not_unused(tmp_path: Path) -> None:
    queue = open_queue(queue_settings(filter=None), journal_in(tmp_path))
    await train(queue, 1, want=3)
    await queue.close()
    history = read_history(tmp_path)
    assert [record.state for record in history.groups.values()] == [
        State.TRAINING,
        State.TRAINING,
        State.UNUSED,
    ] and history.ledger.over


async def test_frames_stay_in_the_files_until_somebody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = open_queue(
        queue_settings(total_steps=40, filter=None), journal_in(tmp_path, segment_bytes=1500)
    )
    for step in range(1, 31):
        await train(queue, step)
        await queue.live(step)
    opened = []
    for module in (history_module, journal_module):
        monkeypatch.setattr(
            module,
            "Segment",
            lambda directory, number: opened.append(number) or Segment(directory, number),
        )
    history = read_history(tmp_path)
    assert len(opened) == len(segments(tmp_path)) > 2 * journal_module.OPEN_SEGMENTS
    opened.clear()
    for ids in history.steps.values():
        assert [decode_meta(history.frame(group_id)).group_id for group_id in ids] == list(ids)
    assert (
        len(opened) == len(set(opened))
        and len(history._results._open) == journal_module.OPEN_SEGMENTS
    )
    segment_path(tmp_path, 1).unlink()
    assert history.group(history.steps[1][0]) is None
    with pytest.raises(LookupError, match="cannot be read"):
        history.frame(history.steps[1][0])
    for args in ((10_000,), (0, 7)):
        with pytest.raises(LookupError, match="no result of group"):
            history.frame(*args)


async def train(queue: ReplayQueue, step: int, *, want: int = 2) -> None:
    """Produce so many groups and take the batch of `step`."""
    tickets = await queue.acquire("a", queue._ledger.live, [], want)
    await queue.put("a", [frame_of(ticket) for ticket in tickets])
    assert await queue.get_batch(step) is not None


# ---- the command ----


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in the middle of step 2, with a group in every state that a person may look for."""
    directory = tmp_path_factory.mktemp("run")
    asyncio.run(a_run(journal_of(directory)))
    (directory / "config.yaml").write_text(
        "replay: {max_attempts: 2}\ntask: {rewards: {}}\nmodel: {path: null}\n"
    )
    for step, word in ((9, "old"), (10, "new")):
        place = directory / f"checkpoints/step_{step:06d}/hf"
        place.mkdir(parents=True)
        save_tokenizer(place, *(f"{word}{token}" for token in range(4)), "line\n\x1b[31mred")
    return directory


def save_tokenizer(place: Path, *words: str) -> None:
    """A tokenizer that has these words."""
    known = {word: token for token, word in enumerate([*words, "?"])}
    Tokenizer(WordLevel(known, "?")).save(str(place / "tokenizer.json"))


async def a_run(directory: Path) -> None:
    queue = open_queue(queue_settings(max_attempts=2), journal_in(directory))
    first = await queue.acquire("actor-0.0", 0, [], 4)  # groups 0 to 3
    await queue.live(0, "d0")

    def frame(ticket: GroupTicket, seconds: float = 1.0, **options: Any) -> bytes:
        return frame_of(
            ticket,
            times={"started": 100.0, "generated": 100.0, "scored": 100.0 + seconds},
            **options,
        )

    await queue.put(
        "actor-0.0",
        [
            frame(first[0], 3.0, actor="actor-0.0"),
            frame(first[1], values=(1.0, 1.0), actor="actor-0.0"),
            frame(first[2], 2.0, values=(0.0, 0.5), actor="actor-0.0", finish="length"),
        ],
    )
    await queue.fail("actor-0.0", [first[3]], "verifier \x1b[31mgone")
    second = await queue.acquire("actor-1.0", 0, [], 2)  # group 3 again, and 4
    assert [ticket.group_id for ticket in second] == [3, 4]
    await queue.put("actor-0.0", [frame(first[3]), frame(first[0])])  # late, duplicate
    await queue.put("actor-1.0", [frame(second[1])[:-1]])  # invalid
    await queue.fail("actor-1.0", [second[1]], "timeout")
    assert await queue.get_batch(1) is not None  # 0 and 2
    assert await queue.get_batch(2) is None
    await queue.put(
        "actor-1.0", [frame(second[0], 4.0, versions=(0, 1), values=(0.25, 1.0), actor="actor-1.0")]
    )
    await queue.live(1, "d1")
    third = await queue.acquire("actor-1.0", 1, [], 2)  # group 4 again, and 5
    five = make_group(third[1], values=(0.0, 0.25), actor="actor-1.0")
    five.rows[1].response_ids = np.array([3, 2])
    await queue.put("actor-1.0", [encode_group(five)])
    assert [meta.group_id for meta in (await queue.get_batch(2)).groups] == [3, 5]
    await queue.fail("actor-1.0", [third[0]], "timeout")  # group 4 failed
    await queue.acquire("actor-2.0", 1, [], 1)  # group 6


@pytest.fixture
def look(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    def run(*args: str, directory: Path = run_dir) -> str:
        assert verbs.inspect([str(directory), *args]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        assert all(character.isprintable() or character == "\n" for character in captured.out)
        return captured.out

    return run


def rows_of(look, *args: str, **where: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in look("--json", *args, **where).splitlines()]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], [6, 5, 4, 3, 2, 1, 0]),
        (["--limit", "2"], [6, 5]),
        (["--limit", "0", "--reverse"], [0, 1, 2, 3, 4, 5, 6]),
        (["--state", "trained"], [2, 0]),
        (["--state", "rejected", "--state", "failed"], [4, 1]),
        (["--state", "in_flight"], [6]),
        (["--step", "1"], [2, 0]),
        (["--steps", "1-2"], [5, 3, 2, 0]),
        (["--steps", "2-9"], [5, 3]),
        (["--step", "7"], []),
        (["--version", "0"], [3, 2, 1, 0]),
        (["--version", "1"], [5, 3]),
        (["--version", "2"], []),
        (["--actor", "actor-1.0"], [5, 4, 3]),
        (["--actor", "actor-?.*"], [6, 5, 4, 3, 2, 1, 0]),
        (["--actor", "actor"], []),
        (["--min-reward", "0.5"], [3, 1, 0]),
        (["--max-reward", "0.5"], [5, 2, 0]),
        (["--min-reward", "0.2", "--max-reward", "0.3"], [2]),
        (["--sort", "reward", "--limit", "3"], [1, 3, 0]),
        (["--sort", "reward", "--reverse", "--limit", "2"], [5, 2]),
        (["--sort", "length", "--limit", "1"], [3]),
        (["--sort", "staleness", "--limit", "1"], [3]),
        (["--sort", "seconds", "--limit", "3"], [3, 0, 2]),
        (["--state", "trained", "--min-reward", "0.5"], [0]),
    ],
)
def test_each_filter_and_order(look, args: list[str], expected: list[int]) -> None:
    assert [row["group_id"] for row in rows_of(look, *args)] == expected


def test_the_facts_of_a_group(look) -> None:
    three = json.loads(look("--json", "--steps", "2", "--max-reward", "0.7", "--min-reward", "0.6"))
    assert {name: three[name] for name in three if name != "finished_at"} == {
        "group_id": 3,
        "attempt": 2,
        "state": "training",
        "step": 2,
        "ticket_version": 0,
        "versions": [0, 1],
        "staleness_min": 0,
        "staleness_max": 1,
        "reward": 0.625,
        "rewards": {"correct": 0.625, "format": 1.0},
        "accuracy": 1.0,
        "responses": 2,
        "length_min": 4,
        "length_mean": 4.0,
        "length_max": 4,
        "truncated": 0,
        "seconds": 4.0,
        "actor": "actor-1.0",
        "reason": "",
    }
    by_id = {facts["group_id"]: facts for facts in rows_of(look)}
    assert [by_id[group_id]["reason"] for group_id in (1, 4, 6)] == ["all_right", "timeout", ""]
    assert [by_id[group_id]["reward"] for group_id in (1, 4, 6)] == [1.0, None, None]
    assert by_id[2]["truncated"] == 2


def test_rewards_are_weighted_as_the_run_weights_them(look, run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(journal_of(run_dir), journal_of(tmp_path))
    (tmp_path / "config.yaml").write_text("task: {rewards: {correct: 2.0, format: 0.5}}\n")
    zero = json.loads(look("--json", "--limit", "1", "--reverse", directory=tmp_path))
    assert (zero["reward"], zero["rewards"]) == (1.5, {"correct": 0.5, "format": 1.0})


def test_the_ledger_says_what_became_of_everything(look) -> None:
    text = " ".join(look("--ledger").split())
    for part in (
        "run first start steps",
        "1 trained, step 2 in training",
        "version 1, weights d1",
        "7 issued: 1 in flight, 2 training, 2 trained, 1 rejected, 1 failed",
        "rejected 1 all_right",
        "failed 1 timeout",
        "3 attempts lost",
        "1 late, 1 duplicate, 1 invalid",
        "the last one: invalid, an unreadable frame from actor-1.0: checksum mismatch",
    ):
        assert part in text, (part, text)
    told = json.loads(look("--ledger", "--json"))
    assert parsed(["x"]).limit == 20
    assert (
        sum(told["states"].values()) == told["issued"] == 7
        and told["rejected"] == {"all_right": 1}
        and told["digest"] == "d1"
    )


def test_off_a_terminal_every_group_is_one_line_and_empty_columns_are_left_out(look) -> None:
    lines = look().splitlines()
    title = next(index for index, line in enumerate(lines) if line == "7 groups, newest first")
    header, rows = lines[title + 1].split(), lines[title + 2 :]
    assert (
        " ".join(header)
        == "group attempt state step ticket sampled staleness correct format accuracy tokens "
        "truncated seconds actor reason"
    )
    assert [int(row.split()[0]) for row in rows] == [6, 5, 4, 3, 2, 1, 0]
    three = "3 2 training 2 v0 v0-1 0-1 0.62 1.00 100% 4 4.00 actor-1.0"
    assert " ".join(rows[3].split()) == three
    assert not any(line.endswith(" ") for line in lines)
    assert "attempt" not in look("--step", "1").splitlines()[-3]


async def test_a_result_that_expired_is_not_taken_for_that_of_the_next_attempt(
    look, tmp_path: Path
) -> None:
    settings = queue_settings(rollout_batch_size=1, order="ready", on_stale="expire", filter=None)
    queue = open_queue(settings, journal_in(journal_of(tmp_path)))
    (old,) = await queue.acquire("slow", 0, [], 1)
    for step in (1, 2):
        await train(queue, step, want=1)
        await queue.live(step)
    await queue.put("slow", [frame_of(old)])
    assert await queue.get_batch(3) is None
    facts = json.loads(look("--json", "--state", "waiting", directory=tmp_path))
    assert (facts["reward"], facts["reason"]) == (0.5, "too old for step 3")
    assert "1 expiration" in look("--ledger", directory=tmp_path)
    await queue.acquire("b", 2, [], 1)
    facts = json.loads(look("--json", "--state", "in_flight", directory=tmp_path))
    assert (facts["attempt"], facts["reward"], facts["actor"]) == (2, None, "b")
    assert "what follows is the result of attempt 1\n" in look("--group", "0", directory=tmp_path)


def test_a_whole_group_with_text_from_the_newest_checkpoint(look, run_dir: Path) -> None:
    text = look("--group", "3")
    assert "prompt, 3 tokens\n    new0 new1 new2\n" in text and "old" not in text
    assert (
        "response 1: correct 0.25, format 1, 4 tokens by v0 [0, 2), v1 [2, "
        "4), stop\n    new0 new1 new2 new3\n" in text
    )
    assert "an earlier attempt: verifier \\x1b[31mgone" in text
    old = str(run_dir / "checkpoints/step_000009/hf")
    assert "    old0 old1 old2\n" in look("--group", "3", "--tokenizer", old)
    whole = json.loads(look("--group", "3", "--json"))
    assert (whole["group_id"], whole["prompt_ids"], whole["prompt"]) == (
        3,
        [0, 1, 2],
        "new0 new1 new2",
    )
    assert (
        whole["rollouts"][1]["versions"] == [[0, 0, 2], [1, 2, 4]]
        and whole["rollouts"][1]["rewards"]["correct"] == 1.0
    )
    rejected = look("--group", "1")
    assert "all_right" in rejected and "response 1: correct 1" in rejected
    assert "its responses are not in the journal" in look("--group", "4")


async def test_an_episode_is_shown_turn_by_turn(look, tmp_path: Path) -> None:
    queue = queue_in(tmp_path, rollout_batch_size=1)
    (ticket,) = await queue.acquire("a", 0, [], 1)
    group = make_group(ticket, versions=(0, 0))
    for row in group.rows:
        row.segments, row.response_ids = [(0, 1), (2, 3)], np.arange(6)
        row.turn_rewards = [0.25, 1.0]
    await queue.put("a", [encode_group(group)])
    text = look("--group", "0", directory=tmp_path)
    assert (
        "  turn 1, 1 tokens, reward 0.25\n    0\n  environment, 2 tokens\n    1 2\n"
        "  turn 2, 3 tokens, reward 1\n    3 4 5\n" in text
    )
    whole = json.loads(look("--group", "0", "--json", directory=tmp_path))
    assert [(row["segments"], row["turn_rewards"]) for row in whole["rollouts"]] == [
        ([[0, 1], [2, 3]], [0.25, 1.0])
    ] * 2


def test_without_a_tokenizer_a_group_is_shown_as_token_ids(
    look, run_dir: Path, tmp_path: Path, capsys
) -> None:
    shutil.copytree(journal_of(run_dir), journal_of(tmp_path))
    assert "prompt, 3 tokens\n    0 1 2\n" in look("--group", "3", directory=tmp_path)
    assert verbs.inspect([str(tmp_path), "--text"]) == 2
    assert "no tokenizer in" in capsys.readouterr().err


def test_text_beside_the_groups_is_the_best_response_on_one_line(
    look, tmp_path: Path, run_dir: Path
) -> None:
    save_tokenizer(tmp_path, "a\nb", "\x1b[2J", "c", "d")
    lines = look("--step", "2", "--text", "--tokenizer", str(tmp_path)).splitlines()
    assert lines[-1].endswith("a\\nb \\x1b[2J c  a\\nb \\x1b[2J c d") and lines[-2].endswith(
        "a\\nb \\x1b[2J c  d c"
    )
    facts = json.loads(
        look("--step", "2", "--limit", "1", "--text", "--json", "--tokenizer", str(tmp_path))
    )
    assert facts["prompt"] == "a\nb \x1b[2J c" and len(facts["texts"]) == 2
    assert "\n    a\n    b \\x1b[2J c\n" in look("--group", "3", "--tokenizer", str(tmp_path))


def test_frames_are_read_only_for_groups_that_everything_else_selects(
    look, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = History._place
    monkeypatch.setattr(
        History,
        "_place",
        lambda self, group_id, attempt: read.append(group_id) or original(self, group_id, attempt),
    )
    for args, expected in (
        (["--ledger"], []),
        (["--limit", "2"], [6, 5]),
        (["--step", "1", "--version", "0"], [2, 0]),
        (["--version", "2", "--steps", "1-9"], []),
        (["--actor", "actor-1.*", "--limit", "1"], [5]),
    ):
        read.clear()
        look("--json", *args)
        assert read == expected, args


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--state", "trainde"], "invalid choice: 'trainde'"),
        (["--steps", "3:4"], "neither a step nor a range of steps"),
        (["--group", "70"], "group 70 was never issued, only 0 to 6 were"),
        (["--sort", "size"], "invalid choice: 'size'"),
        (["--steps", "21-20"], "'21-20' has no steps: 21 comes after 20"),
        (["--step", "0"], "learner steps are counted from 1"),
        (
            ["--min-reward", "0.5", "--max-reward", "0.25"],
            "no reward is at least 0.5 (--min-reward) and at most 0.25 (--max-reward)",
        ),
        (["--limit", "-1"], "--limit: '-1' is not a whole number"),
        (["--group", "-1"], "--group: '-1' is not a whole number"),
        (["--version", "-1"], "--version: '-1' is not a whole number"),
        (["--min-reward", "nan"], "'nan' is not a number"),
        (
            ["--ledger", "--step", "1"],
            "options that choose or sort groups cannot be combined with --ledger",
        ),
        (["--ledger", "--sort", "reward"], "cannot be combined with --ledger"),
        (["--group", "3", "--state", "ready"], "cannot be combined with --group"),
        (["--group", "3", "--actor", "a"], "cannot be combined with --group"),
        (["--group", "3", "--min-reward", "0"], "cannot be combined with --group"),
        (["--ledger", "--group", "0"], "--group cannot be combined with it"),
        (["--ledger", "--text"], "--text cannot be combined with it"),
        (["--text", "--tokenizer", "/nowhere"], "no tokenizer in /nowhere"),
    ],
)
def test_a_wrong_option_is_one_sentence_and_exit_code_2(
    run_dir: Path, capsys, args: list[str], sentence: str
) -> None:
    assert failed(capsys, str(run_dir), *args).count("\n") == 1
    assert sentence in failed(capsys, str(run_dir), *args)


def test_a_wrong_directory_is_one_sentence_and_exit_code_2(tmp_path: Path, capsys) -> None:
    assert failed(capsys, str(tmp_path / "x")) == f"error: {tmp_path / 'x'} is no directory\n"
    assert "the run is still starting, or replay" in failed(capsys, str(tmp_path))
    journal_of(tmp_path).mkdir()
    segment_path(journal_of(tmp_path), 1).write_bytes(b"AGRJ")
    assert "is no segment of a journal" in failed(capsys, str(tmp_path))


def parsed(words: list[str]) -> argparse.Namespace:
    """The options that these words give, none of which contradicts another."""
    parser = Parser(prog="inspect")
    command.arguments(parser)
    options = parser.read(words)
    assert command._contradiction(options) is None
    return options


def failed(capsys, *args: str) -> str:
    try:
        code = verbs.inspect(list(args))
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and captured.err.startswith("error: ")
    return captured.err


def test_options_that_agree_are_taken() -> None:
    options = parsed(
        ["x", "--steps", "3-3", "--min-reward", "0.5", "--max-reward", "0.5", "--limit", "0"]
    )
    assert (options.steps, options.min_reward, options.max_reward, options.limit) == (
        (3, 3),
        0.5,
        0.5,
        0,
    )
    assert parsed(["x", "--group", "0", "--json", "--tokenizer", "y"]).group == 0
    assert parsed(["x", "--ledger", "--json"]).ledger


@pytest.mark.parametrize(
    ("args", "title"),
    [
        ([], "7 groups, newest first"),
        (["--limit", "7"], "7 groups, newest first"),
        (["--limit", "2"], "2 of 7 groups, newest first"),
        (
            ["--steps", "1-2", "--limit", "3", "--reverse"],
            "4 of 7 groups match, oldest first, 3 shown (--limit 3)",
        ),
        (["--steps", "1-2", "--limit", "4"], "4 of 7 groups match, newest first"),
        (["--state", "failed"], "1 of 7 groups matches, newest first"),
        (
            ["--version", "0", "--limit", "2"],
            "4 of 7 groups match, newest first, 2 shown (--limit 2)",
        ),
        (["--actor", "nobody"], "no group matches, of 7 that are listed"),
        (
            ["--max-reward", "0.5", "--limit", "1", "--sort", "reward"],
            "3 of 7 groups match, largest reward first, 1 shown (--limit 1)",
        ),
        (["--actor", "actor-1.0"], "3 of 7 groups match, newest first"),
    ],
)
def test_the_title_says_how_many_groups_match(look, args: list[str], title: str) -> None:
    assert titles(look(*args)) == [title]


def test_results_are_not_read_in_great_numbers_only_to_count_them(
    look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection_module, "COUNTED", 2)
    assert titles(look("--version", "0", "--limit", "2")) == [
        "at least 2 of 7 groups match, newest first, 2 shown (--limit 2)"
    ]
    assert titles(look("--version", "0", "--limit", "5")) == ["4 of 7 groups match, newest first"]
    assert titles(look("--steps", "1-2", "--limit", "3")) == [
        "4 of 7 groups match, newest first, 3 shown (--limit 3)"
    ]


async def test_counts_and_reasons_are_in_words(look, tmp_path: Path) -> None:
    """One group is not called groups; a reason is quoted as it is."""
    queue = queue_in(tmp_path, max_attempts=1)
    tickets = await queue.acquire("a", 0, [], 1)
    await queue.fail("a", tickets, "rollout.prompt_length is 3")
    text = look(directory=tmp_path)
    assert titles(text) == ["1 group, newest first"] and "1 segment," in text
    assert "1 attempt lost\n" in text
    for reason in ("rollout.prompt_length is 3", "no_answer"):
        await queue.fail("a", await queue.acquire("a", 0, [], 1), reason)
    text = look("--ledger", directory=tmp_path)
    assert "failed    2 rollout.prompt_length is 3; 1 no_answer\n" in text
    assert "3 attempts lost\n" in text


def titles(text: str) -> list[str]:
    """What stands between the ledger and the table."""
    return text.split("\n\n")[1].splitlines()[:1]


# ---- what is not there ----


@pytest.fixture(scope="module")
def old_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in step 5 that was resumed from step 2. Its journal tells of step 4, whose results are
    gone, and of step 5 with results.
    """
    directory = tmp_path_factory.mktemp("old")

    async def live() -> None:
        settings = queue_settings(filter=None)
        queue = open_queue(settings, journal_in(journal_of(directory), "first"))
        for step in (1, 2):
            await train(queue, step)
            checkpoint = await queue.snapshot()
            await queue.live(step)
        queue = open_queue(
            replace(settings, trained_steps=2),
            journal_in(journal_of(directory), "second"),
            snapshot=checkpoint,
        )
        for step in (3, 4):
            await train(queue, step)
            await queue.live(3)
        await queue.snapshot()
        await train(queue, 5)
        checkpoint = await queue.snapshot()
        await queue.forget(segment=checkpoint["segment"], step=4)
        keep_checkpoint(directory, checkpoint)

    asyncio.run(live())
    assert len(segments(journal_of(directory))) == 2
    return directory


def test_what_was_deleted_is_told_as_the_normal_thing_it_is(look, old_run: Path) -> None:
    lines = look("--ledger", directory=old_run).splitlines()
    assert "listed    the groups of steps 4 to 5" in lines
    assert (
        "note      6 groups are counted but not listed: their segments were deleted at "
        "checkpoints (normal)" in lines
    )
    assert not any("damaged" in line for line in lines)
    told = json.loads(look("--ledger", "--json", directory=old_run))
    assert (told["listed_steps"], told["unlisted"]) == ([4, 5], {"deleted": 6})
    assert "run       start 2, resumed from step 2" in lines, "it outlives its segment"
    assert read_history(journal_of(old_run)).starts == [Start(1, 2)]


async def test_starts_of_a_run_are_told_in_words(look, tmp_path: Path) -> None:
    settings, directory = queue_settings(filter=None), journal_of(tmp_path)
    open_queue(settings, journal_in(directory, "first"))
    queue = open_queue(settings, journal_in(directory, "second"))
    await train(queue, 1)
    checkpoint = await queue.snapshot()
    open_queue(
        replace(settings, trained_steps=1), journal_in(directory, "third"), snapshot=checkpoint
    )
    run = "run       start 3, resumed from step 1 (before: start 2, resumed from the beginning)"
    assert run in look("--ledger", directory=tmp_path).splitlines()


def test_a_row_without_its_result_says_so(look, old_run: Path) -> None:
    rows = rows_of(look, "--reverse", directory=old_run)
    gone = (4, None, "its result is not in the journal")
    told = [(row["step"], row["reward"], row["reason"]) for row in rows]
    assert told == [gone, gone, (5, 0.5, ""), (5, 0.5, "")]
    assert look("--group", "6", directory=old_run).count("journal") == 1


def test_a_group_whose_end_is_damaged_says_so(run_dir: Path) -> None:
    history = read_history(journal_of(run_dir))
    history.groups[2].state = None
    facts = inspection_module.group_facts(history, history.groups[2], {})
    assert (facts["state"], facts["reason"], facts["reward"]) == (
        "unknown",
        "how it ended was in a damaged part of the journal",
        0.25,
    )


async def test_every_group_that_had_a_result_says_that_it_is_gone(look, tmp_path: Path) -> None:
    """Trained before the snapshot, in training, and completed but never trained."""

    queue = queue_in(tmp_path, filter=None, max_staleness=2)
    await train(queue, 1)
    await train(queue, 2)
    tickets = await queue.acquire("a", 0, [], 2)
    await queue.put("a", [frame_of(tickets[0])])
    queue.begin_segment()
    await queue.close()
    segment_path(journal_of(tmp_path), 1).unlink()
    rows = rows_of(look, "--reverse", directory=tmp_path)
    gone = "its result is not in the journal"
    assert [(row["state"], row["reason"]) for row in rows] == [("trained", gone)] * 2 + [
        ("training", gone)
    ] * 2 + [("unused", gone), ("unused", "")]


async def test_an_earlier_attempt_is_named_also_beside_a_result_that_cannot_be_read(
    look, tmp_path: Path
) -> None:
    queue = queue_in(tmp_path, filter=None)
    await queue.fail("a", await queue.acquire("a", 0, [], 1), "no answer")
    await train(queue, 1)
    assert "an earlier attempt: no answer\n" in look("--group", "0", directory=tmp_path)
    place = read_history(journal_of(tmp_path)).groups[0].frames[-1][1]
    spoil(segment_path(journal_of(tmp_path), 1), place.offset + place.length - 1)
    text = look("--group", "0", directory=tmp_path)
    assert "its result cannot be read" in text and "an earlier attempt: no answer\n" in text


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            ["--step", "3"],
            "the groups of step 3 are no longer in the journal, which has steps 4 to 5",
        ),
        (
            ["--steps", "1-3"],
            "the groups of steps 1 to 3 are no longer in the journal, which has steps 4 to 5",
        ),
        (["--step", "6"], "step 6 is not trained yet (the newest is 5)"),
        (["--steps", "6-9"], "steps 6 to 9 are not trained yet (the newest is 5)"),
        (["--version", "6"], "no group matches: there is no version 6 (the newest is 5)"),
        (["--state", "rejected"], "no group matches, of 4 that are listed; 6 more are not"),
        (
            ["--step", "5", "--state", "ready"],
            "no group matches, of 4 that are listed; 6 more are not",
        ),
    ],
)
def test_where_no_group_matches_it_says_why(
    look, old_run: Path, args: list[str], sentence: str
) -> None:
    assert titles(look(*args, directory=old_run)) == [sentence]
    assert look("--json", *args, directory=old_run) == ""


def test_where_a_group_is_not_listed_any_more_it_says_why(old_run: Path, capsys) -> None:
    assert failed(capsys, str(old_run), "--group", "0") == (
        "error: group 0 is one of 6 that are counted but not listed: their segments were "
        "deleted at checkpoints (normal)\n"
    )


async def test_a_run_at_its_beginning_and_at_its_end_says_why_there_is_nothing(
    look, tmp_path: Path
) -> None:
    queue = queue_in(tmp_path, filter=None)
    assert (
        titles(look(directory=tmp_path))
        == titles(look("--step", "1", directory=tmp_path))
        == ["no groups yet"]
    )
    await queue.acquire("b", 0, [], 1)
    assert titles(look("--step", "1", directory=tmp_path)) == [
        "step 1 is not trained yet (no step is)"
    ]
    await queue.forfeit("b")
    await train(queue, 1)
    await queue.live(1)
    await queue.close()
    assert titles(look("--step", "7", directory=tmp_path)) == [
        "there is no step 7: the run ended with step 1"
    ]


async def test_a_step_whose_events_are_damaged_is_not_called_deleted(look, tmp_path: Path) -> None:
    queue = queue_in(tmp_path, filter=None, total_steps=12)
    for step in range(1, 5):
        await train(queue, step)
        await queue.live(step)
        queue.begin_segment()
    path = segment_path(journal_of(tmp_path), 3)
    spoil(path, Segment(journal_of(tmp_path), 3).size + 30)

    def told(step: int) -> str:
        (title,) = titles(look("--step", str(step), directory=tmp_path))
        return title

    assert told(3) == "the groups of step 3 were in a damaged part of the journal"
    text = look("--ledger", directory=tmp_path)
    assert (
        "2 groups are counted but not listed: the journal is damaged where it describes them"
        in text
    )
    assert "checkpoints" not in text and "\nlisted" not in text
    segment_path(journal_of(tmp_path), 1).unlink()
    assert told(3) == "the groups of step 3 were in a damaged part of the journal"
    assert told(1) == "the groups of step 1 were in a segment of the journal that is missing"
    path.write_bytes(b"")
    assert told(1) == "the groups of step 1 were in a damaged part of the journal"


async def test_groups_from_before_the_journal_are_told_as_such(look, tmp_path: Path) -> None:
    settings = queue_settings(filter=None)
    queue = open_queue(settings)
    await train(queue, 1)
    checkpoint = await queue.snapshot()
    await queue.live(1)
    open_queue(
        replace(settings, trained_steps=1), journal_in(journal_of(tmp_path)), snapshot=checkpoint
    )
    assert "2 groups are counted but not listed: they are from before this journal began" in look(
        "--ledger", directory=tmp_path
    )


async def test_only_a_run_that_wrote_no_end_and_grows_no_more_is_pointed_out(
    look, run_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(journal_of(run_dir), journal_of(tmp_path))
    path = segment_path(journal_of(tmp_path), segments(journal_of(tmp_path))[-1])
    end = "no end recorded: the run was ended abruptly, or it hangs"
    path.touch()
    assert end not in look("--ledger", directory=tmp_path)
    os.utime(path, (time.time() - 90, time.time() - 90))
    first = look("--ledger", directory=tmp_path).splitlines()[0]
    assert first.startswith("journal") and first.endswith(end)
    await queue_in(tmp_path / "ended").close()
    os.utime(segment_path(journal_of(tmp_path / "ended"), 1), (0, 0))
    text = look("--ledger", directory=tmp_path / "ended")
    assert "the run is over" in text and "no end recorded" not in text


def test_a_narrow_terminal_shows_whole_numbers_in_fewer_columns(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("COLUMNS", "84")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert verbs.inspect([str(run_dir), "--step", "2"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[" in out and "seconds" not in out and "0.62" in out and "training" in out


def test_the_command_needs_no_right_to_write_and_leaves_nothing(
    run_dir: Path, tmp_path: Path
) -> None:
    """As a process of its own, into a pipe that nobody reads to the end."""
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    for path in [copy, *before]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    script = f"{sys.executable} -m async_grpo inspect {copy} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONUTF8": "0"},
    )
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before
    for path in [copy, *before]:
        path.chmod(0o755)


def test_looking_loads_neither_torch_nor_ray_nor_transformers(run_dir: Path) -> None:
    code = (
        "import sys; from async_grpo.cli import main; main(sys.argv[1:]); "
        "print([name for name in ('torch', 'ray', 'transformers', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(run_dir), "--group", "3"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "response 1" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


async def test_each_kind_of_loss_is_called_by_its_name(look, tmp_path: Path) -> None:
    """The last record, and a segment that a checkpoint begins with."""
    snapshots = []

    queue = queue_in(tmp_path, filter=None, total_steps=12)
    for step in range(1, 4):
        await train(queue, step)
        await queue.live(step)
        snapshots.append(await queue.snapshot())
    keep_checkpoint(tmp_path, snapshots[0])
    number = segments(journal_of(tmp_path))[-2]
    path = segment_path(journal_of(tmp_path), number + 1)
    whole, end = path.read_bytes(), segment_path(journal_of(tmp_path), number)
    last = end.read_bytes()
    path.unlink()
    end.write_bytes(last[:-2] + bytes([last[-2] ^ 1]) + last[-1:])
    text = look("--ledger", directory=tmp_path)
    assert "damaged at byte" in text and "the last one)" in text and "being written" not in text
    end.write_bytes(last[:-2])
    text = look("--ledger", directory=tmp_path)
    assert "is being written, or was cut off" in text and "damaged" not in text
    end.write_bytes(last)
    keep_checkpoint(tmp_path, snapshots[2])
    assert f"note      {path} is missing" in look("--ledger", directory=tmp_path)
    keep_checkpoint(tmp_path, snapshots[0])
    path.write_bytes(whole)
    end.unlink()
    text = look("--ledger", directory=tmp_path)
    assert f"{end} is missing" in text and "deleted at checkpoints" not in text
    assert "a segment of the journal that no checkpoint deleted is missing" in text
    keep_checkpoint(tmp_path, snapshots[2])
    assert "deleted at checkpoints (normal)" in look("--ledger", directory=tmp_path)
