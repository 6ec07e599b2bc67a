"""`make mutants`: disconnects every setting in turn and says whether a test of its wires fails.

    python -m tests.wiring.mutants [--keys a.b,c.d] [--sample N --seed S]

A mutant is the product with one setting disconnected (`tests.support.wiring.disconnected`). It is
killed when every probe of the key loses sight of the value, and survives when one still sees it.
Ends with 1 where one survives or a key has no wire.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.wiring import keys, see
from tests.wiring.table import EQUIVALENT, WIRES


def main(argv: Sequence[str] | None = None) -> int:
    """Run the mutants; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.wiring.mutants")
    parser.add_argument("--keys", default="", help="these settings only, separated by commas")
    parser.add_argument("--sample", type=int, metavar="N", help="only N keys, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    chosen = [key for key in options.keys.split(",") if key] or keys()
    if unknown := sorted(set(chosen) - set(keys())):
        parser.error(f"no such setting: {', '.join(unknown)}")
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    started, ends = time.monotonic(), [(key, _end(key)) for key in chosen]
    bad = [key for key, end in ends if end in ("survived", "no wire")]
    counts = {end: sum(one == end for _, one in ends) for _, end in ends}
    told = ", ".join(f"{count} {end}" for end, count in sorted(counts.items()))
    print(f"{len(ends)} settings: {told}; {time.monotonic() - started:.0f} s", file=sys.__stdout__)
    return 1 if bad else 0


def _end(key: str) -> str:
    """What became of the mutant of this key, which is said at once."""
    wires = [wire for wire in WIRES if wire.key == key]
    if key in EQUIVALENT:
        end = "equivalent"
    elif not wires:
        end = "no wire"
    else:
        end = "killed" if all(see(wire).killed for wire in wires) else "survived"
    print(f"{end:10} {key}", file=sys.__stdout__, flush=True)
    return end


if __name__ == "__main__":
    sys.exit(main())
