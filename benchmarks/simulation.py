"""Orders of the replay queue compared on the simulator: `python -m benchmarks.simulation [--seeds
5] [--steps 80] [--out docs]`.

Every order with every answer to old groups, at four bounds: the real queue in invented time,
nothing fails, the learner is as fast as the producers. Printed is the mean over the seeds, with the
smallest and the largest. Writes the table into FOLDER/simulation.md, between its markers, and all
runs to FOLDER/simulation.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path

from async_grpo.tools.predict.engine import Speed
from async_grpo.tools.predict.simulation.scenario import PROMPT_SHARE, Scenario
from async_grpo.tools.predict.simulation.simulator import simulate
from benchmarks.tables import write_docs

BEGIN, END = (
    "<!-- Written by `python -m benchmarks.simulation`. -->",
    "<!-- End of what it writes. -->",
)
DOCS = Path(__file__).resolve().parents[1] / "docs"
MODES = [
    ("oldest", "wait"),
    ("fifo", "wait"),
    *((order, stale) for stale in ("mask", "expire") for order in ("oldest", "fifo", "ready")),
]
BOUNDS = (0, 1, 3, 7)
SKIPPED_STEPS = 10
"""At each end: the queue fills, and the last groups of a run have nobody to overtake them."""
SPEED = Speed(((1, 96.0), (32, 1024.0)))
"""A response alone has three times the speed that it has in a full engine."""
BASE = Scenario(
    rollout_batch_size=16,
    group_size=8,
    mean_tokens=32.0,
    spread=1.0,
    longest=8.0,
    speed=SPEED,
    actors=8,
    places=32,
)
COLUMNS = {
    "idle": "learner idle %",
    "lag_mean": "lag, mean",
    "lag_max": "lag, max",
    "masked": "masked tokens %",
    "expired": "expired groups %",
    "slowest_tenth": "of the slowest tenth %",
}


def balanced(scenario: Scenario) -> Scenario:
    """With a learner that needs as long for a batch as the producers on average, all of their slots
    taken.
    """
    ids = range(4_000)
    group = statistics.mean(sum(scenario.lengths(group_id, 1)) for group_id in ids)
    full = scenario.actors * scenario.speed.total(scenario.places)
    step_s = scenario.rollout_batch_size * group / full
    return replace(scenario, learner_s=step_s, publish_s=0.05 * step_s, poll_s=0.25 * step_s)


def cell(name: str, runs: list[dict[str, float]]) -> str:
    """Mean over the seeds (smallest to largest)."""
    scale, digits = (1, 0) if name == "lag_max" else (1, 2) if name == "lag_mean" else (100, 1)
    values = [scale * run[name] for run in runs]
    mean, low, high = (
        f"{value:.{digits}f}" for value in (statistics.mean(values), min(values), max(values))
    )
    return mean if low == high else f"{mean} ({low} to {high})"


def describe(scenario: Scenario, seeds: int) -> str:
    """What was simulated, in words."""
    speed, step_s = scenario.speed, scenario.learner_s
    longest = scenario.longest * scenario.mean_tokens
    alone, full = (longest / speed.each(running) / step_s for running in (1, scenario.places))
    return f"""{scenario.total_steps} steps of R = {scenario.rollout_batch_size} groups of
{scenario.group_size} responses, {seeds} seeds; {scenario.actors} engines with room for
{scenario.places} responses each, which share its speed: a response alone has
{speed.each(1) / speed.each(scenario.places):g} times the speed that it has in a full engine.
Response lengths are lognormal (sigma {scenario.spread:g}, of which {PROMPT_SHARE:g} is the
prompt's) and cut at {scenario.longest:g} x the mean. A learner step (+- 50 %) takes as long as full
engines need for its tokens: the longest response lasts {full:.1f} learner steps in a full engine
and {alone:.1f} alone. The first and the last {SKIPPED_STEPS} steps are left out.
{machine()}."""


def machine() -> str:
    """Where it ran. The figures do not depend on it: time is invented."""
    return (
        f"Simulated with Python {platform.python_version()} on {platform.machine()}; time is "
        "invented, so the machine does not matter"
    )


SCHEDULES = {
    "engines 4 x as fast": (4.0, 1.0, "wait"),
    "engines 2 x as fast": (2.0, 1.0, "wait"),
    "the same": (2.0, 1.0, "mask"),
    "engines 1.5 x as fast, short tails": (1.5, 0.3, "wait"),
    "as fast as the learner": (1.0, 1.0, "wait"),
    "the same ": (1.0, 1.0, "mask"),
    "engines half as fast": (0.5, 1.0, "wait"),
}
"""What is compared in the second table -> learner steps against balanced ones, spread of lengths,
on_stale.
"""
DEPTHS = ((3, True), (7, True), (7, False))
"""Bounds, and whether all of their groups may always be outstanding."""


def outstanding(base: Scenario, seeds: int) -> list[str]:
    """The second table: how deep the queue is, and what that costs."""
    columns = ["idle", "lag_mean", "lag_max", "masked"]
    header = " | ".join(["engines", "on_stale", "K", "outstanding", *map(COLUMNS.get, columns)])
    lines = [f"| {header} |", "|---" * (4 + len(columns)) + "|"]
    for words, (factor, spread, on_stale) in SCHEDULES.items():
        for bound, full in DEPTHS:
            limit = (bound + 1) * base.rollout_batch_size
            scenarios = [
                replace(
                    base,
                    seed=seed,
                    learner_s=factor * base.learner_s,
                    spread=spread,
                    on_stale=on_stale,
                    max_staleness=bound,
                    outstanding=limit if full else None,
                )
                for seed in range(seeds)
            ]
            figures = [simulate(scenario).figures(skip=SKIPPED_STEPS) for scenario in scenarios]
            cells = " | ".join(cell(name, figures) for name in columns)
            depth = limit if full else "auto"
            lines.append(f"| {words.strip()} | {on_stale} | {bound} | {depth} | {cells} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation",
        description="Orders of the replay queue in invented time.",
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, default=DOCS, metavar="FOLDER")
    arguments = parser.parse_args()
    started, base = time.monotonic(), balanced(replace(BASE, total_steps=arguments.steps))
    header = " | ".join(["K", "order", "on_stale", *COLUMNS.values()])
    lines = [
        describe(base, arguments.seeds),
        "",
        f"| {header} |",
        "|---" * (3 + len(COLUMNS)) + "|",
    ]
    print("\n".join(lines))
    runs = []
    for bound in BOUNDS:
        for order, on_stale in MODES:
            scenarios = [
                replace(
                    base,
                    seed=seed,
                    order=order,
                    on_stale=on_stale,
                    max_staleness=bound,
                    outstanding=(bound + 1) * base.rollout_batch_size,
                )
                for seed in range(arguments.seeds)
            ]
            figures = [simulate(scenario).figures(skip=SKIPPED_STEPS) for scenario in scenarios]
            labels = {"max_staleness": bound, "order": order, "on_stale": on_stale}
            runs += [
                labels | {"seed": one.seed} | found
                for one, found in zip(scenarios, figures, strict=True)
            ]
            lines.append(
                f"| {bound} | {order} | {on_stale} | "
                f"{' | '.join(cell(name, figures) for name in COLUMNS)} |"
            )
            print(lines[-1], flush=True)
    write(
        arguments.out,
        lines,
        {"base": asdict(base), "machine": machine(), "skipped_steps": SKIPPED_STEPS, "runs": runs},
    )
    write_docs(
        arguments.out / "simulation.md",
        outstanding(base, arguments.seeds),
        benchmark="simulation.outstanding",
    )
    print(f"{len(runs)} runs in {time.monotonic() - started:.0f} s, written to {arguments.out}")


def write(folder: Path, lines: list[str], record: dict) -> None:
    """Put the table between the markers of simulation.md, and the runs beside it."""
    page = folder / "simulation.md"
    head, _, rest = page.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    page.write_text("\n".join([head + BEGIN, "", *lines, "", END]) + tail)
    (folder / "simulation.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
