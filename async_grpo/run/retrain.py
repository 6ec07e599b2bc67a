"""`async-grpo retrain [RUN_DIR] [section.key=value ...]`: the learner alone, on recorded batches.

Runs in: the driver. Invariant: the run that is repeated is only read; what is written has a
directory of its own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.config.command_line import Parser, with_settings

if TYPE_CHECKING:
    from async_grpo.config.schema import Config
    from async_grpo.observe.console.console import Console
    from async_grpo.run.trainer import Trainer

DESCRIPTION = (
    "Train the learner alone on the batches that a run recorded, and compare its weights with the "
    "recorded ones, bit for bit; with other settings, see what they change."
)


def arguments(parser: Parser) -> None:
    """Take a run, and settings."""
    parser.source("the run whose batches are trained again (run.dir), or a directory of runs")
    parser.settings("settings that replace those of the run; run.dir is DIR-retrained otherwise")
    parser.add_argument("--config", metavar="CONFIG", help="other settings than those of the run")
    after = "begin at the run's checkpoint of this step (default: as early as possible)"
    parser.add_argument("--after", metavar="STEP", type=int, help=after)


def run(options: argparse.Namespace) -> int:
    """Retrain; the exit code."""
    from async_grpo.observe.console.status_file import newest_run
    from async_grpo.run.command import command, read_config

    options = with_settings(options)
    settings, source = options.settings, newest_run(Path(options.source)).resolve()

    def config() -> Config:
        given = ["checkpoint.resume=auto", *settings]  # its own may be an address
        if options.config is None and not any(one.startswith("run.dir=") for one in given):
            given.append(f"run.dir={json.dumps(f'{source}-retrained')}")  # its name may be YAML
        return read_config(options.config or str(source / "config.yaml"), given)

    with command(config) as this:
        if this.trainer is not None:
            _retrain(this.trainer, this.console, source=source, after=options.after)
    return this.code


def _retrain(trainer: Trainer, console: Console, *, source: Path, after: int | None) -> None:
    with console.phase(f"repeating {source} with the learner alone"):
        compared = trainer.replay(source, after=after)
    trainer.stop()
    same, different = len(compared.same), compared.different
    count = same + len(different)
    weights = f"bit-equal at all {count} weight syncs"
    if not count:
        weights = "not compared: the run recorded no digests"
    elif different:
        weights = f"different from version {different[0]} on ({same} of {count} weight syncs "
        weights += "are bit-equal)"
    metrics = str(trainer.run_dir / "metrics.jsonl")
    console.summary("repeated", [("weights", weights), ("metrics", metrics)])
