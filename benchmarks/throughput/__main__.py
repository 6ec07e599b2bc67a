"""What overlap is worth: `python -m benchmarks.throughput CONFIG [--model 14M] [--rounds 3]
[--smoke] [--out JSON] [--docs FILE] [a.b=c ...]`.

    generation   bare vLLM on the run's requests, its engine always full, nothing else on the
                 machine
    learner      the learner alone, on the batches that a run recorded (`async-grpo retrain`)
    system       whole runs with `replay.max_staleness` 0, 1, 2 and 4
    both         the synchronous baseline as it is at its best: `max_staleness` 0, and both cores
                 for whoever is at work

Overlap efficiency is the tokens per second of a run over those of the slower of the two bare parts.
Net: the CPU seconds of all processes but learner and engine are taken from the time of the run, an
equal share from each core. All parts are measured once per round. With `--out`, rows that are in
the file already are not measured again, so that a long measurement can be made in pieces (with
`--keep`, as the learner repeats what a run recorded). `--model` names a random model of
`benchmarks.tails`; without it the configuration's own is used.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from async_grpo.config.load import load_config, resolve
from async_grpo.run.preflight.model import made_model
from benchmarks.harness import (
    add_smoke,
    aim,
    aims_table,
    apart,
    arguments_of,
    machine,
    quiet,
    spread,
    write_docs,
)
from benchmarks.tails import MODELS, TailModel
from benchmarks.throughput.bare import bare_generation
from benchmarks.throughput.run import TIMEOUT_S, Row, measured, median_of, overhead

RAW_AIM, NET_AIM, AIM_STEP_S = 0.90, 0.95, 2.0
STALENESS = (0, 1, 2, 4)
SHOWN = 0.0005
"""Smallest share of the time that has a column."""
PARTS = ["generation", "both", "system", "learner"]
SMOKE = TailModel("smoke", 64, 2, 100, mean=8.0)
SMOKE_SETTINGS = [
    "rollout.rollout_batch_size=4",
    "rollout.response_length=32",
    "cluster.engine.max_num_seqs=32",
]


@dataclass(frozen=True)
class Plan:
    """What is measured: `skip` learner steps are left out at the beginning of a run, the last one
    at its end.
    """

    config: str
    settings: list[str]
    steps: int
    skip: int
    staleness: tuple[int, ...]
    directory: Path

    def run(
        self,
        name: str,
        *,
        program: tuple[str, ...] = ("async_grpo.run",),
        extra: tuple[str, ...] = (),
        skip: int | None = None,
    ) -> Row:
        """One command; its directory is `name`."""
        where = self.directory / name
        shutil.rmtree(where, ignore_errors=True)
        settings = [
            *self.settings,
            f"run.dir={where}",
            f"run.total_steps={self.steps}",
            "evaluation.before=false",
        ]
        return measured(
            [*program, self.config, *settings, *extra],
            where,
            skip=self.skip if skip is None else skip,
            last=self.steps - 1,
        )


def measure(plan: Plan, part: str) -> Row:
    """One row of a part of a round."""
    config = load_config(plan.config, plan.settings)
    if part == "generation":
        groups = config.rollout.rollout_batch_size * (plan.steps - plan.skip)
        return apart(bare_generation, config, _model_dir(plan), groups, limit_s=TIMEOUT_S)
    if part == "learner":
        recorded = plan.directory / "recorded"
        if not recorded.exists():
            raise SystemExit(
                "the part learner repeats what a run of this round recorded; measure a "
                "system before it"
            )
        program = ("async_grpo", "retrain", str(recorded), "--config")
        return plan.run("replay", program=program, extra=("replay.max_staleness=8",))
    if part == "both":
        return plan.run("both", extra=("replay.max_staleness=0", "cluster.cores=shared"))
    staleness = int(part.removeprefix("system "))
    row = plan.run(
        "system", extra=(f"replay.max_staleness={staleness}",), skip=max(plan.skip, staleness + 2)
    )
    shutil.rmtree(plan.directory / "recorded", ignore_errors=True)
    (plan.directory / "system").rename(plan.directory / "recorded")
    return row


def _model_dir(plan: Plan) -> str:
    """The model on disk; a warm start is built or found in its cache."""
    config = resolve(load_config(plan.config, plan.settings))
    return made_model(config, note=print, check=lambda: None)


def tokens_per_s(row: Row) -> float:
    """Response tokens per second; of the learner alone, while it trains."""
    return row["tokens"] / (
        row["seconds"] if row["part"] != "learner" else row["train_s"] * row["steps"]
    )


def net_tokens_per_s(row: Row, cores: int) -> float:
    """The same, without the time that all processes but learner and engine took of each core."""
    return row["tokens"] / (row["seconds"] * (1 - overhead(row) / cores))


class Table:
    """Rows as lines for a person."""

    def __init__(self, rows: list[Row], cores: int) -> None:
        self._cores = cores
        self._parts = {
            part: [row for row in rows if row["part"] == part]
            for part in dict.fromkeys(row["part"] for row in rows)
        }

    def _rate(self, part: str) -> float:
        return median_of(self._parts[part], tokens_per_s)

    def _efficiency(self, part: str, *, net: bool) -> list[float]:
        """Round by round, against the bare parts of the same round."""
        found = []
        for row in self._parts[part]:
            rows = [one for name in ("generation", "learner") for one in self._parts.get(name, [])]
            bare = [tokens_per_s(one) for one in rows if one["round"] == row["round"]]
            if len(bare) == 2:
                found.append(
                    (net_tokens_per_s(row, self._cores) if net else tokens_per_s(row)) / min(bare)
                )
        return found

    def lines(self) -> list[str]:
        """The tables."""
        lines = [
            "| | tokens/s | samples/s | step s | of the slower bare part | net | lag | speed-up |",
            "|---|---|---|---|---|---|---|---|",
        ]
        synchronous = max(
            [self._rate(part) for part in ("system 0", "both") if part in self._parts], default=None
        )
        for part, rows in self._parts.items():
            runs = part not in ("generation", "learner")
            raw, net = (
                self._efficiency(part, net=which) if runs else [] for which in (False, True)
            )
            fields = [
                _title(part),
                spread([tokens_per_s(row) for row in rows], ",.0f"),
                spread([tokens_per_s(row) * row["samples"] / row["tokens"] for row in rows], ".1f"),
                spread([_step_s(row) for row in rows], ".2f") if part != "generation" else "",
                spread(raw, ".3f") if raw else "",
                spread(net, ".3f") if net else "",
                f"{median_of(rows, lambda row: row['lag_mean']):.2f}" if runs else "",
                f"{self._rate(part) / synchronous:.2f}" if runs and synchronous else "",
            ]
            lines.append(f"| {' | '.join(fields)} |")
        return lines + self._shares() + self._ideal()

    def _shares(self) -> list[str]:
        runs = {part: rows for part, rows in self._parts.items() if part != "generation"}
        if not runs:
            return []
        causes = list(
            dict.fromkeys(
                name
                for rows in runs.values()
                for row in rows
                for name, share in row["shares"].items()
                if share >= SHOWN
            )
        )
        kinds = list(
            dict.fromkeys(kind for rows in runs.values() for row in rows for kind in row["cpu"])
        )

        def median(rows: list[Row], group: str, name: str) -> str:
            return f"{median_of(rows, lambda row: row[group].get(name, 0.0)):.1%}"

        lines = [
            "",
            "Shares of the time by cause:",
            "",
            f"| | {' | '.join(causes)} |",
            "|---" * (1 + len(causes)) + "|",
        ]
        lines += [
            f"| {_title(part)} | {' | '.join(median(rows, 'shares', name) for name in causes)} |"
            for part, rows in runs.items()
        ]
        lines += [
            "",
            "CPU seconds per second by process; `foreign`: of processes that are not the run's:",
            "",
        ]
        lines += [f"| | {' | '.join(kinds)} | foreign |", "|---" * (2 + len(kinds)) + "|"]
        for part, rows in runs.items():
            used = [
                f"{median_of(rows, lambda row, kind=kind: row['cpu'].get(kind, 0.0)):.3f}"
                for kind in kinds
            ]
            lines.append(
                f"| {_title(part)} | {' | '.join(used)} | "
                f"{median_of(rows, lambda row: row['foreign']):.3f} |"
            )
        return lines

    def _ideal(self) -> list[str]:
        if not {"generation", "learner"} <= set(self._parts):
            return []
        generation, learner = self._rate("generation"), self._rate("learner")
        seconds = [1 / generation, 1 / learner]
        ideal = f"(Tg + Tt) / max(Tg, Tt) from the bare rates: {sum(seconds) / max(seconds):.2f}"
        return ["", f"Ideal speed-up {ideal}."]

    def aims(self) -> list[str]:
        """What was reached, where the workload is one that the aims are about."""
        if (
            "learner" not in self._parts
            or median_of(self._parts["learner"], lambda row: row["train_s"]) < AIM_STEP_S
        ):
            return ["", f"No aim: learner steps are shorter than {AIM_STEP_S:g} s."]
        found = {
            part: self._efficiency(part, net=False)
            for part in self._parts
            if part.startswith("system ")
        }
        candidates = [part for part, values in found.items() if values and part != "system 0"]
        if not candidates:
            return []
        best = max(candidates, key=lambda part: statistics.median(found[part]))
        raw, net = found[best], self._efficiency(best, net=True)
        reached = [
            aim(
                f"overlap efficiency {limit:.2f} {kind}, {_title(best)}",
                spread(values, ".3f"),
                met=statistics.median(values) >= limit,
            )
            for limit, kind, values in ((RAW_AIM, "raw", raw), (NET_AIM, "net", net))
        ]
        return ["", *aims_table(reached)]


def _step_s(row: Row) -> float:
    """Seconds of a learner step; of the learner alone, while it trains."""
    return row["train_s"] if row["part"] == "learner" else row["seconds"] / row["steps"]


def _title(part: str) -> str:
    names = {
        "generation": "bare generation",
        "learner": "bare learner",
        "both": "max_staleness 0, shared cores",
    }
    return names.get(part, part.replace("system", "max_staleness"))


def main(argv: list[str] | None = None) -> None:
    parser = arguments_of("throughput", "What overlap is worth.")
    parser.add_argument("config")
    parser.add_argument(
        "--model", choices=list(MODELS), help="a random model in place of the configuration's"
    )
    parser.add_argument("--staleness", nargs="+", type=int, default=list(STALENESS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=20, help="learner steps of a run")
    parser.add_argument("--skip", type=int, default=4, help="of which the first are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    add_smoke(parser)
    parser.add_argument(
        "--keep",
        type=Path,
        help="where models and runs are kept, for a measurement in pieces; by default nowhere",
    )
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args(argv)
    results = {
        "cores": len(os.sched_getaffinity(0)),
        "machine": machine("vllm", "ray", "deepspeed", "torch"),
        "config": arguments.config,
        "model": arguments.model,
        "rows": [],
    }
    if arguments.out and arguments.out.exists():
        results = json.loads(arguments.out.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="throughput-") as temporary:
        directory, settings = arguments.keep or Path(temporary), list(arguments.overrides)
        directory.mkdir(parents=True, exist_ok=True)
        model = SMOKE if arguments.smoke else MODELS.get(arguments.model)
        if model is not None:
            settings.append(f"model.path={model.write(directory / model.name)}")
        if arguments.smoke:
            settings += SMOKE_SETTINGS
        steps, skip = (5, 2) if arguments.smoke else (arguments.steps, arguments.skip)
        plan = Plan(arguments.config, settings, steps, skip, tuple(arguments.staleness), directory)
        systems = [f"system {bound}" for bound in ((1,) if arguments.smoke else plan.staleness)]
        parts = {
            "generation": ["generation"],
            "system": systems,
            "both": [] if arguments.smoke else ["both"],
            "learner": ["learner"],
        }
        for number in range(1 if arguments.smoke else arguments.rounds):
            for part in [part for name in PARTS if name in arguments.parts for part in parts[name]]:
                if any((row["part"], row["round"]) == (part, number) for row in results["rows"]):
                    continue
                started = time.monotonic()
                row = measure(plan, part) | {"part": part, "round": number}
                results["rows"].append(row)
                took = time.monotonic() - started
                print(
                    f"round {number}, {part}: {tokens_per_s(row):,.0f} tokens/s ({took:.0f} s)",
                    file=sys.stderr,
                    flush=True,
                )
                if arguments.out:
                    arguments.out.write_text(json.dumps(results) + "\n", encoding="utf-8")
        config = load_config(arguments.config, settings)
        table = Table(results["rows"], results["cores"])
        name = arguments.model or "its own model"
        batch = (
            f"{config.rollout.rollout_batch_size} groups of {config.rollout.group_size} "
            "responses per learner step"
        )
        lines = [
            results["machine"],
            "",
            f"{Path(arguments.config).name}, {name}; {batch}",
            "",
            *table.lines(),
            *table.aims(),
        ]
    print("\n".join(lines))
    if arguments.docs:
        write_docs(arguments.docs, lines, benchmark=f"throughput.{Path(arguments.config).stem}")


if __name__ == "__main__":
    quiet()
    main()
