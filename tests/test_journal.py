"""The journal: nothing that it recorded is lost or changed by a death, and whatever happens to its files, no wrong group comes out."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journal_case import RULES, Life


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory in memory, where there is one."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="journal-", dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


# ---- random lives ----


@pytest.mark.parametrize(("order", "on_stale"), RULES)
def test_a_queue_whose_process_dies_goes_on_as_if_it_had_not(folder: Path, order: str, on_stale: str) -> None:
    seen_states = Counter()

    async def lives() -> None:
        for seed in range(12):
            life = Life(folder / str(seed), seed, order=order, on_stale=on_stale)
            for _ in range(150):
                await life.call()
                if life.random.random() < 0.08:
                    await life.die()
            seen_states.update(await life.queue.counts())
            await life.finish()

    asyncio.run(lives())
    assert all(seen_states[name] for name in ("trained", "rejected", "late", "duplicate", "invalid", "forfeited", "overdue", "restarts")), seen_states


@pytest.mark.parametrize(("order", "on_stale"), RULES)
def test_a_run_resumes_with_every_group_that_its_weights_may_know(folder: Path, order: str, on_stale: str) -> None:
    resumed, ready = Counter(), 0

    async def lives() -> None:
        nonlocal ready
        for seed in range(16):
            life = Life(folder / str(seed), 1000 + seed, order=order, on_stale=on_stale)
            for _ in range(200):
                await life.call()
                chance = life.random.random()
                if chance < 0.02:
                    await life.die()
                elif chance < 0.05 and (life.checkpoints or not life.batches):
                    checkpoint = life.random.choice(life.checkpoints) if life.checkpoints else None
                    resumed["from a checkpoint" if checkpoint else "from the beginning"] += 1
                    await life.resume(checkpoint)
                    ready += life.queue.report.ready
            await life.finish()

    asyncio.run(lives())
    assert resumed["from a checkpoint"] > 30 and ready > 30, (resumed, ready)
