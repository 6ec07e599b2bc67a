"""`async-grpo predict CONFIG [a.b=c ...]`: what a run will come to, and the one number to change.

Runs in: a process of its own; starts nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from async_grpo.config.command_line import RUN, Parser

DESCRIPTION = "Predict throughput, learner idle and staleness of a run, from a measurement."


def arguments(parser: Parser) -> None:
    """Take a configuration, and what it is predicted from."""
    parser.config()
    source = "a run of this model and task, of 30 steps or more; else the newest next to run.dir"
    parser.add_argument("--from", dest="source", metavar=RUN, type=Path, help=source)
    actors = "rollout actors, instead of the run's own"
    parser.add_argument("--actors", metavar="N", type=_positive, help=actors)
    seconds = "seconds that a verifier takes for a response, instead of the measured ones"
    parser.add_argument("--verify-s", type=float, metavar="SECONDS", help=seconds)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def run(options: argparse.Namespace) -> int:
    """Predict it; the exit code. Raises ConfigError, SetupError."""
    import json
    from dataclasses import asdict, replace

    from async_grpo.config.load import load_config, resolve
    from async_grpo.tools.predict.advice import show, workload
    from async_grpo.tools.predict.rehearsal import predict

    config = resolve(load_config(options.config, options.settings))
    work, path = workload(config, options.source, actors=options.actors)
    if options.verify_s is not None:
        work = replace(work, verify_s=options.verify_s)
    if options.json:
        record = {"predicted": asdict(predict(work)), "limits": work.limits()}
        print(json.dumps(record | {"measured_in": str(path)}))
        return 0
    apart = config.cluster.layout != "colocated" and work.cores is None
    gpus = config.cluster.engine.tensor_parallel_size if apart else None
    show(work, path, engine_gpus=gpus)
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number
