"""`async-grpo recipes`: the recipes of configs/ by name; `quickstart` is configs/quickstart.yaml.

Runs in: the driver. Hides where the recipes lie: in configs/ of a checkout, in the package where a
wheel is installed (setup.py puts them there). Invariant: a file of the user comes before a recipe
of the same name.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import re
from pathlib import Path

from async_grpo.config.command_line import Parser

DESCRIPTION = "List the recipes: configurations to train as they are, or to begin from."
_PACKAGE = Path(__file__).resolve().parents[1]


def recipes() -> dict[str, Path]:
    """Return the file of every bundled recipe by its name."""
    bundled = _PACKAGE / "recipes"
    folder = bundled if bundled.is_dir() else _PACKAGE.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def locate(config: str | Path) -> str | Path:
    """Return the file that `config` means: a path, or the bundled recipe of that name."""
    path = Path(config)
    if os.path.isfile(path) or path.name != str(config) or path.suffix:
        return config
    return recipes().get(path.name, config)


def suggestion(missing: Path) -> str:
    """Name the recipe that a path without a file was meant to be, as a line of its own, or ""."""
    known = recipes()
    close = difflib.get_close_matches(missing.stem, known, n=1, cutoff=0.75)
    if close:
        return f"\nDid you mean the recipe `{close[0]}`?"
    bare = missing.name == str(missing) and not missing.suffix
    return f"\nThe recipes are {', '.join(known)}." if bare and known else ""


def arguments(parser: Parser) -> None:
    """Take nothing."""


def run(options: argparse.Namespace) -> int:
    """Print every recipe with the first sentence of its file; the exit code."""
    for name, path in recipes().items():
        print(f"{name:22}{_first_sentence(path)}")
    return 0


def _first_sentence(path: Path) -> str:
    """Return the first sentence of a recipe's comment, which may go over lines."""
    lines = itertools.takewhile(
        lambda line: line.startswith("# ") and line[2] != " ",
        path.read_text(encoding="utf-8").splitlines(),
    )
    text = " ".join(line[2:].strip() for line in lines)
    return re.split(r"(?<!\bDr)\.\s", text)[0].removesuffix(".")
