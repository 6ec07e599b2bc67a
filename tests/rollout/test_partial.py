"""Responses that a checkpoint keeps in part: told by the engine, written, read again, continued and
joined.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import ray

from async_grpo.config.load import ConfigError
from async_grpo.config.schema import Config
from async_grpo.replay.partial import PartialStart
from async_grpo.rollout.engine.base import Completion, Sampling
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.rollout.partial import (
    EMPTY,
    FILE,
    PartialError,
    PartialFile,
    PartialGeneration,
    encode,
    join,
    write_file,
)
from async_grpo.run import partial_rollouts
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.partial_rollouts import PartialCollector
from async_grpo.wire.codec import GroupTicket, decode_group
from async_grpo.wire.kept import KeptSets
from tests.support.engine_weights import learner_logprobs
from tests.support.listener import RecordingListener
from tests.support.models import write_model
from tests.support.rollout_parts import Parts, actor_of

PROMPT = [0, 1, 2]
WANTED = [
    Sampling(n=2, max_tokens=8, temperature=1.0),
    Sampling(n=1, max_tokens=8, temperature=0.0),
]
TICKET = GroupTicket(0, 1, 0)


def response(first: int, count: int, *labels: tuple[str, int, int], finish: str = "") -> Completion:
    """Tokens from `first` on, token t with log-prob -t / 100."""
    tokens = np.arange(first, first + count, dtype=np.int32)
    return Completion(tokens, (-tokens / 100).astype(np.float32), list(labels), finish, 1.0)


def same(one: Completion, other: Completion) -> bool:
    return (one.token_ids.tolist(), one.logprobs.tolist(), one.labels, one.finish_reason) == (
        other.token_ids.tolist(),
        other.logprobs.tolist(),
        other.labels,
        other.finish_reason,
    )


KNOWN = [
    response(3, 4, ("v0.0", 0, 3), ("v0.1", 3, 4)),
    response(3, 2, ("v0.0", 0, 2), finish="stop"),
    response(3, 3, ("v0.1", 0, 3)),
]


class Streams:
    """An engine whose responses stay unfinished until `go` is set; each then gets three more tokens
    of version 1.
    """

    def __init__(self) -> None:
        self.asked: dict[str, tuple[list[int], Sampling]] = {}
        self.partial: dict[str, dict[int, Completion]] = {}
        self.go = asyncio.Event()

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, *, name: str = ""
    ) -> list[Completion]:
        self.asked[name] = (prompt_ids, sampling)
        await self.go.wait()
        return [
            response(len(prompt_ids), 3, ("v0.1", 0, 3), finish="stop") for _ in range(sampling.n)
        ]

    def cut_off(self, name: str) -> int:
        return sum(len(one.token_ids) for one in self.so_far(name).values())

    def so_far(self, name: str) -> dict[int, Completion]:
        return self.partial.get(name, {})


async def started(engine: Streams, count: int) -> None:
    async with asyncio.timeout(10):
        while len(engine.asked) < count:
            await asyncio.sleep(0)


def test_the_parts_of_a_response_keep_their_log_probs_and_versions() -> None:
    whole = join(KNOWN[0], response(7, 3, ("v0.1", 0, 1), ("v0.2", 1, 3), finish="length"))
    assert same(
        whole, response(3, 7, ("v0.0", 0, 3), ("v0.1", 3, 5), ("v0.2", 5, 7), finish="length")
    )
    assert [(span.policy_version, span.start, span.end) for span in whole.versions] == [
        (0, 0, 3),
        (1, 3, 5),
        (2, 5, 7),
    ]
    assert same(join(response(3, 0), KNOWN[0]), KNOWN[0])


async def test_responses_are_told_while_they_grow() -> None:
    engine = Streams()
    growing = PartialGeneration(engine, TICKET, PROMPT, WANTED)
    assert growing.so_far() == [] and encode(growing, max_bytes=10**6) is None, (
        "there is nothing yet"
    )
    task = asyncio.create_task(growing.finish())
    await started(engine, 2)
    samples, greedy = engine.asked
    assert [engine.asked[name] for name in (samples, greedy)] == [
        (PROMPT, WANTED[0]),
        (PROMPT, WANTED[1]),
    ]
    engine.partial = {samples: {0: KNOWN[0], 1: KNOWN[1]}, greedy: {}}
    told = growing.so_far()
    assert same(told[0], KNOWN[0]) and same(told[1], KNOWN[1]) and len(told[2].token_ids) == 0
    beginning, packed = encode(growing, max_bytes=10**6)
    assert beginning == PartialStart(0, 1, 0, newest=1, responses=2, tokens=6)
    assert encode(growing, max_bytes=len(packed) - 1) is None, "what is too large is left out"
    engine.go.set()
    assert [len(one.token_ids) for one in await asyncio.wait_for(task, 10)] == [3, 3, 3]


async def test_responses_continue_behind_their_tokens_and_are_told_again() -> None:
    engine = Streams()
    growing = PartialGeneration(engine, TICKET, PROMPT, WANTED, prefixes=KNOWN)
    assert all(map(same, growing.so_far(), KNOWN)), (
        "a checkpoint before the first new token keeps what there was"
    )
    task = asyncio.create_task(growing.finish())
    await started(engine, 2)
    assert list(engine.asked.values()) == [
        ([*PROMPT, 3, 4, 5, 6], Sampling(n=1, max_tokens=4, temperature=1.0)),
        ([*PROMPT, 3, 4, 5], Sampling(n=1, max_tokens=5, temperature=0.0)),
    ]
    engine.partial = {next(iter(engine.asked)): {0: response(7, 1, ("v0.1", 0, 1))}}
    assert [len(one.token_ids) for one in growing.so_far()] == [5, 2, 3]
    engine.go.set()
    first, second, third = await asyncio.wait_for(task, 10)
    assert same(first, response(3, 7, ("v0.0", 0, 3), ("v0.1", 3, 7), finish="stop")) and same(
        second, KNOWN[1]
    )
    assert same(third, response(3, 6, ("v0.1", 0, 6), finish="stop"))
    ended = [response(3, 2, ("v0.0", 0, 2), finish="stop")]
    assert (
        all(
            map(
                same,
                await PartialGeneration(
                    engine, TICKET, PROMPT, WANTED[1:], prefixes=ended
                ).finish(),
                ended,
            )
        )
        and len(engine.asked) == 2
    )


# -- the file
# --------------------------------------------------------------------------------------------------


def file_of(
    directory: Path,
    known: list[Completion] = KNOWN,
    ticket: GroupTicket = TICKET,
    prompt: list[int] = PROMPT,
) -> Path:
    other = PartialGeneration(
        Streams(),
        GroupTicket(7, 2, 1),
        [9],
        [Sampling(n=1, max_tokens=8, temperature=1.0)],
        prefixes=KNOWN[2:],
    )
    growing = PartialGeneration(Streams(), ticket, prompt, WANTED[: len(known) - 1], prefixes=known)
    write_file(directory, [encode(one, max_bytes=10**6) for one in (other, growing)])
    return directory / FILE


def test_a_file_gives_back_what_was_written_once(tmp_path: Path) -> None:
    write_file(tmp_path, [])
    assert PartialFile.at(tmp_path / FILE) is None, "no file where there is nothing"
    file = PartialFile.at(file_of(tmp_path))
    assert file.starts == [PartialStart(7, 2, 1, 1, 1, 3), PartialStart(0, 1, 0, 1, 2, 9)]
    (tmp_path / FILE).unlink()
    assert all(map(same, file.take(TICKET, PROMPT, WANTED, Counter()), KNOWN)), (
        "its checkpoint was pruned"
    )
    assert file.take(TICKET, PROMPT, WANTED, Counter()) == [], "an attempt is continued once"
    file.close()


@pytest.mark.parametrize(
    ("ticket", "prompt", "wanted"),
    [
        (GroupTicket(0, 2, 0), PROMPT, WANTED),
        (GroupTicket(0, 1, 1), PROMPT, WANTED),
        (GroupTicket(5, 1, 0), PROMPT, WANTED),
        (TICKET, [0, 1], WANTED),
        (TICKET, PROMPT, WANTED[:1]),
        (TICKET, PROMPT, [Sampling(n=3, max_tokens=4, temperature=1.0)]),
    ],
)
def test_what_does_not_fit_the_ticket_is_not_continued(
    tmp_path: Path, ticket: GroupTicket, prompt: list[int], wanted: list[Sampling]
) -> None:
    assert PartialFile(file_of(tmp_path)).take(ticket, prompt, wanted, Counter()) == []


def test_a_file_that_is_not_one_is_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    good = path.read_bytes()
    for cut in range(len(good)):
        path.write_bytes(good[:cut])
        with pytest.raises(PartialError):
            PartialFile(path)
    for bad in (
        b"\xc1" * 40,
        msgpack.packb([[0] * 6]),
        msgpack.packb([[0, 1, 0, 0, 1, 3, -1]]),
        msgpack.packb({"a": 1}),
        b"\x91" * 5000,
        good + b"x",
    ):
        path.write_bytes(bad)
        with pytest.raises(PartialError):
            PartialFile(path)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": b"123"},
        {"tokens": b""},
        {"logprobs": np.full(3, np.nan, np.float32).tobytes()},
        {"logprobs": np.full(3, 0.5, np.float32).tobytes()},
        {"labels": [["v0.1", 0, 2]]},
        {"labels": [["self-check", 0, 3]]},
        {"labels": [["v0.1", 1, 3]]},
        {"labels": 4},
        {"finish": "abort"},
        {"tokens": np.full(3, -1, np.int32).tobytes()},
        {"labels": [["v0.1", 0, 3, 4]]},
    ],
)
def test_a_response_that_breaks_the_format_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    plain = {
        "tokens": np.arange(3, dtype=np.int32).tobytes(),
        "logprobs": np.full(3, -1, np.float32).tobytes(),
        "labels": [["v0.1", 0, 3]],
        "finish": "",
    }
    wanted, row = [Sampling(n=1, max_tokens=8, temperature=1.0)], PartialStart(0, 1, 0, 1, 1, 3)
    for one, fits in ((plain, True), (plain | change, False)):
        write_file(
            tmp_path,
            [
                (
                    row,
                    msgpack.packb(
                        {"prompt": np.asarray(PROMPT, np.int32).tobytes(), "responses": [one]}
                    ),
                )
            ],
        )
        counts = Counter()
        taken = PartialFile(tmp_path / FILE).take(TICKET, PROMPT, wanted, counts)
        assert [response.token_ids.tolist() for response in taken] == ([[0, 1, 2]] if fits else [])
        assert counts == ({"continued_tokens": 3} if fits else {"continued_unreadable": 1})


# -- the rollout actor
# ------------------------------------------------------------------------------------------------


class Continuing(Parts):
    """The fake engine of the rollout actor's tests, which keeps whole frames, and tells of
    nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.raw: list[bytes] = []

    def so_far(self, name: str) -> dict[int, Completion]:
        return {}

    async def put(self, actor_id: str, frames: list[Any]) -> list[Any]:
        self.raw += [bytes(frame) for frame in frames]
        return await super().put(actor_id, frames)


@pytest.mark.parametrize("damaged", [False, True])
async def test_an_actor_continues_the_group_that_its_ticket_names(
    tmp_path: Path, damaged: bool
) -> None:
    parts, path = Continuing(), file_of(tmp_path, KNOWN[:2])
    if damaged:
        data = bytearray(path.read_bytes())
        data[data.rindex(b"v0.0") + 1] = ord("x")
        path.write_bytes(bytes(data))
    actor = actor_of(parts)
    actor._partials = PartialFile(path)

    await asyncio.wait_for(actor.run(), 10)
    told = dict((await actor.final_report()).counters)
    first, second = sorted(map(decode_group, parts.raw), key=lambda group: group.group_id)
    assert [one.response_ids.tolist() for one in second.rows] == [[0, 1]] * 2, (
        "the other ticket begins anew"
    )
    assert (told.get("continued_tokens", 0), told.get("continued_unreadable", 0)) == (
        (0, 1) if damaged else (6, 0)
    )
    if damaged:
        assert [one.response_ids.tolist() for one in first.rows] == [[0, 1]] * 2
        return
    assert [one.response_ids.tolist() for one in first.rows] == [[3, 4, 5, 6, 0, 1], [3, 4]]
    assert first.rows[0].behavior_logprobs.tolist() == pytest.approx(
        [-0.03, -0.04, -0.05, -0.06, -1, -1]
    )
    assert [(span.policy_version, span.start, span.end) for span in first.rows[0].versions] == [
        (0, 0, 3),
        (1, 3, 4),
        (0, 4, 6),
    ]


async def test_an_actor_tells_of_what_it_holds_until_the_queue_has_it() -> None:
    parts, told = Continuing(), []
    put = parts.put

    async def asked_while_putting(actor_id: str, frames: list[Any]) -> list[Any]:
        told.extend(await actor.partials())
        return await put(actor_id, frames)

    parts.put = asked_while_putting
    actor = actor_of(parts)

    await asyncio.wait_for(actor.run(), 10)
    assert await actor.partials() == []
    assert {(one.group_id, one.responses, one.tokens) for one, _ in told} == {
        (0, 0, 4),
        (1, 0, 4),
    }, "complete, and not yet acknowledged"


# -- the driver
# --------------------------------------------------------------------------------------------------


class Told:
    """A rollout actor that answers, does not answer, or is dead."""

    def __init__(self, actor_id: str, answer: Any) -> None:
        self.actor_id, self.answer = actor_id, answer

    async def partials(self) -> Any:
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def config(**sections: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": 2},
            "model": {"path": "m"},
            "checkpoint": {"partial_rollouts": True},
            **sections,
        }
    )


async def test_a_checkpoint_gets_the_tickets_that_were_out_and_those_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_rollouts, "PATIENCE_S", 0.1)
    new, said = tmp_path / "new", []
    new.mkdir()
    old = sealed(tmp_path)
    parts = PartialCollector(config(), old, RecordingListener(said))
    assert parts.path == str(old / FILE) and parts.snapshot({"a": 1})["beginnings"][1].group_id == 0
    ours, other = PartialStart(3, 1, 0, 1, 2, 9), PartialStart(4, 1, 0, 1, 2, 9)
    rows = [
        [3, 1, 0, "in_flight", "a", None, None, 0],
        [4, 2, 1, "in_flight", "a", None, None, 0],
        [7, 1, 1, "waiting", "", None, None, 0],
        [0, 1, 0, "waiting", "", None, None, 0],
    ]
    engines = [
        Told("a", [(ours, b"packed"), (other, b"of an attempt that is over")]),
        Told("b", None),
        Told("c", ray.exceptions.RayActorError()),
        Told("d", [(ours, b"of an actor that lost the ticket")]),
    ]
    parts.begin(engines, {"ledger": {"groups": rows}})
    await asyncio.wait_for(parts.write(new), 10)
    written = PartialFile(new / FILE)
    assert [one.group_id for one in written.starts] == [3, 7] and written.packed(3) == b"packed"
    assert written.packed(7) == PartialFile(old / FILE).packed(7), (
        "what waits to be continued is carried over"
    )
    assert (
        parts.metrics() == {"cluster/partial_silent": 2.0}
        and "b did not report" in said[0] + said[1]
    ), said


def sealed(run_dir: Path, *, content: bytes | None = None) -> Path:
    """A checkpoint with beginnings in it, or with this instead."""
    directory = checkpoint.begin(run_dir, 1)
    path = file_of(directory)
    if content is not None:
        path.write_bytes(content)
    return checkpoint.commit(directory, {})


def test_a_file_that_the_checkpoint_does_not_know_or_that_is_of_another_format_is_left_alone(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    origin = checkpoint.commit(checkpoint.begin(tmp_path, 1), {})
    file_of(origin)
    assert PartialCollector(config(), origin, RecordingListener(said)).path is None and not said
    assert (
        PartialCollector(config(), sealed(tmp_path, content=b"other"), RecordingListener(said)).path
        is None
        and "generated from their beginning" in said[0]
    )


async def test_without_the_setting_nobody_is_asked(tmp_path: Path) -> None:
    parts = PartialCollector(
        config(checkpoint={"partial_rollouts": False}), sealed(tmp_path), RecordingListener()
    )
    parts.begin([Told("a", RuntimeError("asked"))], {})
    await parts.write(tmp_path / "nowhere")
    assert parts.path is None and parts.snapshot({"a": 1}) == {"a": 1} and parts.metrics() == {}


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"rollout": {"seeded": "on"}}, "a seeded response that is continued would be another one"),
        (
            {"replay": {"max_staleness": 0}},
            r"`rollout.seeded` is auto \(`replay.max_staleness` is 0\)",
        ),
        (
            {"replay": {"journal": {"enable": False}}},
            "only the journal knows which responses were still under way",
        ),
    ],
)
def test_settings_that_cannot_continue_responses_are_refused(
    sections: dict[str, Any], told: str
) -> None:
    assert config(
        rollout={"seeded": "off"}, replay={"max_staleness": 0}
    ).checkpoint.partial_rollouts
    with pytest.raises((ConfigError, ValueError), match=told):
        config(**sections)


# -- the engine
# --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(150)
@pytest.mark.slow
def test_a_real_engine_tells_and_continues_and_the_log_probs_are_those_of_the_model(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    directory = write_model(tmp_path / "model", positions=1024, ends=False)
    settings = Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": directory},
            "rollout": {"prompt_length": 32, "response_length": 700},
            "cluster": {"engine": {"max_num_seqs": 8}},
        }
    )
    prompt, wanted = (
        list(range(5, 17)),
        [
            Sampling(n=2, max_tokens=600, temperature=0.8),
            Sampling(n=1, max_tokens=600, temperature=0.0),
        ],
    )

    async def until(growing: PartialGeneration, tokens: int) -> list[Completion]:
        async with asyncio.timeout(60):
            while min((len(one.token_ids) for one in growing.so_far()), default=0) < tokens:
                await asyncio.sleep(0.01)
        return growing.so_far()

    async def scenario() -> tuple[list[Completion], list[Completion], list[Completion]]:
        engine = await VllmEngine.start(
            settings,
            model_dir=directory,
            device="cpu",
            backend="shared_memory",
            stop_token_ids=[],
            label="v0.3",
            seed=1,
        )
        try:
            growing = PartialGeneration(engine, TICKET, prompt, wanted)
            task = asyncio.create_task(growing.finish())
            await until(growing, 20)
            beginning, packed = encode(growing, max_bytes=10**6)
            assert not task.done() and beginning.newest == 3 and beginning.responses == 3
            write_file(tmp_path, [(beginning, packed)])
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert growing.so_far() == [], "a request that was aborted tells of nothing"
            known = PartialFile(tmp_path / FILE).take(TICKET, prompt, wanted, Counter())
            await engine._set_label("v0.4")
            short = [
                Sampling(
                    n=one.n,
                    max_tokens=max(len(start.token_ids) for start in known) + 40,
                    temperature=one.temperature,
                )
                for one in wanted
            ]
            again = PartialGeneration(engine, TICKET, prompt, short, prefixes=known)
            task = asyncio.create_task(again.finish())
            halfway = await until(again, min(len(start.token_ids) for start in known) + 3)
            return known, halfway, await asyncio.wait_for(task, 60)
        finally:
            engine.close()

    known, halfway, whole = asyncio.run(scenario())
    model = AutoModelForCausalLM.from_pretrained(directory).float().eval()
    for start, middle, one, temperature in zip(
        known, halfway, whole, (0.8, 0.8, None), strict=True
    ):
        at = len(start.token_ids)
        assert one.finish_reason == "length" and at < len(one.token_ids)
        for earlier in (start, middle):
            size = len(earlier.token_ids)
            assert (
                one.token_ids[:size].tolist() == earlier.token_ids.tolist()
                and one.logprobs[:size].tolist() == earlier.logprobs.tolist()
            )
        assert one.labels == [("v0.3", 0, at), ("v0.4", at, len(one.token_ids))]
        if temperature is not None:  # of a greedy choice the engine's log-prob is 0
            assert (
                np.abs(
                    one.logprobs - learner_logprobs(model, prompt, one.token_ids, temperature)
                ).max()
                < 1e-4
            )


# ---- sets of which tokens were sampled ----


def with_sets(one: Completion) -> Completion:
    """Each token with one that says of which part of the response it is."""
    sets = [[token, 50 + len(one.token_ids)] for token in one.token_ids.tolist()]
    return replace(one, kept=KeptSets.of(sets))


def sets_of(one: Completion) -> list[list[int]] | None:
    parts = one.kept and one.kept.split([1] * len(one.token_ids))
    return None if parts is None else [part.ids.tolist() for part in parts]


def test_sets_of_earlier_tokens_are_those_of_their_weights() -> None:
    start, rest = with_sets(KNOWN[2]), with_sets(response(6, 2, ("v0.2", 0, 2), finish="stop"))
    whole = join(start, rest)
    assert sets_of(whole) == [[3, 53], [4, 53], [5, 53], [6, 52], [7, 52]]
    assert sets_of(join(EMPTY, rest)) == sets_of(rest)
    assert join(KNOWN[0], KNOWN[2]).kept is None


def test_sets_are_in_the_file_and_other_responses_have_the_bytes_that_they_had(
    tmp_path: Path,
) -> None:
    engine = Streams()
    told = [with_sets(KNOWN[0]), KNOWN[1], with_sets(KNOWN[2])]
    growing = PartialGeneration(engine, TICKET, PROMPT, WANTED, prefixes=told)
    plain = PartialGeneration(engine, TICKET, PROMPT, WANTED, prefixes=KNOWN)
    beginning, packed = encode(growing, max_bytes=10**6)
    _, without = encode(plain, max_bytes=10**6)
    assert b"kept" in packed and b"kept" not in without
    write_file(tmp_path, [(beginning, packed)])
    found = PartialFile(tmp_path / FILE).take(TICKET, PROMPT, WANTED, Counter())
    assert all(map(same, found, told))
    assert [sets_of(one) for one in found] == [sets_of(one) for one in told]


@pytest.mark.parametrize(
    "kept",
    [
        [b"\1\0\1\0\1\0", np.array([3, 4, 6], np.int32).tobytes()],  # a token outside its set
        [b"\1\0\1\0", np.array([3, 4], np.int32).tobytes()],
        [b"\1\0\1\0\2\0", np.array([3, 4, 5], np.int32).tobytes()],
        [b"\1\0\1\0\1\0"],
        [b"\1\0\1", b""],
        [4, b""],
        7,
    ],
)
def test_damaged_sets_are_as_good_as_no_response(tmp_path: Path, kept: Any) -> None:
    good = {
        "tokens": np.array([3, 4, 5], np.int32).tobytes(),
        "logprobs": np.full(3, -1, np.float32).tobytes(),
        "labels": [["v0.1", 0, 3]],
        "finish": "",
    }
    fits = [b"\1\0\1\0\1\0", np.array([3, 4, 5], np.int32).tobytes()]
    one = [Sampling(n=1, max_tokens=8, temperature=1.0)]
    start = PartialStart(0, 1, 0, 1, 1, 3)
    for sets, count in ((fits, 1), (kept, 0)):
        prompt = np.asarray(PROMPT, np.int32).tobytes()
        packed = msgpack.packb({"prompt": prompt, "responses": [good | {"kept": sets}]})
        write_file(tmp_path, [(start, packed)])
        counts: Counter[str] = Counter()
        found = PartialFile(tmp_path / FILE).take(TICKET, PROMPT, one, counts)
        assert len(found) == count and counts["continued_unreadable"] == 1 - count
