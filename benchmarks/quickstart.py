"""The quickstart, seed by seed: `python -m benchmarks.quickstart --seeds 0 1 2 3 4 [--cold]` prints
the table of docs/tutorials/quickstart.md.

Each seed is one whole command in a process of its own; nothing is read from inside it but its
metrics.jsonl. `--cold` gives every seed an empty warm-start cache. Memory is the largest sum of the
proportional set sizes of all processes of the run, sampled twice a second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, json_lines

MARK = "ASYNC_GRPO_BENCHMARK_MARK"
TIMEOUT_S = 900.0
HEAD = (
    "| seed | greedy before -> after | sampled before -> after | RL seconds | to first step "
    "| total | publishing | largest lag | peak memory |"
)
LINE = (
    "| {seed} | {before_greedy:.1%} -> {after_greedy:.1%} | {before_sampled:.1%} -> "
    "{after_sampled:.1%} | {rl_s:.0f} | {first_step_s:.0f} s | {total_s:.0f} s | {publishing:.1%} "
    "| {lag_max:.0f} | {peak_gb:.1f} GB |"
)


def memory_mb(mark: str) -> float:
    """Proportional set size of all processes that carry the mark, in MB."""
    total = 0
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes()
            ):
                rollup = (entry / "smaps_rollup").read_text()
                total += sum(
                    int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")
                )
        except OSError:
            continue  # it ended while we looked, or is not ours
    return total / 1024


def run_seed(
    seed: int, *, config: str, cold: bool, overrides: list[str], keep: Path
) -> dict[str, Any]:
    """One run of the quickstart; what it reached and what it cost."""
    directory, mark = keep / f"seed{seed}", uuid.uuid4().hex
    settings = [f"seed={seed}", f"run.dir={directory}", *overrides]
    command = [sys.executable, "-m", "async_grpo.run", config, *settings]
    if cold:
        command.append(f"model.warm_start.cache_dir={keep / f'cache{seed}'}")
    started, peak = time.time(), 0.0
    with open(keep / f"seed{seed}.txt", "w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {MARK: mark}, stdout=log, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            if time.time() - started > TIMEOUT_S:
                process.kill()
                raise TimeoutError(f"seed {seed} took longer than {TIMEOUT_S:g} s, see {keep}")
            peak = max(peak, memory_mb(mark))
            time.sleep(0.5)
    if process.returncode != 0:
        raise RuntimeError(
            f"seed {seed} ended with exit code {process.returncode}, see {keep / f'seed{seed}.txt'}"
        )
    lines = json_lines(directory / "metrics.jsonl")
    steps = [line for line in lines if "time/step" in line]
    evaluations = [line for line in lines if "eval/accuracy_greedy" in line]
    before, after = evaluations[0], evaluations[-1]
    rl_seconds = sum(line["time/step"] for line in steps)
    return {
        "seed": seed,
        "before_greedy": before["eval/accuracy_greedy"],
        "after_greedy": after["eval/accuracy_greedy"],
        "before_sampled": before["eval/pass_at_1"],
        "after_sampled": after["eval/pass_at_1"],
        "rl_s": rl_seconds,
        "steps": len(steps),
        "first_step_s": steps[0]["time"] - started,
        "total_s": time.time() - started,
        "lag_max": max(line["train/staleness_max"] for line in steps),
        "publishing": sum(line["time/weight_sync"] for line in steps) / rl_seconds,
        "tokens_per_s": sum(line["rollout/response_tokens"] for line in steps) / rl_seconds,
        "peak_gb": peak / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument(
        "--cold", action="store_true", help="build the warm-start model anew for every seed"
    )
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    keep = Path(tempfile.mkdtemp(prefix="quickstart-"))
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}; logs in {keep}"
    )
    print(HEAD)
    print("|---|---|---|---|---|---|---|---|---|")
    results = []
    for seed in arguments.seeds:
        row = run_seed(
            seed,
            config=arguments.config,
            cold=arguments.cold,
            overrides=arguments.overrides,
            keep=keep,
        )
        results.append(row)
        print(LINE.format(**row), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
