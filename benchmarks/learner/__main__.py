"""The learner against a bare PyTorch loop: `python -m benchmarks.learner [--sizes 1M 14M] [--stages
0 1 2 3] [--learner KEY=VALUE ...] [--smoke] [--out JSON] [--docs FILE]`.

One DeepSpeed rank with one thread, float32, and a loop written by hand, take turns on the same
packed batches: the tokens per second of the two, the padding, DeepSpeed's overhead by ZeRO stage,
and memory. The bare loop beside itself shows the spread of the method. The tails of the responses
are geometric. `--smoke` shows that it runs, not how fast.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
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
from benchmarks.learner.arm import TIMEOUT_S, ArmResult, Work, run_arm
from benchmarks.tails import MODELS, TailModel

RATIO_AIM, PADDING_AIM, APART_AIM = 0.95, 0.02, 1e-5
AIM_STAGES, AIM_PARAMETERS = (0, 1), 13_000_000
SMOKE = TailModel("smoke", 64, 2, 100, mean=8.0)
HEADER = [
    "| model | ZeRO | tokens/s | bare tokens/s | of bare | of bare, CPU time | memory MB "
    "| bare MB |",
    "|---|---|---|---|---|---|---|---|",
]


def work_for(model: TailModel, *, smoke: bool) -> Work:
    """The rows of an update of this model."""
    work = Work(vocabulary=model.vocabulary)
    if smoke:
        return replace(work, groups=3, group_size=4, mean=model.mean, longest=32, budget=128)
    return replace(work, groups=2) if model.name == "100M" else work


def described(name: str, work: Work, arm: ArmResult) -> str:
    """What was trained."""
    return (
        f"{name}: {arm.parameters / 1e6:.1f} million parameters; an update of "
        f"{work.groups * work.group_size} responses, {arm.tokens:,} tokens "
        f"with prompts, {arm.micro_batches} micro-batches; padding {arm.padding:.1%} in "
        f"linear layers and head, {arm.attention_padding:.1%} of "
        "attention's positions"
    )


def line(name: str, found: ArmResult) -> str:
    """One arm's line of the table."""
    stage = "bare beside itself" if found.stage is None else str(found.stage)
    rates = [
        spread([found.tokens / getattr(turn, side) for turn in found.turns], ",.0f")
        for side in ("ours", "bare")
    ]
    return (
        f"| {name} | {stage} | {rates[0]} | {rates[1]} | {spread(found.ratios, '.3f')} | "
        f"{spread(found.cpu_ratios, '.3f')} "
        f"| {found.peak_mb:,.0f} | {found.bare_peak_mb:,.0f} |"
    )


def aims(name: str, arms: list[ArmResult]) -> list[str]:
    """What the arms of one model came to."""
    lines = []
    for one in arms:
        if one.stage in AIM_STAGES and one.parameters >= AIM_PARAMETERS:
            ratio = statistics.median(one.ratios)
            lines.append(
                aim(
                    f"{RATIO_AIM} of the bare loop, {name}, ZeRO-{one.stage}",
                    f"{ratio:.3f}",
                    met=ratio >= RATIO_AIM,
                )
            )
    padding, apart = arms[0].padding, max(one.apart for one in arms)
    lines.append(
        aim(
            f"padding at most {PADDING_AIM:.0%} of computed tokens, {name}",
            f"{padding:.2%}",
            met=padding <= PADDING_AIM,
        )
    )
    if any(one.stage is not None for one in arms):
        what = f"log-probs of a packed row are those of the row alone to {APART_AIM:g}, {name}"
        lines.append(aim(what, f"{apart:.1e}", met=apart <= APART_AIM))
    return lines


def part(model: TailModel, arms: list[ArmResult], work: Work) -> Part:
    """Table, aims and values of one model."""
    lines = [described(model.name, work, arms[0]), "", *HEADER]
    values = {"work": asdict(work), "arms": [asdict(one) for one in arms]}
    return lines + [line(model.name, one) for one in arms], aims(model.name, arms), values


def main(argv: list[str] | None = None) -> None:
    parser = arguments_of("learner", "The learner against a bare PyTorch loop.")
    parser.add_argument("--sizes", nargs="+", choices=list(MODELS), default=["1M", "14M"])
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument(
        "--learner", nargs="+", default=[], metavar="KEY=VALUE", help="settings: compile=true"
    )
    add_smoke(parser)
    arguments = parser.parse_args(argv)
    smoke, turns = arguments.smoke, 2 if arguments.smoke else arguments.turns
    pairs = [text.partition("=")[::2] for text in arguments.learner]
    settings = {key: json.loads(value) for key, value in pairs}
    report = Report("learner", machine("torch", "deepspeed", "transformers"))
    with tempfile.TemporaryDirectory(prefix="learner-") as temporary:
        for model in [SMOKE] if smoke else [MODELS[name] for name in arguments.sizes]:
            path = model.write(Path(temporary) / model.name)
            work, arms = work_for(model, smoke=smoke), []
            for stage in [1] if smoke else [None, *arguments.stages]:
                arms.append(apart(run_arm, path, work, stage, turns, settings, limit_s=TIMEOUT_S))
                print(line(model.name, arms[-1]), file=sys.stderr, flush=True)
            report.keep(model.name, part(model, arms, work))
    report.end(arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    quiet()
    main()
