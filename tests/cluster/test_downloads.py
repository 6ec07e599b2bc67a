"""Models of the hub on every node before a start: from a hub of this test, on fake nodes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_grpo.cluster import downloads
from async_grpo.cluster.downloads import download_everywhere, from_hub
from async_grpo.errors import SetupError
from tests.support.hub import Hub, serving

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"w" * 1000,
    "pytorch_model.bin": b"b" * 500,
    "README.md": b"no weights",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving("someone/model", FILES) as server:
        yield server


def downloaded(hub: Hub, home: Path) -> int:
    """Download in a process of its own, which reads where the hub is when it begins."""
    code = "from async_grpo.cluster.downloads import download; print(download('someone/model'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=hub.environment(home),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.timeout(150)
def test_weights_and_settings_are_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    assert downloaded(hub, tmp_path) == len(b"{}") + 1000
    assert sorted(hub.asked) == ["config.json", "model.safetensors"]
    assert downloaded(hub, tmp_path) == len(b"{}") + 1000
    assert len(hub.asked) == 2


@pytest.mark.timeout(150)
def test_older_weights_are_downloaded_where_there_are_no_others(hub: Hub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    assert downloaded(hub, tmp_path) == len(b"{}") + 500


def test_directories_are_left_alone_and_models_asked_for_once(tmp_path: Path) -> None:
    assert from_hub([str(tmp_path), "a/b", "a/b", None, "c/d"]) == ["a/b", "c/d"]


def test_every_node_gets_every_model_at_the_same_time() -> None:
    began: list[tuple[str, str]] = []
    gate = asyncio.Event()

    async def fetch(model: str, node: str) -> int:
        began.append((model, node))
        if len(began) == 4:
            gate.set()
        await asyncio.wait_for(gate.wait(), 5)
        return 1

    notes: list[str] = []
    asyncio.run(
        download_everywhere(["a/b", "c/d"], ["n2", "n1", "n2"], note=notes.append, fetch=fetch)
    )
    assert began == [("a/b", "n1"), ("a/b", "n2"), ("c/d", "n1"), ("c/d", "n2")]
    assert notes == []


def test_a_long_download_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "NOTE_S", 0.05)

    async def fetch(model: str, node: str) -> int:
        await asyncio.sleep(0.12)
        return 1

    notes: list[str] = []
    asyncio.run(download_everywhere(["a/b"], ["n1"], note=notes.append, fetch=fetch))
    assert set(notes) == {"still downloading a/b from the hub"}


def test_a_download_that_fails_ends_the_start_with_a_sentence() -> None:
    async def fetch(model: str, node: str) -> int:
        raise OSError("401 Client Error")

    with pytest.raises(SetupError, match=r"a/b could not be downloaded on node n1 \(.*401.*HF_TOK"):
        asyncio.run(download_everywhere(["a/b"], ["n1"], note=print, fetch=fetch))


def test_a_download_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "NOTE_S", 0.01)
    monkeypatch.setattr(downloads, "LONGEST_S", 0.03)
    cancelled: list[str] = []

    async def fetch(model: str, node: str) -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(node)
            raise
        return 1

    async def scenario() -> None:
        with pytest.raises(SetupError, match="took over 12 hours"):
            await download_everywhere(["a/b"], ["n1"], note=lambda _: None, fetch=fetch)
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert cancelled == ["n1"]
