"""Weights on nodes without a learner: what a relay's segment says that it has, it has, whatever
happens on the way; and no more goes over the network than has to.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from async_grpo.cluster import relays
from async_grpo.errors import SetupError
from async_grpo.run.connection import Connection
from async_grpo.run.preflight.run_check import check_run
from async_grpo.runtime.storage import reach
from async_grpo.weights import delta, files, shared_memory
from async_grpo.weights.deliveries import ATTEMPTS
from async_grpo.weights.files import ChainPart, WeightFiles, remove_files
from async_grpo.weights.shared_memory import changes
from async_grpo.weights.transport import Announcement, TornTransfer
from tests.support.relay_nodes import HOME, Claim, RelayDied, RelayNodes, configured

NODES = ["n1", "n2", "n3"]
WORDS = 3008
BLOCK = 2**16


def changed(data: np.ndarray, share: float, random: np.random.Generator) -> np.ndarray:
    """The weights after a step that changed this share of their words."""
    words = data.view(np.uint16).copy()
    places = random.random(len(words)) < share
    words[places] ^= random.integers(1, 2**16, int(places.sum()), dtype=np.uint16)
    return words.view(np.uint8)


def weights(seed: int, words: int = WORDS) -> tuple[np.ndarray, np.random.Generator]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, 2 * words, dtype=np.uint8), random


@pytest.fixture(params=["ray", "memory", "directory"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """How weights reach other nodes: `weight_sync.files`."""
    ways = {"memory": f"memory://{uuid.uuid4().hex}", "directory": f"{tmp_path}/shared"}
    return ways.get(request.param)


def stored(address: str) -> list[str]:
    """Names of all files at an address."""
    storage, root = reach(address)
    storage.invalidate_cache()
    return sorted(name.rpartition("/")[2] for name in storage.find(root))


# ---- whatever happens
# --------------------------------------------------------------------------------------------------


class Trouble:
    """Damages what is on its way to nodes, once each time that it is `due`."""

    def __init__(self, world: RelayNodes, random: np.random.Generator, address: str | None) -> None:
        self._world, self._random, self._address = world, random, address
        self._seen: list[Any] = []
        self._hidden: dict[str, bytes] = {}
        self.due, self.deltas = False, 0

    def before(self, node: str, method: str, given: list[Any]) -> None:
        """See `RelayNodes.before`."""
        if method == "offer" and self.due and self._random.random() < 0.3:
            self.due = False  # the learner begins the next version, in the other segment
            self._world.segments.begin(10**6)
        if method != "write":
            return
        chain, data, _ = given
        self.deltas += chain[-1].base is not None
        if self.due and self._address is None:
            self.due = False
            given[1] = self._damaged(data, bool(chain[-1].base))
        elif self.due:
            self.due = False
            self._damage_file(chain)
        if data is not None and chain[-1].base is not None:
            self._seen.append(data.copy())

    def _damaged(self, data: np.ndarray, is_delta: bool) -> np.ndarray:
        kind = self._random.integers(3)
        if kind == 0 or not is_delta:
            return data[: 2 + self._random.integers(len(data) - 2)]
        if kind == 1 and self._seen:
            return self._seen[self._random.integers(len(self._seen))]
        other = data.copy()
        other[self._random.integers(len(data))] ^= 1 << self._random.integers(8)
        return other

    def _damage_file(self, chain: list[ChainPart]) -> None:
        assert self._address is not None
        storage, root = reach(self._address)
        path = f"{root}/{chain[self._random.integers(len(chain))].name}"
        whole = storage.cat_file(path)
        others = [name for name in storage.find(root) if name != path]
        kind = self._random.integers(5)
        if kind == 0:
            storage.pipe_file(path, whole[: self._random.integers(len(whole))])
        elif kind == 1:
            at = int(self._random.integers(len(whole)))
            storage.pipe_file(path, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        elif kind == 2 and others:  # of another version, start or run
            storage.pipe_file(path, storage.cat_file(others[self._random.integers(len(others))]))
        elif kind == 3:
            storage.pipe_file(path, whole.replace(self._world.key.encode(), b"another"[:6]))
        else:  # it shows late
            storage.rm_file(path)
            self._hidden[path] = whole

    def sleep(self, seconds: float) -> None:
        """Show what was hidden, while a relay waits."""
        assert self._address is not None
        for path, whole in self._hidden.items():
            reach(self._address)[0].pipe_file(path, whole)
        self._hidden.clear()


async def deliver(world: RelayNodes, news: Announcement, nodes: list[str]) -> list[Claim]:
    """What nodes have at the end, as publications are repeated; all of them have it."""
    claims: list[Claim] = []
    for _ in range(ATTEMPTS):
        asked = [world.fetch(news, node) for node in nodes for _ in range(2)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        claims += [one for one in found if not isinstance(one, BaseException)]
        pairs = zip(nodes, found[::2], found[1::2], strict=True)
        nodes = [node for node, *both in pairs if any(isinstance(one, Exception) for one in both)]
        world.relays._deadline_s = 30.0
        if not nodes:
            return claims
    raise AssertionError(f"{nodes} never had {news.label}: {found}")


async def schedule(place: Path, seed: int, address: str | None, monkeypatch: Any) -> int:
    """One run; how many deltas were sent."""
    words = int(np.random.default_rng(seed).choice([96, WORDS, BLOCK + 32], p=[0.5, 0.47, 0.03]))
    data, random = weights(seed, words)
    sync = {"delta": str(random.choice(["auto", "always", "off"], p=[0.3, 0.6, 0.1]))}
    config = configured(place / "run", files=address, **sync)
    world = RelayNodes(place, nbytes=2 * words, key=f"{seed:06d}", config=config)
    trouble = Trouble(world, random, address)
    world.before, world.relays._deadline_s = trouble.before, 30.0
    monkeypatch.setattr(files.time, "sleep", trouble.sleep)
    claims: list[Claim] = []
    with world.patched():
        for _ in range(random.integers(3, 7)):
            hung = False
            for handle in world.handles.values():
                if random.random() < 0.07:
                    handle.start_again()
                elif not hung and random.random() < 0.001:
                    hung = handle.hangs = True
                    world.relays._deadline_s = 0.1
            if random.random() < 0.07:
                world.restart_learner()
            data = changed(data, float(random.choice([0, 1e-3, 0.02, 0.2, 1])), random)
            news = world.stage(data)
            here = [node for node in NODES if hung or random.random() < 0.7]
            trouble.due = random.random() < 0.3
            found = await deliver(world, news, here)
            assert all([world.holds(claim) for claim in found])
            if here and random.random() < 0.15:  # an engine joins
                other = world.stage(changed(data, 1.0, random), apart=True)
                found += await deliver(world, other, here[:1])
                found += await deliver(world, news, here[:1])
                assert all([world.holds(claim) for claim in found[-4:]])
            trouble.due = False
            claims += found
            for claim in claims:
                world.holds(claim)
        await world.relays.close()
    return trouble.deltas


@pytest.mark.parametrize("count", [60, pytest.param(334, marks=pytest.mark.slow)])
async def test_what_a_segment_says_that_it_has_it_has(
    way: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random schedules, 1,000 in all: nodes come, miss versions and are started again, as the
    learner is; engines join; what is on its way is damaged, swapped, repeated, late, or of another
    start.
    """
    deltas = 0
    async with asyncio.timeout(240):
        for seed in range(count):
            deltas += await schedule(tmp_path, seed, way, monkeypatch)
    assert deltas > 1.8 * count


# ---- how much
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def world(way: str | None, tmp_path: Path) -> RelayNodes:
    return RelayNodes(tmp_path, nbytes=2 * WORDS, files=way, delta="always")


def watched(world: RelayNodes) -> list[tuple[str, list[ChainPart]]]:
    """(node, parts of the chain) of every write, as they come."""
    seen: list[tuple[str, list[ChainPart]]] = []

    def before(node: str, method: str, given: list[Any]) -> None:
        if method == "write":
            seen.append((node, given[0]))

    world.before = before
    return seen


async def test_a_version_is_encoded_once_for_many_nodes(
    world: RelayNodes, way: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, random = weights(1)
    encoded = list[int]()
    encode = delta.encode
    monkeypatch.setattr(delta, "encode", lambda *given: (encoded.append(1), encode(*given))[1])
    seen, nodes = watched(world), [f"n{number}" for number in range(20)]
    with world.patched():
        await deliver(world, world.stage(data), nodes)
        for versions in range(1, 4):
            data = changed(data, 0.01, random)
            await deliver(world, world.stage(data), nodes)
            assert len(encoded) == versions
    offers = [call for call in world.calls if call[1] == "offer"]
    assert offers == [(HOME, "offer")] * 4
    assert len(seen) == 4 * 20, "and every node is told once, however many engines ask"
    assert [chain[-1].base is None for _, chain in seen] == [True] * 20 + [False] * 60
    assert all(chain[-1].nbytes < 0.06 * world.nbytes for _, chain in seen[20:])
    if way is not None:
        assert [name.rpartition(".")[2] for name in stored(way)] == ["whole"] + ["delta"] * 3


async def test_off_sends_all_of_it_as_ever(way: str | None, tmp_path: Path) -> None:
    world = RelayNodes(tmp_path, nbytes=2 * WORDS, files=way, delta="off")
    data, random = weights(2)
    seen = watched(world)
    with world.patched():
        for _ in range(3):
            data = changed(data, 0.001, random)
            await deliver(world, world.stage(data), NODES)
    assert {len(chain) for _, chain in seen} == {1}
    assert {(chain[0].base, chain[0].nbytes) for _, chain in seen} == {(None, world.nbytes)}


WholeCase = Callable[[RelayNodes, np.ndarray], Any]
CASES: dict[str, WholeCase] = {
    "its relay was started again": lambda world, data: world.handles["n1"].start_again(),
    "the learner was started again": lambda world, data: world.restart_learner(),
    "it missed a version": lambda world, data: world.stage(data),
    "the other segment is written": lambda world, data: None,
}


@pytest.mark.parametrize("case", CASES)
async def test_who_holds_another_version_gets_the_whole(tmp_path: Path, case: str) -> None:
    """And the deltas after it."""
    world = RelayNodes(tmp_path, nbytes=2 * WORDS, delta="always")
    data, random = weights(3)
    seen = watched(world)
    with world.patched():
        await deliver(world, world.stage(data), ["n1"])
        await deliver(world, world.stage(changed(data, 0.01, random)), ["n1"])
        CASES[case](world, data)
        news = world.stage(data)
        if "segment is written" in case:
            world.segments.begin(10**6)
        [claim, _] = await deliver(world, news, ["n1"])
        assert world.holds(claim) and seen[-1][1][0].base is None
        await deliver(world, world.stage(changed(data, 0.01, random)), ["n1"])
        assert seen[-1][1][0].base is not None


async def test_a_self_check_goes_whole_and_the_version_before_is_still_there(
    world: RelayNodes,
) -> None:
    data, random = weights(4)
    seen = watched(world)
    with world.patched():
        [before, _] = await deliver(world, news := world.stage(data), ["n1"])
        [check, _] = await deliver(world, world.stage(changed(data, 1, random), apart=True), ["n1"])
        assert seen[-1][1][-1].base is None and len(seen[-1][1]) == 1
        assert world.holds(before) and world.holds(check)
        assert (await deliver(world, news, ["n1"]))[0] == before and len(seen) == 2
        [after, _] = await deliver(world, world.stage(changed(data, 0.01, random)), ["n1"])
        assert world.holds(after)


async def test_a_segment_that_is_written_while_it_is_read_makes_no_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = RelayNodes(tmp_path, nbytes=2 * WORDS)
    data, random = weights(5)
    news = [world.stage(data), world.stage(changed(data, 0.01, random))]
    base, source = [(one.payload["path"], one.payload["sequence"]) for one in news]
    assert changes(base, source, world.nbytes) is not None
    encode = delta.encode

    def writing(*given: Any) -> np.ndarray:
        world.segments.begin(1000)
        return encode(*given)

    monkeypatch.setattr(shared_memory.delta, "encode", writing)
    assert changes(base, source, world.nbytes) is None


async def test_half_a_delta_is_never_readable(
    world: RelayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay dies in the middle: the version before is whole, the new one is refused, and the next
    attempt sends all of it.
    """
    data, random = weights(6)
    seen = watched(world)
    apply = delta.apply

    def dies(found: np.ndarray, copy: np.ndarray, *way: Any) -> None:
        apply(found, copy, *way)
        copy[-2:] = 0
        raise RelayDied

    with world.patched():
        [before, _] = await deliver(world, world.stage(data), ["n1"])
        news = world.stage(changed(data, 0.01, random))
        with monkeypatch.context() as patch:
            patch.setattr(delta, "apply", dies)
            with pytest.raises(RelayDied):
                await world.fetch(news, "n1")
        assert world.holds(before)
        half = world.handles["n1"].process._copy._segments._writing
        assert half.sequence() % 2 == 1
        [after, _] = await deliver(world, news, ["n1"])
        assert world.holds(after) and world.holds(before)
        assert [chain[0].base is None for _, chain in seen] == (
            [True, world.config.weight_sync.files is not None, True]
        )


@pytest.mark.parametrize("who", ["n1", HOME])
async def test_a_relay_that_hangs_is_replaced_and_named(world: RelayNodes, who: str) -> None:
    data, random = weights(7)
    with world.patched():
        await deliver(world, world.stage(data), ["n1", "n2"])
        world.handles[who].hangs = True
        hung, other = world.handles[who], world.handles["n2"]
        news = world.stage(changed(data, 0.01, random))
        world.relays._deadline_s = 0.05
        with pytest.raises(TimeoutError, match=rf"the relay of node {who} took longer than 0.05 s"):
            await world.fetch(news, "n1")
        world.relays._deadline_s = 30
        assert all([world.holds(claim) for claim in await deliver(world, news, ["n1", "n2"])])
        assert world.handles[who] is not hung and world.handles["n2"] is other


# ---- which is faster
# --------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that the test decides: each `write` takes as long as it says."""

    def __init__(self) -> None:
        self.now, self.takes = 0.0, dict[bool, float]()

    def before(self, node: str, method: str, given: list[Any]) -> None:
        if method == "write":
            self.now += self.takes[given[0][-1].base is None]

    def perf_counter(self) -> float:
        return self.now


async def versions(
    world: RelayNodes, clock: Clock, seconds: list[tuple[float, float]], nodes: list[str]
) -> list[bool]:
    """Which versions were sent whole, if the whole and what changed take so long."""
    data, random = weights(8)
    seen: list[bool] = []

    def before(node: str, method: str, given: list[Any]) -> None:
        clock.before(node, method, given)
        if method == "write":
            seen.append(given[0][-1].base is None)

    world.before = before
    with world.patched():
        for whole, part in seconds:
            clock.takes = {True: whole, False: part}
            await deliver(world, world.stage(data), nodes)
            data = changed(data, 0.01, random)
    return seen


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, time = Clock(), relays.time
    names = {"perf_counter": clock.perf_counter, "monotonic": time.monotonic}
    monkeypatch.setattr(relays, "time", SimpleNamespace(**names))
    return clock


async def test_what_changed_is_used_while_it_is_faster_and_that_is_said_once(
    way: str | None, tmp_path: Path, clock: Clock
) -> None:
    world = RelayNodes(tmp_path, nbytes=2 * WORDS, files=way)
    assert await versions(world, clock, [(11.4, 2.1)] * 4, ["n1"]) == [True, False, False, False]
    [said] = world.listener.notes
    assert said.startswith("weights reach node n1 as what changed: ")
    assert said.endswith(" % of the bytes, 2.1 s instead of 11.4 s")


async def test_the_whole_is_used_for_the_rest_once_it_is_faster(
    way: str | None, tmp_path: Path, clock: Clock
) -> None:
    world = RelayNodes(tmp_path, nbytes=2 * WORDS, files=way)
    seconds = [(2.0, 1.0), (2.0, 1.5), (2.0, 2.5), (2.0, 0.1), (2.0, 0.1)]
    assert await versions(world, clock, seconds, ["n1"]) == [True, False, False, True, True]
    assert "1.5 s instead of 2.0 s" in world.listener.notes[0]
    [_, said] = world.listener.notes
    assert said.endswith("2.5 s instead of 2.0 s; whole from now on")


async def test_always_is_always(way: str | None, tmp_path: Path, clock: Clock) -> None:
    world = RelayNodes(tmp_path, nbytes=2 * WORDS, files=way, delta="always")
    assert await versions(world, clock, [(1.0, 9.0)] * 4, ["n1"]) == [True, False, False, False]


async def test_through_ray_each_node_is_judged_for_itself(tmp_path: Path, clock: Clock) -> None:
    world = RelayNodes(tmp_path, nbytes=2 * WORDS)
    await versions(world, clock, [(2.0, 3.0)] * 2, ["n1"])
    assert world.relays._whole == {"n1"}
    assert await versions(world, clock, [(2.0, 1.0)] * 2, ["n2"]) == [True, False]


# ---- files
# --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "directory"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"{tmp_path}/shared"


def writer(address: str, tmp_path: Path, key: str = "start1") -> WeightFiles:
    return WeightFiles(address, key=key, fallback=tmp_path / "run" / "weights")


def chained(
    found: WeightFiles, count: int, *, share: float, seed: int = 9
) -> list[tuple[list[ChainPart], np.ndarray]]:
    """Let a relay write versions; the chain and the bytes of each."""
    data, random = weights(seed)
    made, number = [], 2
    for _ in range(count):
        base, source = found.next_base(), ("segment", number)
        sent = data if base is None else delta.encode(made[-1][1], data, (base, source))
        part = found.save(source, sent, of=data.nbytes, base=base)
        made.append((found.add(part, version=True), data))
        data, number = changed(data, share, random), number + 2
    return made


def pulled(reader: WeightFiles, chain: list[ChainPart]) -> np.ndarray:
    buffer = np.zeros(chain[0].of, np.uint8)
    for part in chain:
        reader.fill(part, buffer, until=0.0)
    return buffer


def test_a_chain_leads_to_its_end_and_what_it_needs_is_kept(address: str, tmp_path: Path) -> None:
    """A slow reader of the chain before finds its files, too; older ones are gone."""
    found, reader = writer(address, tmp_path), writer(address, tmp_path)
    made = chained(found, 60, share=0.02)
    for chain, data in made[-1:]:
        assert np.array_equal(pulled(reader, chain), data)
    wholes = [place for place, (chain, _) in enumerate(made) if len(chain) == 1]
    assert len(wholes) > 3
    for chain, _ in made[:-1]:
        parts = sum(part.nbytes for part in chain[1:-1])
        assert chain[0].base is None and 2 * parts <= chain[0].of
    slow, data = made[wholes[-1] - 1]
    assert np.array_equal(pulled(reader, slow), data)
    kept = {part.name.rpartition("/")[2] for part in (*slow, *made[-1][0])}
    assert set(stored(address)) == kept


def test_who_has_one_of_the_chain_takes_the_rest(tmp_path: Path) -> None:
    world = RelayNodes(tmp_path, nbytes=2 * WORDS)
    address = f"{tmp_path}/shared"
    made = chained(writer(address, tmp_path), 5, share=0.001)
    with world.patched():
        relay = relays.RelayProcess(
            key="start1", fallback=str(tmp_path / "run" / "weights"), role="r", files=address
        )
        taken = []
        for place in (1, 1, 4):
            chain, data = made[place]
            (path, number), count, _ = relay.write(chain, None, 0.0)
            assert world.holds((path, number, data.tobytes()))
            taken.append(count)
        assert taken == [2, 0, 3]
        relay.close()
    assert stored(address), "it wrote none of them"


def test_files_of_another_start_part_or_run_are_refused(address: str, tmp_path: Path) -> None:
    own, reader = writer(address, tmp_path), writer(address, tmp_path)
    chain, data = chained(own, 4, share=0.01)[-1]
    storage, root = reach(address)
    names = [f"{root}/{part.name}" for part in chain]
    others = {
        "start": writer(address, tmp_path, "start2"),
        "run": WeightFiles(address, key="start1", fallback=tmp_path / "run2" / "weights"),
        "relay": writer(address, tmp_path),
    }
    foreign = [f"{root}/{chained(one, 4, share=0.01)[-1][0][-1].name}" for one in others.values()]
    last = storage.cat_file(names[-1])
    assert np.array_equal(pulled(reader, chain), data)
    damages = [
        *[storage.cat_file(name) for name in (*names[:-1], *foreign)],
        *[last[:size] for size in (0, 5, 1024, len(last) - 1)],
        last + b"x",
        last[:-1] + bytes([last[-1] ^ 1]),
        last.replace(b'"of"', b'"if"'),
    ]
    before = pulled(reader, chain[:-1])
    for damage in damages:
        storage.pipe_file(names[-1], damage)
        buffer = before.copy()
        with pytest.raises(TornTransfer, match=chain[-1].name):
            reader.fill(chain[-1], buffer, until=0.0)
        assert np.array_equal(buffer, before), "nothing of a delta is used that is not whole"


def test_a_file_that_shows_late_is_asked_for_again_until_the_deadline(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, reader = writer(address, tmp_path), writer(address, tmp_path)
    chain, data = chained(found, 1, share=0.01)[0]
    storage, root = reach(address)
    path = f"{root}/{chain[0].name}"
    whole, slept = storage.cat_file(path), list[float]()
    storage.rm_file(path)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            storage.pipe_file(path, whole)

    monkeypatch.setattr(files.time, "sleep", sleep)
    buffer = np.zeros(len(data), np.uint8)
    reader.fill(chain[0], buffer, until=files.time.monotonic() + 60)
    assert len(slept) == 3 and np.array_equal(buffer, data)
    storage.rm_file(path)
    with pytest.raises(FileNotFoundError):
        reader.fill(chain[0], buffer, until=files.time.monotonic() - 1)
    assert len(slept) == 3


async def test_a_storage_that_fails_costs_a_repetition_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = RelayNodes(tmp_path, nbytes=2 * WORDS, files=f"{tmp_path}/shared", delta="always")
    data, random = weights(10)
    with world.patched():
        await deliver(world, world.stage(data), ["n1"])
        news = world.stage(changed(data, 0.01, random))
        with monkeypatch.context() as patch:

            def full(address: str) -> Any:
                raise OSError(28, "No space left on device")

            patch.setattr(files, "reach", full)
            for _ in range(2):
                with pytest.raises(OSError, match="No space left on device"):
                    await world.fetch(news, "n1")
        assert world.holds((await deliver(world, news, ["n1"]))[0])


async def test_files_go_with_the_start(tmp_path: Path) -> None:
    address = f"{tmp_path}/shared"
    world = RelayNodes(tmp_path, nbytes=2 * WORDS, files=address)
    with world.patched():
        await deliver(world, world.stage(weights(11)[0]), NODES)
        assert len(stored(address)) == 1 and [*(tmp_path / "run" / "weights").iterdir()]
        await world.relays.close()
    assert stored(address) == [] and not [*(tmp_path / "run" / "weights").iterdir()]


def test_the_next_start_removes_what_killed_ones_left_and_no_other_runs(tmp_path: Path) -> None:
    address, fallback = f"{tmp_path}/shared", tmp_path / "run" / "weights"
    assert remove_files(fallback, wait_s=10) == ""
    for key in ("start1", "start2"):
        chained(writer(address, tmp_path, key), 3, share=0.01)
    other = WeightFiles(address, key="start3", fallback=tmp_path / "run2" / "weights")
    chained(other, 3, share=0.01)
    assert len(stored(address)) == 9
    assert remove_files(fallback, wait_s=10) == "" and len(stored(address)) == 3
    assert not [*fallback.iterdir()]


def test_what_cannot_be_removed_is_told_and_stays_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, fallback = f"{tmp_path}/shared", tmp_path / "run" / "weights"
    chained(writer(address, tmp_path), 3, share=0.01)

    def away(address: str) -> Any:
        raise OSError("no route to host")

    with monkeypatch.context() as patch:
        patch.setattr(files, "reach", away)
        said = remove_files(fallback, wait_s=10)
        assert "could not be removed" in said and "async_grpo-run-start1" in said
    assert len(stored(address)) == 3
    assert remove_files(fallback, wait_s=10) == "" and stored(address) == []


def test_names_are_used_once_also_by_a_relay_that_was_started_again(tmp_path: Path) -> None:
    address = f"{tmp_path}/shared"
    names = [
        part.name
        for _ in range(2)
        for chain, _ in chained(writer(address, tmp_path), 3, share=0.01)
        for part in chain[-1:]
    ]
    assert len(set(names)) == 6 == len(stored(address))
    assert all(name.startswith("async_grpo-run-start1/") for name in names)


def test_a_start_removes_the_files_of_those_before_it(tmp_path: Path) -> None:
    address = f"{tmp_path}/shared"
    chained(writer(address, tmp_path), 2, share=0.01)
    connection = Connection.__new__(Connection)
    connection._config, connection.key = configured(tmp_path / "run", files=address), "start2"
    assert connection.remove_leftovers() == "" and stored(address) == []


def test_a_storage_that_nobody_knows_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"nowhere://weights: .*nowhere"):
        check_run(configured(tmp_path / "run", files="nowhere://weights"), notes=[])
