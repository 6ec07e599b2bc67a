"""How much a run prints where nobody looks at a terminal, in simulated time: its listener and its
weight syncs, with fake engines.
"""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

from async_grpo.observe.console.console import Console
from async_grpo.run.run_log import RunLog
from tests.support.publishing import Fixture

STEPS, STEP_S = 250, 0.7
"""The quickstart's, on a slow machine."""
REPEATED = ("step ", "bottleneck", "  row")
METRICS = {"train/loss": 1.0, "time/step": STEP_S, "rollout/score": 0.5}


class Printed(io.StringIO):
    """Keeps every line with the simulated time at which it came; `now` is the console's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lines: list[tuple[float, str]] = []

    def write(self, text: str) -> int:
        self.lines += [(self.now, line) for line in text.splitlines() if line]
        return len(text)

    def of(self, word: str) -> list[tuple[float, str]]:
        return [(at, line) for at, line in self.lines if line.startswith(word)]


async def test_a_whole_run_prints_a_line_for_every_event_and_a_step_now_and_then(
    tmp_path: Path,
) -> None:
    printed = Printed()
    console = Console(printed, clock=lambda: printed.now)
    log = RunLog(console, tmp_path)
    log.total_steps = STEPS
    run = Fixture(listener=log)
    phases = ["starting Ray", "starting engines and learner", "connecting weights"]
    for text in phases:
        with console.phase(text):
            printed.now += 8.0
    await run.coordinator.start(0)
    for step in range(1, STEPS + 1):
        printed.now += STEP_S
        for engine in run.members:  # caches are kept or computed again, or nothing is running
            engine.kept_tokens, engine.recomputed_tokens = [(9, 0), (0, 9), (0, 0)][step % 3]
            engine.kv_cache = f"kept (because {step})"
        await run.coordinator.publish(step)
        await run.coordinator.wait()
        log.logged(step, METRICS)
        console.bottleneck(kind="engines" if step % 7 else "learner", text="learner idle")
        if step == 100:
            log.error("the checkpoint of step 100 could not be written")
            log.note("a rollout actor died; another actor takes its place")
    console.end(0, "")
    console.summary("finished", [(f"row {row}", "text") for row in range(18)])

    steps = printed.of("step ")
    assert [line.split()[1] for _, line in (steps[0], steps[-1])] == ["1/250", "250/250"]
    apart = [later - at for (at, _), (later, _) in pairwise(steps[:-1])]
    assert min(apart) >= 10.0 and len(steps) > STEPS * STEP_S / 12
    sentences = [at for at, _ in printed.of("bottleneck")]
    assert len(sentences) > 2
    assert min(b - a for a, b in pairwise(sentences)) >= 30.0
    others = [line for _, line in printed.lines if not line.startswith(REPEATED)]
    once = ["first weight sync", "error: the checkpoint", "a rollout actor died", "finished"]
    assert len(others) == len(phases + once), others
    assert all(line.startswith(word) for line, word in zip(others, phases + once, strict=True))
