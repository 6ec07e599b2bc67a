"""Many faults, one after the other, in parts that can be resumed.

    python -m tests.chaos --count N [--seed SEED] [--start START] [--out FILE]      inject faults
                                                                                    START to N - 1
                                                                                    of this seed
    ... --episodes                                                                  in a run of
                                                                                    episodes
    python -m tests.chaos --table FILE                                              the table of
                                                                                    what the file
                                                                                    holds

`make chaos N=200 SEED=1 START=0` is the first. Every part is a run of its own and suffers each kind
once, in an order that the seed decides; then it is ended, and its account is checked. A line of
JSON per fault is appended to the file as it happens. A fault that the run does not survive ends its
part: it is written down with the reason, what the run has left is kept, and the next part begins.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from tests.chaos import account, case
from tests.chaos.faults import KINDS, Chaos, end
from tests.chaos.harness import Run
from tests.support.mlflow_server import Server

LEFT_S = 30.0


def kinds_of(part: int, seed: int) -> list[str]:
    """The kinds of one part in their order."""
    return random.Random(f"{seed}-{part}").sample(KINDS, len(KINDS))


def one_part(kinds: list[str], *, first: int, seed: int, out: Path, episodes: bool = False) -> bool:
    """Start a run, strike it with these kinds, end it and check it. Whether it survived all of
    them.
    """
    home = Path(tempfile.mkdtemp(prefix="async_grpo-chaos-"))
    server = Server(home)
    server.start()
    server.wait()
    settings = case.episodes if episodes else case.settings
    run = Run(home, settings(home, ranks=1 + first // len(KINDS) % 2, uri=server.uri))
    number = first
    try:
        with case.small_disk(run) as mounted:
            chaos = Chaos(
                run, batch=case.R, actors=case.ACTORS, seed=seed * 1_000_003 + first, server=server
            )
            chaos.start()
            for number, kind in enumerate(kinds, first):
                run.note_belongings()
                chaos.recover(blow := chaos.strike(kind))
                note = (
                    {}
                    if mounted or kind != "fill disk"
                    else {"note": "a disk that only says that it is full"}
                )
                _write(
                    out,
                    index=number,
                    seed=seed,
                    kind=kind,
                    survived=True,
                    seconds=round(blow.seconds, 2),
                    ready=len(blow.moment.ready),
                    **note,
                )
            run.note_belongings()
            end(run)
            counts = account.check(run, batch=case.R)
            if episodes:
                counts |= account.environments_closed(run)
            if "kill driver" in kinds:
                account.continued_in_recorded_steps(run)
            _nothing_left(run)
            account.mlflow_has_all(server.uri, run, counts["steps"])
            _write(out, part=first, seed=seed, faults=len(kinds), starts=run.starts, **counts)
        shutil.rmtree(home)
        return True
    except Exception as error:  # noqa: BLE001 - written down with the fault after which it came; the next part goes on
        _write(
            out,
            index=number,
            seed=seed,
            kind=kinds[number - first],
            survived=False,
            reason=f"{type(error).__name__}: {error}"[-6000:],
            kept=str(home),
        )
        return False
    finally:
        run.close()
        server.kill()


def _nothing_left(run: Run) -> None:
    deadline = time.monotonic() + LEFT_S
    while left := run.leftovers():
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)


def _write(out: Path, **line: Any) -> None:
    with open(out, "a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line)[:300], flush=True)


def table(out: Path) -> str:
    """Per kind: how many struck, how many the run survived, and how long it took to recover."""
    by_kind: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    parts = {}
    for line in map(json.loads, out.read_text().splitlines()):
        if "part" in line:
            parts[line["seed"], line["part"]] = line
        else:
            by_kind[line["kind"]][line["seed"], line["index"]] = (
                line  # the latest word on a fault counts
            )
    rows = [
        "| fault | injected | survived | seconds to recover: median | longest |",
        "|---|---|---|---|---|",
    ]
    for kind in (kind for kind in KINDS if kind in by_kind):
        lines = by_kind[kind].values()
        seconds = [line["seconds"] for line in lines if line["survived"]]
        times = f"{median(seconds):.1f} | {max(seconds):.1f}" if seconds else "- | -"
        rows.append(f"| {kind} | {len(lines)} | {len(seconds)} | {times} |")
    every = [line for lines in by_kind.values() for line in lines.values()]
    rows.append(f"| all | {len(every)} | {sum(line['survived'] for line in every)} | | |")
    sums = {
        name: sum(part[name] for part in parts.values()) for name in ("steps", "trained", "starts")
    }
    rows += [
        "",
        f"{len(parts)} runs came to their end and were checked: {sums['starts']} starts, "
        f"{sums['steps']} learner steps, {sums['trained']} groups.",
    ]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--count", type=int, default=len(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos.jsonl"))
    parser.add_argument("--table", type=Path)
    parser.add_argument("--episodes", action="store_true")
    arguments = parser.parse_args()
    if arguments.table is not None:
        print(table(arguments.table))
        return 0
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    survived, index = True, arguments.start
    while index < arguments.count:
        part, inside = divmod(index, len(KINDS))
        kinds = kinds_of(part, arguments.seed)[inside : inside + arguments.count - index]
        survived &= one_part(
            kinds, first=index, seed=arguments.seed, out=arguments.out, episodes=arguments.episodes
        )
        index += len(kinds)
    print(table(arguments.out))
    return 0 if survived else 1


if __name__ == "__main__":
    sys.exit(main())
