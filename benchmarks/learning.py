"""Whether a commit learns as well as the recorded ones: `python -m benchmarks.learning
[quickstart chain real] [--seeds 0] [--record | --show] [--docs docs/runs/index.md]
[--picture docs/assets/runs.png]`; `make learning` runs all that are on record.

    recipe, cut to a fixed number of learner steps -> accuracy on held-out problems, sampled, at
        its end -> failed below the band

All seeds start from the same model. The band's lower end is where a further run of the recorded
kind lies below once in 200 times: the mean of the recorded runs (five seeds) less t(0.995) standard
deviations times sqrt(1 + 1/n), the prediction interval of a normal distribution. There is no upper
end. `--record` adds the runs to the record instead: after a change that is meant to change
learning, remove a recipe's rows and record five seeds again. `--show` runs nothing; with it the
page and the picture are made of what is on record.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_grpo.config.load import load_config, resolve
from async_grpo.run.preflight.model import made_model
from benchmarks.harness import (
    REAL_MODEL,
    ROOT,
    append,
    commit,
    json_lines,
    machine,
    quiet,
    read_rows,
    real_model,
    run_logged,
    write_docs,
)

RECORD = ROOT / "benchmarks" / "results" / "learning.jsonl"
SMALL = [
    "checkpoint.every_steps=0",
    "tracking={mlflow: false, report: false}",
    "evaluation={before: true, every_steps: 0, n: 1, max_samples: 300}",
]
RECIPES = {
    "quickstart": ["configs/quickstart.yaml", "run.total_steps=40", *SMALL],
    "chain": ["configs/chain.yaml", "run.total_steps=12", *SMALL],
    "real": [f"{REAL_MODEL}/smollm2_sums.yaml", "run.total_steps=10", *SMALL],
}
"""Name -> configuration and settings."""
STUDENT_995 = {2: 63.66, 3: 9.925, 4: 5.841, 5: 4.604, 6: 4.032, 7: 3.707, 8: 3.499, 9: 3.355}
"""Quantile of Student's t for so many runs."""
LEAST = 0.01
"""Standard deviation of an accuracy at least: what 300 problems at 97 % have by chance."""
TIMEOUT_S = 3_600.0


def low(accuracies: Sequence[float]) -> float:
    """The lower end of the band of recorded accuracies."""
    runs = len(accuracies)
    spread = max(LEAST, statistics.stdev(accuracies)) * math.sqrt(1 + 1 / runs)
    quantile = STUDENT_995[min(runs, max(STUDENT_995))]
    return max(0.0, statistics.mean(accuracies) - quantile * spread)


def recorded(name: str, path: Path = RECORD) -> list[float]:
    """Accuracies on record."""
    return [row["accuracy"] for row in read_rows(path) if row["name"] == name]


def run(name: str, seed: int, directory: Path) -> dict[str, Any]:
    """Train the recipe as a user would; what it reached."""
    config, *settings = RECIPES[name]
    settings += real_model() if name == "real" else _warm(config)
    command = ["async_grpo.run", config, f"seed={seed}", *settings]
    home, started = directory / f"{name}-{seed}", time.time()
    run_logged(
        [sys.executable, "-m", *command, f"run.dir={home}"],
        home.with_suffix(".txt"),
        limit_s=TIMEOUT_S,
    )
    seconds, lines = round(time.time() - started), json_lines(home / "metrics.jsonl")
    before, after = [line["eval/pass_at_1"] for line in lines if "eval/pass_at_1" in line]
    [manifest] = (home / "checkpoints").glob("*/manifest.json")
    files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    [weights] = [file for file in files if file.startswith("hf/") and file.endswith(".safetensors")]
    return {
        "name": name,
        "seed": seed,
        "before": before,
        "accuracy": after,
        "seconds": seconds,
        "curve": curve(lines),
        "weights": files[weights]["sha256"],
        "command": shlex.join(["python", "-m", *command]).replace(str(Path.home()), "~"),
        "commit": commit(),
        "machine": machine(),
    }


def curve(lines: Sequence[dict[str, float]]) -> list[tuple[float, float]]:
    """Of each learner step: seconds since the first one began, and accuracy of what it trained."""
    steps = [line for line in lines if "time/step" in line]
    began = steps[0]["time"] - steps[0]["time/step"]
    return [(round(one["time"] - began, 1), round(one["rollout/accuracy"], 4)) for one in steps]


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The record as Markdown: a row per recipe, with the extremes of its runs."""
    lines = [
        "| run | learner steps | seeds | held-out accuracy | seconds | made on |",
        "|---|---|---|---|---|---|",
    ]
    for name in RECIPES:
        mine = [row for row in rows if row["name"] == name]
        if not mine:
            continue
        after, seconds = ([row[key] for row in mine] for key in ("accuracy", "seconds"))
        before = statistics.mean(row["before"] for row in mine)
        made = {f"{row['machine'].split(';')[0]}, commit {row['commit']}" for row in mine}
        cells = (
            f"`{name}`",
            str(len(mine[0]["curve"])),
            str(len(mine)),
            f"{before:.1%} -> {statistics.mean(after):.1%} ({min(after):.1%} to {max(after):.1%})",
            f"{statistics.mean(seconds):.0f} ({min(seconds)} to {max(seconds)})",
            "; ".join(sorted(made)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy of the trained responses over seconds, a panel per recipe and a line per seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = [name for name in RECIPES if any(row["name"] == name for row in rows)]
    figure, panels = pyplot.subplots(
        1,
        len(names),
        figsize=(3.6 * len(names), 2.8),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for name, panel in zip(names, panels[0], strict=True):
        for row in rows:
            if row["name"] == name:
                panel.plot(*zip(*row["curve"], strict=True), lw=1.2, label=f"seed {row['seed']}")
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("seconds")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("accuracy of a step's responses")
    panels[0][-1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def _warm(config: str) -> list[str]:
    """Build the model of seed 0, from which all seeds start; the settings that name it."""
    made = made_model(resolve(load_config(config, ["seed=0"])), note=print, check=lambda: None)
    return [f"model.path={made}", "model.warm_start=null"]


def main(argv: list[str] | None = None) -> int:
    """Check or record; 1 where one run learned less than the record says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning")
    parser.add_argument("names", nargs="*", choices=[*RECIPES, []], metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--record", action="store_true", help="add to the record, judge nothing")
    kind.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--docs", type=Path, help="write the record into that page")
    parser.add_argument("--picture", type=Path, help="draw the record's curves into that PNG file")
    arguments = parser.parse_args(argv)
    names = [] if arguments.show else arguments.names or list(RECIPES)
    if not arguments.record:
        unknown = [name for name in names if len(recorded(name)) < 2]
        if arguments.names and unknown:
            parser.error(f"fewer than two runs of {', '.join(unknown)} on record: use --record")
        for name in unknown:
            print(f"{name}: left out, fewer than two runs are on record", flush=True)
        names = [name for name in names if name not in unknown]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="learning-") as directory:
        for seed in arguments.seeds:
            for name in names:
                row = run(name, seed, Path(directory))
                said = f"{name}, seed {seed}: {row['before']:.1%} -> {row['accuracy']:.1%}"
                said += f" in {row['seconds']} s"
                if arguments.record:
                    append(RECORD, row)
                else:
                    least = low(recorded(name))
                    worse = row["accuracy"] < least
                    failed |= worse
                    said += f", {'FAILED: less than' if worse else 'at least'} {least:.1%}"
                print(said, flush=True)
    if arguments.docs is not None:
        write_docs(arguments.docs, table(read_rows(RECORD)), benchmark="learning")
    if arguments.picture is not None:
        draw(read_rows(RECORD), arguments.picture)
    return failed


if __name__ == "__main__":
    quiet()
    sys.exit(main())
