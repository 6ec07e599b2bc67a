"""How good the planner is: `python -m benchmarks.planning [--runs 3] [--rows FILE] [--docs FILE]`.

Real runs of the long-tail workload (`benchmarks/tails.yaml`, 14M) and of the quickstart, with
bounds from 0 to 4, two engines, and a slow verifier. Each workload is measured once, by the median
run with `max_staleness: 1` and one engine; the others are predicted from that measurement, by the
rehearsal, and compared with what came: medians of `--runs` runs each. With a
bound of 4 there is a case without `replay.outstanding: auto` too, to see what it saves and costs.
Runs take turns, so that a slow hour of the machine meets all of them. Give it a machine of its own.
With `--rows` it can be stopped and started again.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from async_grpo.config.load import load_config
from async_grpo.tools.predict.advice import workload
from async_grpo.tools.predict.rehearsal import predict
from benchmarks.harness import Part, Report, aim, append, arguments_of, machine, read_rows
from benchmarks.tails import MODELS
from benchmarks.throughput.run import measured

VERIFY_S = 0.12
"""Of the slow verifier, for a response: a batch of 64 takes 7.7 s, longer than a learner step."""
CLOSE, POINTS = 0.10, 0.05
IDLE, LAG, LOST = 0.015, 2.2, 0.02
"""What `replay.outstanding: auto` is to keep with a bound of 4: learner idle, mean lag, and what it
may cost of the tokens per second.
"""
AUTO, FIXED = "tails, K = 4", "tails, K = 4, no less outstanding"


@dataclass(frozen=True)
class Case:
    """A configuration. skip: learner steps at its beginning that do not count."""

    name: str
    config: str
    settings: tuple[str, ...]
    steps: int
    skip: int
    fitted: bool = False
    """Whether the others of its workload are predicted from it."""
    verify_s: float | None = None


def tails(bound: int, *settings: str, **facts: Any) -> Case:
    """The long-tail workload."""
    name = ", ".join([f"tails, K = {bound}", *facts.pop("words", ())])
    all_settings = (f"replay.max_staleness={bound}", *settings)
    return Case(name, "benchmarks/tails.yaml", all_settings, 28, 10, **facts)


def quickstart(bound: int, **facts: Any) -> Case:
    """The quickstart."""
    settings = (f"replay.max_staleness={bound}", "rollout.seeded=off")
    return Case(f"quickstart, K = {bound}", "configs/quickstart.yaml", settings, 90, 30, **facts)


CASES = (
    tails(0),
    tails(1, fitted=True),
    tails(2),
    tails(4),
    tails(4, f"replay.outstanding={5 * 8}", words=("no less outstanding",)),
    tails(1, "cluster.rollout_actors={min: 2, max: 2}", words=("two engines",)),
    tails(1, f"task.options={{seconds: {VERIFY_S}}}", words=("slow verifier",), verify_s=VERIFY_S),
    quickstart(0),
    quickstart(1, fitted=True),
    quickstart(2),
)


FIGURES = ("tokens_per_s", "idle", "staleness_mean")
"""What is compared, by the names of a prediction."""


def run(case: Case, directory: Path, *, model: str) -> dict[str, Any]:
    """Run a case: throughput, idle, lag, and what it measured of itself."""
    shutil.rmtree(directory, ignore_errors=True)
    settings = [*case.settings, f"run.dir={directory}", f"run.total_steps={case.steps}"]
    settings += ["evaluation.before=false", "evaluation.max_samples=1"]
    if case.config.startswith("benchmarks"):
        settings.append(f"model.path={model}")
    command = ["async_grpo.run", case.config, *settings]
    row = measured(command, directory, skip=case.skip, last=case.steps - 1)
    return {
        "tokens_per_s": row["tokens"] / row["seconds"],
        "idle": row["shares"]["learner/idle"],
        "staleness_mean": row["lag_mean"],
        "plan": json.loads((directory / "plan.json").read_text(encoding="utf-8")),
    }


def compare(case: Case, found: dict[str, float], source: Path, *, model: str) -> dict[str, Any]:
    """Predict a case from a measurement."""
    settings = [*case.settings, f"run.total_steps={case.steps}"]
    if case.config.startswith("benchmarks"):
        settings.append(f"model.path={model}")
    work, _ = workload(load_config(case.config, settings), source, actors=None)
    if case.verify_s is not None:
        work = replace(work, verify_s=case.verify_s)
    planned = predict(work)
    return {
        "case": case.name,
        "fitted": case.fitted,
        "found": found,
        "planned": {name: getattr(planned, name) for name in found},
    }


def part(rows: list[dict[str, Any]], runs: int) -> Part:
    """Table, aims and values."""
    lines = [
        f"Medians of {runs} runs; measured / planned.",
        "",
        "| configuration | tokens/s | learner idle | mean lag |",
        "|---|---|---|---|",
    ]
    for row in rows:
        both = [row[name] for name in ("found", "planned")]
        mark = " (measured for the others)" if row["fitted"] else ""
        cells = " | ".join(
            " / ".join(f"{one[name]:{digits}}" for one in both)
            for name, digits in zip(FIGURES, (",.0f", ".1%", ".2f"), strict=True)
        )
        lines.append(f"| {row['case']}{mark} | {cells} |")
    far = [
        (
            abs(row["planned"]["tokens_per_s"] / row["found"]["tokens_per_s"] - 1),
            abs(row["planned"]["staleness_mean"] - row["found"]["staleness_mean"])
            / max(row["found"]["staleness_mean"], 0.1),
            abs(row["planned"]["idle"] - row["found"]["idle"]),
        )
        for row in rows
    ]
    throughput, lag, idle = (max(values) for values in zip(*far, strict=True))
    aims = [
        aim(
            "planned: throughput and lag within 10 %, idle within 5 points",
            f"at worst {throughput:.0%}, {lag:.0%} and {100 * idle:.0f} points",
            met=max(throughput, lag) <= CLOSE and idle <= POINTS,
        )
    ]
    found = {row["case"]: row["found"] for row in rows}
    if {AUTO, FIXED} <= found.keys():
        aims.append(saved(found[AUTO], found[FIXED]))
    return lines, aims, rows


def saved(auto: dict[str, float], fixed: dict[str, float]) -> str:
    """What `replay.outstanding: auto` keeps with a bound of 4."""
    share = auto["tokens_per_s"] / fixed["tokens_per_s"]
    return aim(
        f"K = 4, outstanding auto: idle <= {IDLE:.1%}, mean lag <= {LAG:g}, tokens/s within "
        f"{LOST:.0%} of all outstanding",
        f"{auto['idle']:.1%}, {auto['staleness_mean']:.2f}, {share:.3f} times",
        met=auto["idle"] <= IDLE and auto["staleness_mean"] <= LAG and share >= 1 - LOST,
    )


def median(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Take the median of each figure."""
    return {name: statistics.median(one[name] for one in runs) for name in FIGURES}


def main() -> None:
    parser = arguments_of("planning", "The planner against real runs.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default="14M", choices=sorted(MODELS))
    parser.add_argument("--only", nargs="+", help="parts of names of the cases")
    parser.add_argument(
        "--rows",
        type=Path,
        metavar="FILE",
        help="one JSON row per run; known ones are not repeated",
    )
    arguments = parser.parse_args()
    cases = [
        case
        for case in CASES
        if not arguments.only or case.fitted or any(part in case.name for part in arguments.only)
    ]
    with tempfile.TemporaryDirectory(prefix="planning-") as folder:
        home = Path(folder)
        model = MODELS[arguments.model].write(home / "model")
        known = [] if arguments.rows is None else read_rows(arguments.rows)
        found = {case.name: [row for row in known if row["case"] == case.name] for case in cases}
        for turn in range(arguments.runs):
            for number, case in enumerate(cases):
                if len(found[case.name]) > turn:
                    continue
                row = {"case": case.name, **run(case, home / f"case-{number}", model=model)}
                found[case.name].append(row)
                if arguments.rows is not None:
                    append(arguments.rows, row)
                print(case.name, median([row]), flush=True)
        sources = {}
        for case in (case for case in cases if case.fitted):
            runs = sorted(found[case.name], key=lambda one: one["tokens_per_s"])
            sources[case.config] = home / f"plan-{len(sources)}.json"
            sources[case.config].write_text(json.dumps(runs[len(runs) // 2]["plan"]))
        rows = [
            compare(case, median(found[case.name]), sources[case.config], model=model)
            for case in cases
        ]
    report = Report("planning", machine())
    report.keep("cases", part(rows, arguments.runs))
    report.end(arguments)


if __name__ == "__main__":
    main()
