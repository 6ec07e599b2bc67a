"""A rollout actor against bare vLLM: `python -m benchmarks.rollout [--sizes 14M] [--smoke] [--out
JSON] [--docs FILE]`.

The same requests (groups of 8, geometric lengths with a mean of about 68 tokens, log-probs, a seed
per group) on the same engine, by a rollout actor with verifiers, frames and a stand-in queue, and
by vLLM's own generator. Tokens per second of the two, and the CPU time that a token costs. The
engine has a core of its own, as in a run. `--smoke` shows that it runs, not how fast.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import aim, machine, spread, write_docs
from benchmarks.rollout.side import Load, RolloutResult, Side, measure
from benchmarks.tails import MODELS, TailModel

RATIO_AIM, AIM_PARAMETERS, AIM_TOKENS = 0.98, 13_000_000, 64
SMOKE, SMOKE_LOAD = (
    TailModel("smoke", 64, 2, 100, mean=8.0),
    Load(groups=6, longest=32, sequences=32),
)

HEADER = [
    (
        "| model | tokens: mean, longest | actor tokens/s | bare tokens/s | of bare | of "
        "bare, CPU time | CPU us: actor's process "
        "| engine | verifiers | groups with the same tokens |"
    ),
    "|---|---|---|---|---|---|---|---|---|---|",
]


def line(name: str, found: RolloutResult) -> str:
    """One model's line of the table."""

    def cpu(part: str, sides: list[Side]) -> str:
        return f"{statistics.median(getattr(one, part) / one.tokens for one in sides) * 1e6:,.0f}"

    parts = [
        f"{cpu(part, found.actor)} / {cpu(part, found.bare)}"
        for part in ("actor_cpu", "engine_cpu", "verifier_cpu")
    ]
    return (
        f"| {name} | {found.mean_tokens:.0f}, {found.longest_tokens} | "
        f"{spread([one.rate for one in found.actor], ',.0f')} "
        f"| {spread([one.rate for one in found.bare], ',.0f')} | "
        f"{spread(found.ratios, '.3f')} | {spread(found.cpu_ratios, '.3f')} "
        f"| {' | '.join(parts)} | {found.same} of {found.compared} |"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollout", description="A rollout actor against bare vLLM."
    )
    parser.add_argument("--sizes", nargs="+", choices=list(MODELS), default=["1M", "14M"])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument(
        "--unseeded",
        action="store_true",
        help="the engine's own random numbers: other tokens on each side",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a tiny model and two turns: shows that it runs, not how fast",
    )
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument(
        "--docs", type=Path, help="a file whose table between the markers is replaced"
    )
    arguments = parser.parse_args(argv)
    about = machine("vllm", "torch")
    load = SMOKE_LOAD if arguments.smoke else Load(seeded=not arguments.unseeded)
    lines = [
        about,
        "",
        (
            f"{load.groups} groups of {load.group_size} responses per turn, at most "
            f"{load.sequences} at the same time, "
            f"{'a seed per group' if load.seeded else 'not seeded'}; CPU microseconds per "
            "token: actor / bare"
        ),
        "",
        *HEADER,
    ]
    reached, results = (
        ["", "| aim | measured | |", "|---|---|---|"],
        {"machine": about, "load": asdict(load)},
    )
    with tempfile.TemporaryDirectory(prefix="rollout-") as temporary:
        for model in [SMOKE] if arguments.smoke else [MODELS[name] for name in arguments.sizes]:
            path = model.write(Path(temporary) / model.name)
            found = measure(path, load, turns=2 if arguments.smoke else arguments.turns)
            lines.append(line(model.name, found))
            print(lines[-1], file=sys.stderr, flush=True)
            results[model.name] = asdict(found)
            parameters = sum(one.numel() for one in model.build().parameters())
            if parameters >= AIM_PARAMETERS and found.mean_tokens >= AIM_TOKENS:
                ratio = statistics.median(found.ratios)
                reached.append(
                    aim(
                        f"{RATIO_AIM} of bare vLLM, {model.name}",
                        f"{ratio:.3f}",
                        met=ratio >= RATIO_AIM,
                    )
                )
    print("\n".join(lines + reached))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if arguments.docs:
        write_docs(arguments.docs, lines + reached, benchmark="rollout")


if __name__ == "__main__":
    for variable, value in (
        ("OMP_NUM_THREADS", "1"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
    ):
        os.environ.setdefault(variable, value)
    main()
