"""A run's directory with pass rates in its journal, as a run with `replay.difficulty` leaves it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from async_grpo.config.load import dump
from async_grpo.config.schema import Config
from async_grpo.replay.events import Rate
from async_grpo.replay.resume import JournalSettings, open_queue
from async_grpo.run.preflight.run_check import check_run
from tests.support.queues import queue_settings


def rated_run(config: Config, rates: Mapping[int, float]) -> str:
    """Leave the run of this configuration, without a learner step."""
    run, data = Path(config.run.dir), check_run(config, notes=[]).fingerprint
    run.mkdir()
    (run / "config.yaml").write_text(dump(config))
    queue = open_queue(
        queue_settings(), JournalSettings.of(config, start="rated", fingerprint=data)
    )
    for problem, rate in rates.items():
        queue.record(Rate(problem, rate))
    asyncio.run(queue.close())
    return str(run)
