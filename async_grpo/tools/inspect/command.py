"""`async-grpo inspect [RUN_DIR]`: a run's ledger and its groups, while it goes on or afterwards.

Runs in: a process of its own, on any machine that sees the run's directory; it only reads.
"""

from __future__ import annotations

import io
import math
import re
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_grpo.config.command_line import Parser, step_range
from async_grpo.errors import RunError, SetupError
from async_grpo.replay.ledger import State

DESCRIPTION = (
    "Look into a run's replay queue, during the run or afterwards. The reward is weighted by "
    "task.rewards of the run's config.yaml; without weights there, it is the first component."
)
SORT_KEYS = ("id", "reward", "length", "staleness", "seconds")
LIMIT = 20
"""Groups that are listed without --limit."""


def arguments(parser: Parser) -> None:
    """Take a run, which of its groups, and how they are shown."""
    parser.run("the run's directory (run.dir), which holds journal/")
    parser.add_argument("--ledger", action="store_true", help="print only the ledger, no groups")
    _selecting(parser.add_argument_group("which groups").add_argument)
    _showing(parser.add_argument_group("how they are shown").add_argument)


def run(options: Namespace) -> int:
    """Print what the options ask for; the exit code. Raises SetupError for a directory, a group or
    options that do not exist together.
    """
    from async_grpo.observe.console.status_file import newest_run
    from async_grpo.runtime.text import on_one_line
    from async_grpo.tools.inspect.lines import lines

    if problem := _contradiction(options):
        raise SetupError(problem)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    options.run_dir = newest_run(options.run_dir)
    try:
        for line in lines(options):
            print(line)
        sys.stdout.flush()
    except RunError as error:
        raise SetupError(on_one_line(str(error))) from error
    return 0


def _selecting(add: Callable[..., Any]) -> None:
    whole = "this one, whole: prompt, responses, rewards, version spans"
    add("--group", type=_natural, metavar="ID", help=whole)
    add(
        "--state",
        dest="states",
        action="append",
        choices=[state.value for state in State],
        metavar="STATE",
        help="in this state; may be repeated: " + ", ".join(State),
    )
    taken = "taken by these learner steps"
    add("--step", "--steps", dest="steps", type=step_range, metavar="N|A-B", help=taken)
    add("--version", type=_natural, metavar="V", help="with a token that policy version V sampled")
    add("--actor", metavar="NAME", help="from this rollout actor; * stands for anything")
    add("--min-reward", type=_real, metavar="X", help="mean reward of at least X")
    add("--max-reward", type=_real, metavar="X", help="mean reward of at most X")


def _showing(add: Callable[..., Any]) -> None:
    largest = "largest first (default: id, so the newest first)"
    add("--sort", choices=SORT_KEYS, default="id", help=largest)
    add("--reverse", action="store_true", help="smallest first")
    limit = f"at most N groups, 0 for all (default: {LIMIT})"
    add("--limit", type=_natural, default=LIMIT, metavar="N", help=limit)
    text = "with the prompt and the best response; with --json, all responses"
    add("--text", action="store_true", help=text)
    tokenizer = "makes text of tokens (default: the model's, or the newest checkpoint's)"
    add("--tokenizer", type=Path, metavar="DIR", help=tokenizer)
    objects = "one JSON object per group and line; with --ledger, one for the ledger"
    add("--json", action="store_true", help=objects)


def _contradiction(options: Namespace) -> str | None:
    from async_grpo.tools.inspect.groups import Selection
    from async_grpo.tools.inspect.lines import selection_of

    alone = "--ledger" if options.ledger else "--group" if options.group is not None else None
    if options.ledger and (options.group is not None or options.text):
        other = "--text" if options.group is None else "--group"
        return f"--ledger prints no groups, so {other} cannot be combined with it"
    if alone and (options.limit != LIMIT or selection_of(options) != Selection()):
        return f"options that choose or sort groups cannot be combined with {alone}"
    low, high = options.min_reward, options.max_reward
    if low is not None and high is not None and low > high:
        return f"no reward is at least {low:g} (--min-reward) and at most {high:g} (--max-reward)"
    return None


def _natural(text: str) -> int:
    if re.fullmatch(r"\d+", text) is None:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def _real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ArgumentTypeError(f"{text!r} is not a number")
    return value
