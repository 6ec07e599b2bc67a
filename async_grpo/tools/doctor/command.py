"""`async-grpo doctor [CONFIG]`: what this machine or a cluster has for a run, and what is missing.

Runs in: a process of its own; starts nothing, no Ray either. Exit code 2 where a run cannot start.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path

from async_grpo.config.command_line import Parser
from async_grpo.errors import SetupError
from async_grpo.tools.doctor.machine import Finding, disk, each, findings, row

DESCRIPTION = "Say what this machine or a cluster has for a run, and what is missing."
FIELDS = ("node", "label", "found", "fault", "severity")


def arguments(parser: Parser) -> None:
    """Take perhaps a configuration, whose needs are looked at too, and perhaps a cluster."""
    what = "YAML file, or the name of a recipe, whose needs are looked at too"
    parser.add_argument("config", metavar="CONFIG", nargs="?", help=what)
    parser.settings("settings that replace those of the file")
    cluster = "a Ray cluster, on a node of which this is (default: RAY_ADDRESS)"
    parser.add_argument("--address", metavar="RAY", help=cluster)
    parser.add_argument("--json", action="store_true", help="print one JSON object, in a line")


def run(options: argparse.Namespace) -> int:
    """Print what there is, and then what is missing; the exit code."""
    if options.address:
        os.environ["RAY_ADDRESS"] = options.address
    file, settings = options.config, options.settings
    looks = {
        "config": lambda: _needs(file, settings),
        "ray cluster": lambda: _nodes(file, settings),
    }
    rows = [*findings(), *each(looks)]
    missing = sum(severity == "error" for *_, severity in rows)
    if options.json:
        shown = [dict(zip(FIELDS, one, strict=True)) for one in rows]
        print(json.dumps({"rows": shown, "missing": missing}))
        return SetupError.exit_code if missing else 0
    for node, label, found, fault, _ in rows:
        if fault or not node or ("", label, found, "", "") not in rows:  # else as on this machine
            print(f"{f'{node} {label}'.strip():15} {found}")
    for node, *_, fault, severity in filter(lambda one: one[-1], rows):
        print(f"{severity}: {f'{node}: ' if node else ''}{fault}")
    if not missing:
        print(f"nothing is missing; next: async-grpo train {file or 'quickstart'}")
    return SetupError.exit_code if missing else 0


def _needs(file: str | None, settings: list[str]) -> Iterable[Finding]:
    if file is None:
        return disk(Path.cwd())
    from async_grpo.tools.doctor.services import services

    return services(file, settings)


def _nodes(file: str | None, settings: list[str]) -> Iterable[Finding]:
    if os.environ.get("RAY_ADDRESS", "") in ("", "local"):
        return [row("ray cluster", "none is named (RAY_ADDRESS); a run starts its own")]
    from async_grpo.tools.doctor.cluster import nodes

    return nodes(file, settings)
