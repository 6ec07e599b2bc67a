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

from benchmarks.scenario import PROMPT_SHARE, Scenario
from benchmarks.simulator import simulate

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
BASE = Scenario(
    rollout_batch_size=16,
    group_size=8,
    mean_tokens=32.0,
    spread=1.0,
    longest=8.0,
    tokens_per_s=32.0,
    actors=8,
    slots=4,
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
    group_s = statistics.mean(scenario.duration_s(group_id) for group_id in range(4_000))
    step_s = scenario.rollout_batch_size * group_s / (scenario.actors * scenario.slots)
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
    group_s = statistics.mean(scenario.duration_s(group_id) for group_id in range(4_000))
    longest = scenario.longest * scenario.mean_tokens / scenario.tokens_per_s
    slots, step_s = scenario.actors * scenario.slots, scenario.learner_s
    return f"""{scenario.total_steps} steps of R = {scenario.rollout_batch_size} groups of
{scenario.group_size} responses, {seeds} seeds; {slots} groups at a time on {scenario.actors}
actors. Response lengths are lognormal (sigma {scenario.spread:g}, of which {PROMPT_SHARE:g} is the
prompt's) and cut at {scenario.longest:g} x the mean. A group takes as long as its longest response:
{group_s:.2f} x the time of a mean response on average, {longest:g} x at most. A learner step takes
{step_s:.2f} x that time (+- 50 %): the longest response lasts {longest / step_s:.1f} learner
steps. The first and the last {SKIPPED_STEPS} steps are left out.
{machine()}."""


def machine() -> str:
    """Where it ran. The figures do not depend on it: time is invented."""
    return (
        f"Simulated with Python {platform.python_version()} on {platform.machine()}; time is "
        "invented, so the machine does not matter"
    )


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
                replace(base, seed=seed, order=order, on_stale=on_stale, max_staleness=bound)
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
