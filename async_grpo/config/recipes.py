"""The recipes of configs/ by name: `quickstart` stands for configs/quickstart.yaml.

Runs in: the driver. Hides where the recipes lie: in configs/ of a checkout, in the package where a
wheel is installed (setup.py puts them there). Invariant: a file of the user comes before a recipe
of the same name.
"""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]


def recipes() -> dict[str, Path]:
    """Return the file of every bundled recipe by its name."""
    bundled = _PACKAGE / "recipes"
    folder = bundled if bundled.is_dir() else _PACKAGE.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def locate(config: str | Path) -> str | Path:
    """Return the file that `config` means: a path, or the bundled recipe of that name."""
    path = Path(config)
    if path.is_file() or path.name != str(config) or path.suffix:
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


class ListRecipes(argparse.Action):
    """The option `--recipes`: print every recipe with the first line of its file, exit with 0."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print the list and end the command."""
        heads = {
            name: path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            for name, path in recipes().items()
        }
        print("\n".join(f"{name:22}{head}" for name, head in heads.items()))
        parser.exit()
