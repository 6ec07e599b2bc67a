"""A rollout actor against bare vLLM: `python -m benchmarks.rollout [--sizes 14M] [--smoke] [--out
JSON] [--docs FILE]`.

The same requests (groups of 8, geometric lengths with a mean of about 68 tokens, log-probs, a seed
per group) on the same engine, by a rollout actor with verifiers, frames and a stand-in queue, and
by vLLM's own generator. Tokens per second of the two, and the CPU time that a token costs. The
engine has a core of its own, as in a run. `--smoke` shows that it runs, not how fast.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import (
    Part,
    Report,
    add_smoke,
    aim,
    apart,
    arguments_of,
    machine,
    quiet,
    spread,
)
from benchmarks.rollout.side import TIMEOUT_S, Load, RolloutResult, Side, measure
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


def part(model: TailModel, found: RolloutResult, load: Load) -> Part:
    """Table, aims and values of one model."""
    about = (
        f"{model.name}: {load.groups} groups of {load.group_size} responses per turn, at most "
        f"{load.sequences} at the same time, {'a seed per group' if load.seeded else 'not seeded'};"
        " CPU microseconds per token: actor / bare"
    )
    parameters = sum(one.numel() for one in model.build().parameters())
    aims = []
    if parameters >= AIM_PARAMETERS and found.mean_tokens >= AIM_TOKENS:
        ratio = statistics.median(found.ratios)
        what = f"{RATIO_AIM} of bare vLLM, {model.name}"
        aims.append(aim(what, f"{ratio:.3f}", met=ratio >= RATIO_AIM))
    values = asdict(found) | {"load": asdict(load)}
    return [about, "", *HEADER, line(model.name, found)], aims, values


def main(argv: list[str] | None = None) -> None:
    parser = arguments_of("rollout", "A rollout actor against bare vLLM.")
    parser.add_argument("--sizes", nargs="+", choices=list(MODELS), default=["1M", "14M"])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument(
        "--unseeded",
        action="store_true",
        help="the engine's own random numbers: other tokens on each side",
    )
    add_smoke(parser)
    arguments = parser.parse_args(argv)
    smoke = arguments.smoke
    load = SMOKE_LOAD if smoke else Load(seeded=not arguments.unseeded)
    report = Report("rollout", machine("vllm", "torch"))
    with tempfile.TemporaryDirectory(prefix="rollout-") as temporary:
        for model in [SMOKE] if smoke else [MODELS[name] for name in arguments.sizes]:
            path, turns = model.write(Path(temporary) / model.name), 2 if smoke else arguments.turns
            found = apart(measure, path, load, turns, limit_s=TIMEOUT_S)
            report.keep(model.name, part(model, found, load))
    report.end(arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    quiet()
    main()
