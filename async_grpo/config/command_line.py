"""What the verbs of the command line share: one parser, one form of every argument.

Runs in: any process that reads a command line. Hides argparse: a wrong command line ends with exit
code 2 and what to write in its place. Invariant: importing this costs the standard library alone,
so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from async_grpo.errors import EXIT_MEANING

RUN, SETTING = "RUN_DIR", "section.key=value"
RUNS = Path("runs")
OPTIONS_OF_BEFORE = {"--recipes": "recipes", "--dry-run": "check", "--replay": "retrain"}
"""Options of `train` -> the verbs that they are now."""


class Parser(argparse.ArgumentParser):
    """Reads the words behind a verb; settings may stand between the options."""

    given: Sequence[str] = ()
    of_a_run = False
    """Whether the verb begins what a run begins with, and names its exit code as a run does."""
    has_settings = False

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Read the words; end the process for `--help`, and for words that make no sense."""
        self.given = list(words)
        return self.parse_intermixed_args(self.given)

    def config(self) -> None:
        """Take a YAML file or the name of a recipe, and settings."""
        self.of_a_run = True
        self.add_argument(
            "config", metavar="CONFIG", help="YAML file, or the name of a recipe: quickstart"
        )
        self.settings("settings that replace those of the file")

    def settings(self, meaning: str) -> None:
        """Take any number of settings."""
        self.has_settings = True
        self.add_argument("settings", nargs="*", metavar=SETTING, help=meaning)

    def run(self, meaning: str = "the run's directory (run.dir)") -> None:
        """Take a run directory, by default the newest in runs/."""
        self.add_argument(
            "run_dir",
            metavar=RUN,
            type=Path,
            nargs="?",
            default=RUNS,
            help=f"{meaning}, or a directory of runs: its newest (default: {RUNS})",
        )

    def source(self, meaning: str) -> None:
        """Take a checkpoint, a run or a model, by default the newest run, and settings."""
        self.add_argument(
            "source",
            metavar="SOURCE",
            nargs="?",
            default=str(RUNS),
            help=f"{meaning} (default: the newest run in {RUNS})",
        )

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and a sentence."""
        if (unknown := re.match(r"unrecognized arguments: --([\w.-]+)", message)) is not None:
            message = self._as_setting(unknown[1])
        elif "arguments are required: CONFIG" in message:
            message = (
                "name a YAML file or a recipe, such as quickstart (`async-grpo recipes` lists "
                "them); settings may follow: learner.lr=5e-7"
            )
        last = f"error: exit code 2: {EXIT_MEANING[2]}\n" if self.of_a_run else ""
        self.exit(2, f"error: {message}\n{last}")

    def _as_setting(self, option: str) -> str:
        """Say which settings an option may have meant, with the value that it was given."""
        if not self.has_settings:
            return f"--{option} is no option of `{self.prog}`; --help lists its options"
        if self.of_a_run and f"--{option}" in OPTIONS_OF_BEFORE:
            return f"--{option} is a verb: `async-grpo {OPTIONS_OF_BEFORE[f'--{option}']}`"
        from async_grpo.config.docs import settings

        name = option.replace("-", "_")
        keys = [key for key in settings() if key == name or key.endswith(f".{name}")]
        at = next(i for i, word in enumerate(self.given) if word.startswith(f"--{option}"))
        _, separate, value = self.given[at].partition("=")
        following = "".join(self.given[at + 1 : at + 2])
        value = value if separate else following if following[:2] != "--" else "..."
        keys.sort(key=lambda key: key.count("."))
        meant = " or ".join(f"{key}={value}" for key in keys)
        said = f"--{option} is no option; settings are written {SETTING}"
        return f"{said}: {meant}" if meant else f"{said}, and --help lists the options"


def with_settings(options: argparse.Namespace) -> argparse.Namespace:
    """Take a first word `a.b=c` for a setting where a source may be left out."""
    source = options.source
    if re.match(r"[\w.]+=", source) and not os.path.exists(source):
        options.settings = [source, *options.settings]
        options.source = str(RUNS)
    return options


def step_range(text: str) -> tuple[int, int]:
    """Read an option that is a learner step, `3`, or a range, `3-7`. Raises
    ArgumentTypeError."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a step nor a range of steps like 3-7"
        )
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise argparse.ArgumentTypeError(f"{text!r} has no steps: {first} comes after {last}")
    if last == 0:
        raise argparse.ArgumentTypeError("learner steps are counted from 1")
    return first, last
