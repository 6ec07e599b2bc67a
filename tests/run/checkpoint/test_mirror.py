"""The copy of a run directory at an address: whole whenever it stops, and enough to go on from."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from async_grpo.errors import SetupError
from async_grpo.observe.console.console import Console
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.checkpoint import mirror
from async_grpo.run.checkpoint.mirror import Mirror, MirrorTaken, check_addresses, fetch, settle
from async_grpo.run.ending import guarded
from async_grpo.tools.report.sync import sync_all
from tests.support.waiting import wait_until


def nothing() -> None:
    """Check nothing."""


def unheard(text: str) -> None:
    """Hear a line."""


def add_step(run_dir: Path, step: int, *, keep: int = 2) -> None:
    """Do what a run does to its directory until the checkpoint of a step."""
    draft = checkpoint.begin(run_dir, step)
    (draft / "learner" / "state.bin").write_bytes(bytes([step]) * 5000)
    (draft / "hf" / "model.safetensors").write_bytes(f"weights {step}".encode())
    (draft / "queue.json").write_text(json.dumps({"segment": step}))
    checkpoint.commit(draft, {"step": step})
    checkpoint.prune(run_dir, keep)
    journal = run_dir / "journal"
    journal.mkdir(exist_ok=True)
    with (journal / f"{step:08d}.journal").open("ab") as file:
        file.write(b"begun")
    if (before := journal / f"{step - 1:08d}.journal").exists():
        with before.open("ab") as file:
            file.write(b", and ended")
    for path in journal.iterdir():
        if int(path.stem) < step - keep:
            path.unlink()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")
    (run_dir / "config.yaml").write_text("run: {}\n")


def contents(run_dir: Path) -> dict[str, bytes]:
    """What of a run directory a copy has."""
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in mirror._present(run_dir)}


def objects(address: str) -> set[str]:
    """All that lies at an address."""
    storage, root = mirror.reach(address)
    storage.invalidate_cache()
    return {str(name).split(f"{root.lstrip('/')}/", 1)[1] for name in storage.find(root)}


def fetched(address: str, place: Path) -> dict[str, bytes]:
    place.mkdir(exist_ok=True)
    fetch(address, place, note=unheard, check=nothing)
    assert settle(place) and not settle(place)
    assert not list(place.glob("*.tmp"))
    return contents(place)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of a local S3 server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3").mkdir("s3://runs")
        yield "s3://runs/some/where"
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where copies go."""
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/{uuid.uuid4().hex}"
    if request.param == "file":
        return f"file://{tmp_path}/far/away"
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (place := tmp_path / "here" / "run").mkdir(parents=True)
    add_step(place, 1)
    return place


def test_a_copy_follows_the_run_directory_and_goes_on_elsewhere(
    address: str, run_dir: Path, tmp_path: Path
) -> None:
    copy = Mirror(address, run_dir, note=unheard)
    for step in range(2, 6):
        add_step(run_dir, step)
        assert copy.copy() > 0
        assert copy.copy() == 0, "there is nothing new"
        assert fetched(copy.address, tmp_path / f"there{step}") == contents(run_dir)
    assert checkpoint.verify(checkpoint.path_for(tmp_path / "there5", 5))["step"] == 5
    assert not list(run_dir.glob("*.tmp"))
    listed = json.loads((fsspec.open(f"{copy.address}/mirror.json").open()).read())
    assert objects(copy.address) == {
        "mirror.json",
        *(entry["object"] for entry in listed["files"].values()),
    }, "what is removed here is removed there"
    assert listed["stale"] == []


def test_another_start_sends_only_what_is_new(address: str, run_dir: Path) -> None:
    sent = Mirror(address, run_dir, note=unheard).copy()
    assert sent == len(contents(run_dir))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n')
    again = Mirror(address, run_dir, note=unheard)
    assert again.copy() == 1 and again.copy() == 0


class Failing:
    """A storage that fails for good after some calls."""

    def __init__(self, storage: Any, calls: int) -> None:
        self.storage, self.left = storage, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.storage, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if self.left <= 0:
                raise ConnectionError("the storage is away")
            self.left -= 1
            return found(*arguments, **named)

        return call


def test_a_copy_is_whole_wherever_the_storage_fails(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach, seen = mirror.reach, set()
    for calls in range(200):
        address = f"memory://{uuid.uuid4().hex}"
        place = tmp_path / f"run{calls}"
        place.mkdir()
        add_step(place, 1)
        Mirror(address, place, note=unheard).copy()
        before = contents(place)
        for step in range(2, 5):  # so that what was copied is removed
            add_step(place, step)
        after = contents(place)
        copy = Mirror(address, place, note=unheard)
        with monkeypatch.context() as patch:

            def failing(where: str, calls: int = calls) -> tuple[Any, str]:
                storage, root = reach(where)
                return Failing(storage, calls), root

            patch.setattr(mirror, "reach", failing)
            try:
                copy.copy()
                failed = False
            except ConnectionError:
                failed = True
        found = fetched(copy.address, tmp_path / f"there{calls}")
        assert found in (before, after)
        seen.add((failed, found == after))
        Mirror(address, place, note=unheard).copy()
        assert fetched(copy.address, tmp_path / f"again{calls}") == after
        add_step(place, 5)
        Mirror(address, place, note=unheard).copy()
        listed = json.loads(reach(copy.address)[0].cat_file(f"{copy.address}/mirror.json"))
        used = {entry["object"] for entry in listed["files"].values()}
        assert objects(copy.address) == {"mirror.json", *used}, "nothing is left behind"
        if not failed:
            break
    assert seen == {(True, False), (True, True), (False, True)}


def test_the_copy_of_another_run_is_left_alone(run_dir: Path, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/far"
    Mirror(address, run_dir, note=unheard).copy()
    other = tmp_path / "other" / "run"
    other.mkdir(parents=True)
    add_step(other, 7)
    taken = Mirror(address, other, note=unheard)
    taken.begin()
    with pytest.raises(MirrorTaken, match=r"another run: .*checkpoint.resume=file://.*/far/run"):
        taken.ready(nothing)
    assert fetched(f"{address}/run", tmp_path / "there") == contents(run_dir)


def lists_files(copy: Path) -> bool:
    try:
        return bool(json.loads((copy / mirror.INDEX).read_text(encoding="utf-8"))["files"])
    except (FileNotFoundError, ValueError):  # not there, or being written
        return False


def test_two_starts_of_a_run_do_not_write_to_one_copy(run_dir: Path, tmp_path: Path) -> None:
    address, said = f"file://{tmp_path}/far", list[str]()
    first = Mirror(address, run_dir, note=said.append)
    first.begin()
    first.ready(nothing)
    wait_until(lambda: lists_files(tmp_path / "far" / "run"), 20, "the first copy")
    second = tmp_path / "elsewhere" / "run"
    second.mkdir(parents=True)
    fetched(f"{address}/run", second)
    add_step(second, 2)
    Mirror(address, second, note=unheard).copy()
    add_step(run_dir, 3)
    first.wake()
    wait_until(lambda: said, 20, "a line")
    assert "another start of this run has written to" in said[0]
    why = first.finish(limit_s=5)
    assert "another start" in why and "--sync" not in why
    with pytest.raises(
        MirrorTaken, match=r"go on from there \(checkpoint.resume=file://.*/far/run"
    ):
        Mirror(address, run_dir, note=unheard).copy()  # as `report --sync` does
    assert fetched(f"{address}/run", tmp_path / "there") == contents(second)


def test_a_start_goes_on_with_the_copy_of_the_one_before_wherever_that_died(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"file://{tmp_path}/far"
    Mirror(address, run_dir, note=unheard).copy()
    for at in ("run_key.json", "mirror.json"):  # before it wrote there that it had begun
        add_step(run_dir, 2)

        def dies(*arguments: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(mirror, "_tell_own" if at == "run_key.json" else "_write", dies)
            with pytest.raises(KeyboardInterrupt):
                Mirror(address, run_dir, note=unheard).copy()
        assert Mirror(address, run_dir, note=unheard).copy() > 0


def test_a_run_may_go_on_at_another_address_and_come_back(run_dir: Path, tmp_path: Path) -> None:
    for step, place in ((2, "far"), (3, "farther"), (4, "far")):
        add_step(run_dir, step)
        address = f"file://{tmp_path}/{place}"
        assert Mirror(address, run_dir, note=unheard).copy() > 0
        assert fetched(f"{address}/run", tmp_path / f"there{step}") == contents(run_dir)
    address = f"file://{tmp_path}/elsewhere"
    assert Mirror(address, tmp_path / "there4", note=unheard).copy() > 0


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Storages that stand still until this is set."""
    reach, go = mirror.reach, threading.Event()

    class Slow:
        def __init__(self, storage: Any) -> None:
            self.storage = storage

        def __getattr__(self, name: str) -> Any:
            if not go.wait(60):
                raise TimeoutError
            return getattr(self.storage, name)

    def slow(where: str) -> tuple[Any, str]:
        storage, root = reach(where)
        return Slow(storage), root

    monkeypatch.setattr(mirror, "reach", slow)
    return go


def test_a_storage_that_hangs_is_waited_for_at_the_end_only_and_told(
    run_dir: Path, slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "ANSWER_S", 0.2)
    monkeypatch.setattr(mirror, "STUCK_S", 0.5)
    copy = Mirror(f"memory://{uuid.uuid4().hex}", run_dir, note=unheard)
    copy.begin()
    began = time.monotonic()
    assert "to be copied, once it answers, to memory://" in copy.ready(nothing)
    for step in range(2, 6):
        add_step(run_dir, step)
        copy.wake()
    assert time.monotonic() - began < 10
    why = copy.finish(limit_s=60)
    assert time.monotonic() - began < 20
    assert "does not answer" in why and f"async-grpo report --sync {run_dir}" in why
    slow.set()


def test_a_storage_that_comes_back_gets_everything(run_dir: Path, tmp_path: Path) -> None:
    far, said = tmp_path / "far", list[str]()
    far.write_text("a file in the place of a directory")
    copy = Mirror(f"file://{far}", run_dir, note=said.append)
    copy.begin()
    wait_until(lambda: said, 20, "a line")
    assert "training continues, the copy comes later" in said[0]
    far.unlink()
    add_step(run_dir, 2)
    assert copy.finish(limit_s=60) == ""
    assert len(said) == 2 and "answers again" in said[1]
    assert fetched(copy.address, tmp_path / "there") == contents(run_dir)


def test_what_is_pruned_or_appended_meanwhile_is_copied_as_it_was(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, before = Mirror(f"file://{tmp_path}/far", run_dir, note=unheard), contents(run_dir)
    write, calls = mirror._write, list[int]()

    def meanwhile(*arguments: Any) -> None:
        write(*arguments)
        if not calls:
            for step in (2, 3, 4):
                add_step(run_dir, step)
        calls.append(1)

    monkeypatch.setattr(mirror, "_write", meanwhile)
    copy.copy()
    found = fetched(copy.address, tmp_path / "there")
    assert found.keys() == before.keys()
    assert checkpoint.verify(checkpoint.path_for(tmp_path / "there", 1))["step"] == 1
    assert found["metrics.jsonl"].startswith(before["metrics.jsonl"])


Fault = Callable[[Path], object]
FAULTS: dict[str, tuple[Fault, str]] = {
    "nothing there": (lambda far: (far / "mirror.json").unlink(), "mirror.json is missing"),
    "no JSON": (lambda far: (far / "mirror.json").write_text("{"), "cannot be brought"),
    "an object is gone": (lambda far: (far / "config.yaml").unlink(), "FileNotFoundError"),
    "an object is other": (
        lambda far: (far / "config.yaml").write_text("run: []\n"),
        "config.yaml is damaged",
    ),
    "an object is cut off": (
        lambda far: (far / "metrics.jsonl").write_text(""),
        "metrics.jsonl is damaged",
    ),
    "a name that leads out": (
        lambda far: (far / "mirror.json").write_text(
            (far / "mirror.json").read_text().replace('"config.yaml": {', '"../config.yaml": {')
        ),
        r"has the name '../config.yaml'",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_copy_that_is_not_whole_is_not_begun_with(
    fault: str, run_dir: Path, tmp_path: Path
) -> None:
    Mirror(f"file://{tmp_path}/far", run_dir, note=unheard).copy()
    plant, sentence = FAULTS[fault]
    plant(tmp_path / "far" / "run")
    there = tmp_path / "there"
    there.mkdir()
    with pytest.raises(SetupError, match=sentence):
        fetch(f"file://{tmp_path}/far/run", there, note=unheard, check=nothing)
    assert not settle(there)
    assert not (there / "checkpoints").exists() and not (there / "journal").exists()


def test_an_error_of_the_storage_itself_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(where: str) -> tuple[Any, str]:
        raise LookupError("no credentials\nlook here")

    monkeypatch.setattr(mirror, "reach", away)
    (tmp_path / "there").mkdir()
    with pytest.raises(SetupError, match=r"s3://\*\*\*@a cannot be .*: no credentials$"):
        fetch("s3://me:secret@a", tmp_path / "there", note=unheard, check=nothing)


def test_a_storage_of_one_kilobyte_a_second_does_not_hold_the_end(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach = mirror.reach
    monkeypatch.setattr(mirror, "_CHUNK", 100)

    class Trickling:
        def __init__(self, storage: Any) -> None:
            self.storage = storage

        def __getattr__(self, name: str) -> Any:
            return getattr(self.storage, name)

        def open(self, name: str, mode: str) -> Any:
            file = self.storage.open(name, mode)
            write = file.write

            def slowly(data: bytes) -> Any:
                time.sleep(0.1)
                return write(data)

            file.write = slowly
            return file

    def trickling(where: str) -> tuple[Any, str]:
        storage, root = reach(where)
        return Trickling(storage), root

    monkeypatch.setattr(mirror, "reach", trickling)
    copy = Mirror(f"memory://{uuid.uuid4().hex}", run_dir, note=unheard)
    copy.begin()
    copy.ready(nothing)
    began = time.monotonic()
    assert "the storage is too slow" in copy.finish(limit_s=0.5)
    assert time.monotonic() - began < 10
    assert copy._thread.is_alive(), "it goes on as long as the process does"


def test_a_fetch_that_was_cut_short_is_put_in_place_by_the_next_start(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Mirror(f"file://{tmp_path}/far", run_dir, note=unheard)
    copy.copy()
    there, said = tmp_path / "there", list[str]()
    there.mkdir()
    fetch(copy.address, there, note=unheard, check=nothing)
    replace, moved = mirror.os.replace, list[int]()

    def cut_short(*arguments: Any) -> None:
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(1)
        replace(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(mirror.os, "replace", cut_short)
        with pytest.raises(KeyboardInterrupt):
            settle(there)
    assert settle(there) and contents(there) == contents(run_dir)
    add_step(there, 2)
    fetch(copy.address, there, note=said.append, check=nothing)
    assert said == [f"{there} has a past of its own: nothing is brought from {copy.address}"]
    assert not settle(there) and checkpoint.steps(there) == [1, 2]


def test_what_was_brought_in_part_is_brought_again(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Mirror(f"file://{tmp_path}/far", run_dir, note=unheard)
    copy.copy()
    (there := tmp_path / "there").mkdir()
    calls = list[int]()

    def stop() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(copy.address, there, note=unheard, check=stop)
    assert not settle(there)
    assert fetched(copy.address, there) == contents(run_dir)


def test_storages_that_fsspec_does_not_have_are_refused_before_the_run() -> None:
    check_addresses(None, "file:///a", "memory://a", "s3://a/b")
    with pytest.raises(SetupError, match=r"nowhere://a: .*nowhere"):
        check_addresses("nowhere://a")
    with pytest.raises(SetupError, match=r"checkpoint.mirror is /mnt/runs, no address"):
        check_addresses("/mnt/runs")


def test_the_rest_is_sent_later(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "config.yaml").write_text(f"checkpoint: {{mirror: 'file://{tmp_path}/far'}}\n")
    said: list[str] = []
    sync_all(run_dir, say=said.append)
    assert said == [f"{len(contents(run_dir))} files copied to file://{tmp_path}/far/run"]
    assert fetched(f"file://{tmp_path}/far/run", tmp_path / "there") == contents(run_dir)
    assert not (run_dir / "lock.json").exists()


def test_a_run_whose_copy_is_not_complete_ends_with_code_4(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with guarded(SimpleNamespace(mirror_error="the storage is away"), Console()) as ending:
        pass
    assert ending.code == 4
