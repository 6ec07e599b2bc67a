"""A look inside a run: `python -m async_grpo.replay RUN_DIR` prints the ledger and its groups,
while the run goes on or afterwards.

Runs in: a process of its own, on any machine that sees the run's directory; it only reads. Hides
options, tokenizers and layout. Exit code 2 with one sentence for a directory, an option or a group
that does not exist. Invariants: text from a run (answers, names, reasons) cannot move the cursor;
off a terminal there are no control characters, and no line is cut or wrapped.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_grpo.config import yaml12
from async_grpo.errors import RunError, SetupError
from async_grpo.replay.history import History, read_history
from async_grpo.replay.inspection import (
    GONE,
    SORT_KEYS,
    Column,
    Facts,
    Selection,
    columns_of,
    count,
    group_facts,
    ledger_facts,
    ledger_rows,
    many,
    reward,
    select,
    visible,
    why_none,
    why_unknown,
)
from async_grpo.replay.journal import segments
from async_grpo.replay.ledger import State
from async_grpo.wire import Group, Rollout, WireError

DecodeTokens = Callable[[Iterable[int]], str]

PLAIN_WIDTH = 100_000
"""Columns off a terminal, where no line is to wrap."""
SNIPPET = 60
"""Characters of a prompt or response in the table."""
CHOICES = (
    "states",
    "steps",
    "version",
    "actor",
    "min_reward",
    "max_reward",
    "sort",
    "reverse",
    "limit",
)
"""Options that say which groups are listed, and in which order."""
LEAST_IMPORTANT = ("actor", "seconds", "ticket", "truncated", "verdict")
"""Columns that a narrow terminal does without, the first one first."""
STATE_STYLES = {
    "trained": "green",
    "training": "bright_green",
    "ready": "cyan",
    "in flight": "blue",
    "waiting": "yellow",
    "rejected": "magenta",
    "failed": "red",
    "expired": "red",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 for one that makes no sense."""
    parser = _Parser(
        prog="python -m async_grpo.replay",
        description="Look into a run's replay queue, while it goes on or afterwards.",
    )
    parser.add_argument(
        "run_dir", type=Path, help="the run's directory (run.dir), which holds journal/"
    )
    parser.add_argument("--ledger", action="store_true", help="print only the ledger, no groups")
    _selecting(parser)
    _showing(parser)
    parser.epilog = (
        "The reward is weighted by task.rewards of the run's config.yaml; without weights "
        "there, it is the first component."
    )
    options = parser.parse_args(argv)
    if problem := _contradiction(options, parser):
        parser.error(problem)
    return options


def _selecting(parser: argparse.ArgumentParser) -> None:
    which = parser.add_argument_group("which groups")
    which.add_argument(
        "--group",
        type=_natural,
        metavar="ID",
        help="this one, whole: prompt, responses, rewards, version spans",
    )
    which.add_argument(
        "--state",
        dest="states",
        action="append",
        choices=[state.value for state in State],
        metavar="STATE",
        help="in this state; may be repeated: " + ", ".join(State),
    )
    which.add_argument(
        "--step",
        "--steps",
        dest="steps",
        type=_span,
        metavar="N|A-B",
        help="taken by these learner steps",
    )
    which.add_argument(
        "--version", type=_natural, metavar="V", help="with a token that policy version V sampled"
    )
    which.add_argument(
        "--actor", metavar="NAME", help="from this rollout actor; * stands for anything"
    )
    which.add_argument("--min-reward", type=_real, metavar="X", help="mean reward of at least X")
    which.add_argument("--max-reward", type=_real, metavar="X", help="mean reward of at most X")


def _showing(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how they are shown")
    how.add_argument(
        "--sort",
        choices=list(SORT_KEYS),
        default="id",
        help="largest first (default: id, so the newest first)",
    )
    how.add_argument("--reverse", action="store_true", help="smallest first")
    how.add_argument(
        "--limit",
        type=_natural,
        default=20,
        metavar="N",
        help="at most N groups, 0 for all (default: 20)",
    )
    how.add_argument(
        "--text",
        action="store_true",
        help="with the prompt and the best response; with --json, all responses",
    )
    how.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="makes text of tokens (default: the model's, or the newest checkpoint's)",
    )
    how.add_argument(
        "--json",
        action="store_true",
        help="one JSON object per group and line; with --ledger, one for the ledger",
    )


def _contradiction(options: argparse.Namespace, parser: argparse.ArgumentParser) -> str | None:
    """What one option says against another."""
    chosen = any(
        value != parser.get_default(name)
        for name, value in vars(options).items()
        if name in CHOICES
    )
    alone = "--ledger" if options.ledger else "--group" if options.group is not None else None
    if options.ledger and (options.group is not None or options.text):
        return (
            f"--ledger prints no groups, so {'--text' if options.group is None else '--group'} "
            "has no place beside it"
        )
    if alone and chosen:
        return f"options that choose or sort groups have no place beside {alone}"
    if (
        None not in (options.min_reward, options.max_reward)
        and options.min_reward > options.max_reward
    ):
        return (
            f"no reward is at least {options.min_reward:g} (--min-reward) and at most "
            f"{options.max_reward:g} (--max-reward)"
        )
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Print what the options ask for; returns the exit code."""
    options = parse(argv)
    try:
        config = _config(options.run_dir)
        for line in _output(options, _history(options.run_dir, config), config):
            print(line)
    except RunError as error:
        print(f"error: {visible(str(error))}", file=sys.stderr)
        return 2
    return 0


def _output(options: argparse.Namespace, history: History, config: dict[str, Any]) -> Iterator[str]:
    weights = _section(config, "task").get("rewards") or {}
    decode = _decoder(options, config) if options.text or options.group is not None else None
    if options.group is not None:
        yield from _one_group(options, history, weights, decode)
    elif options.ledger:
        yield from [json.dumps(ledger_facts(history))] if options.json else _ledger(history)
    else:
        selection = Selection(
            states=options.states,
            steps=options.steps,
            version=options.version,
            actor=options.actor,
            min_reward=options.min_reward,
            max_reward=options.max_reward,
            sort=options.sort,
            reverse=options.reverse,
        )
        found: Iterator[Facts] = islice(select(history, selection, weights), options.limit or None)
        if decode is not None:
            found = (
                facts | _texts(history, facts, weights, decode, whole=options.json)
                for facts in found
            )
        if options.json:
            yield from map(json.dumps, found)
        else:
            yield from _ledger(history)
            groups = list(found)
            cut = len(groups) == options.limit
            yield from (
                "",
                _title(
                    history,
                    selection,
                    len(groups),
                    count(history, selection, weights) if cut else len(groups),
                ),
            )
            yield from _table(groups)


# ---- where things are ----


def _span(text: str) -> tuple[int, int]:
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


def _natural(text: str) -> int:
    if re.fullmatch(r"\d+", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def _real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def _config(run_dir: Path) -> dict[str, Any]:
    """The run's settings as plain values; nothing depends on them but names and weights."""
    try:
        found = yaml12.read((run_dir / "config.yaml").read_text(encoding="utf-8"))[0]
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _history(run_dir: Path, config: dict[str, Any]) -> History:
    if not run_dir.is_dir():
        raise SetupError(f"{run_dir} is no directory")
    if not segments(run_dir / "journal"):
        raise SetupError(
            f"{run_dir} has no journal: it is not the directory of a run (run.dir), or "
            "replay.journal.enable is false"
        )
    return read_history(run_dir / "journal")


def _decoder(options: argparse.Namespace, config: dict[str, Any]) -> DecodeTokens | None:
    """Token ids -> text, special tokens included. None where no tokenizer is at hand and no option
    insists on one.
    """
    model = _section(config, "model").get("path")
    checkpoints = sorted(options.run_dir.glob("checkpoints/step_*/hf"), reverse=True)
    places = (
        [options.tokenizer]
        if options.tokenizer
        else [*([Path(model)] if model else []), *checkpoints]
    )
    place = next(
        (
            place
            for place in places
            if any((place / f"tokenizer{end}.json").is_file() for end in ("", "_config"))
        ),
        None,
    )
    if place is None and (options.text or options.tokenizer):
        looked = ", ".join(map(str, places)) or f"{options.run_dir}, which has no checkpoint yet"
        raise SetupError(
            f"there is no tokenizer in {looked}; name its directory with --tokenizer DIR"
        )
    if place is None:
        return None
    if (place / "tokenizer.json").is_file():
        from tokenizers import (
            Tokenizer,
        )  # what AutoTokenizer wraps; alone it is there in a hundredth of the time

        tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
    return lambda ids: tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)


# ---- text ----


def _snippet(text: str) -> str:
    text = visible(text)
    return text if len(text) <= SNIPPET else text[: SNIPPET - 3] + "..."


def _indented(ids: Iterable[int], decode: DecodeTokens | None) -> str:
    lines = decode(ids).split("\n") if decode else [" ".join(map(str, ids))]
    return "\n".join(f"    {visible(line)}" for line in lines)


def _render(table: Table) -> Iterator[str]:
    """Lines of a table: colours and the terminal's width on a terminal, plain and as wide as they
    are elsewhere.
    """
    terminal, out = sys.stdout.isatty(), io.StringIO()
    Console(
        file=out,
        force_terminal=terminal,
        width=None if terminal else PLAIN_WIDTH,
        highlight=False,
        emoji=False,
    ).print(table)
    yield from (line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


# ---- the ledger ----


def _ledger(history: History) -> Iterator[str]:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in ledger_rows(history):
        table.add_row(name, Text(visible(text)))
    yield from _render(table)


# ---- many groups ----


def _title(history: History, selection: Selection, shown: int, matching: int | None) -> str:
    """matching: groups that match, None where nobody counted them."""
    if not shown:
        return why_none(history, selection)
    known = many(len(history.groups), "group")
    order = f"{'smallest' if selection.reverse else 'largest'} {selection.sort} first"
    if selection.sort == "id":
        order = "oldest first" if selection.reverse else "newest first"
    if not selection.narrows:
        return (known if matching == shown else f"{shown:,} of {known}") + f", {order}"
    found = f"at least {shown:,}" if matching is None else f"{matching:,}"
    limited = "" if matching == shown else f", {shown:,} shown (--limit {shown})"
    return f"{found} of {known} {'matches' if matching == 1 else 'match'}, {order}{limited}"


def _table(groups: list[Facts]) -> Iterator[str]:
    """One line per group. A terminal that is too narrow does without the least important columns,
    and folds long texts.
    """
    if not groups:
        return
    columns = columns_of(groups)
    if sys.stdout.isatty():
        columns = _narrowed(columns, shutil.get_terminal_size().columns)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(
            Text(column.header),
            justify=column.justify,
            no_wrap=not column.long,
            overflow="fold" if column.long else "ellipsis",
        )
    for cells in zip(*[column.cells for column in columns], strict=True):
        named = zip(columns, cells, strict=True)
        table.add_row(
            *[
                Text(cell, style=STATE_STYLES.get(cell, "") if column.header == "state" else "")
                for column, cell in named
            ]
        )
    yield from _render(table)


def _narrowed(columns: list[Column], width: int) -> list[Column]:
    """The columns that fit into `width` characters: without the least important ones, as far as
    needed.
    """
    for name in LEAST_IMPORTANT:
        if sum(column.width for column in columns) <= width:
            break
        columns = [column for column in columns if column.header != name]
    return columns


def _texts(
    history: History,
    facts: Facts,
    weights: Mapping[str, float],
    decode: DecodeTokens,
    *,
    whole: bool,
) -> Facts:
    """Prompt and best response, short enough for the table; or, `whole`, the prompt and all
    responses to train.
    """
    group = _group(history, facts["group_id"])
    if group is None:
        return {}
    prompt, rows = decode(group.prompt_ids), [row for row in group.rollouts if row.role == "train"]
    if whole:
        return {"prompt": prompt, "texts": [decode(row.response_ids) for row in rows]}
    best = max(rows, key=lambda row: reward(row.rewards, weights))
    return {"prompt": _snippet(prompt), "best_response": _snippet(decode(best.response_ids))}


# ---- one group ----


def _group(history: History, group_id: int) -> Group | None:
    """None also for a damaged one: its facts say so."""
    try:
        return history.group(group_id)
    except WireError:
        return None


def _one_group(
    options: argparse.Namespace,
    history: History,
    weights: Mapping[str, float],
    decode: DecodeTokens | None,
) -> Iterator[str]:
    record = history.groups.get(options.group)
    if record is None:
        raise SetupError(why_unknown(history, options.group))
    facts, group = group_facts(history, record, weights), _group(history, options.group)
    if options.json:
        yield json.dumps(facts | (_whole(group, decode) if group is not None else {}))
        return
    yield from _table([facts])
    if record.reason and facts["reason"] != record.reason:
        yield f"an earlier attempt: {visible(record.reason)}"
    if group is None:
        if facts["reason"] != GONE:
            yield "its responses are not in the journal"
        return
    if group.attempt != record.attempt:
        yield f"what follows is the result of attempt {group.attempt}"
    yield from (
        "",
        f"prompt, {len(group.prompt_ids)} tokens",
        _indented(group.prompt_ids, decode),
        "",
    )
    for index, row in enumerate(group.rollouts, 1):
        yield from (f"response {index}: {_row_line(row)}", _indented(row.response_ids, decode))


def _whole(group: Group, decode: DecodeTokens | None) -> Facts:
    rollouts = [
        {
            "role": row.role,
            "rewards": row.rewards,
            "verdict": row.verdict,
            "finish_reason": row.finish_reason,
            "versions": [[span.policy_version, span.start, span.end] for span in row.versions],
            "response_ids": row.response_ids.tolist(),
        }
        | ({"text": decode(row.response_ids)} if decode else {})
        for row in group.rollouts
    ]
    prompt = {"prompt": decode(group.prompt_ids)} if decode else {}
    return prompt | {
        "attempt": group.attempt,
        "prompt_ids": group.prompt_ids.tolist(),
        "rollouts": rollouts,
        "times": group.times,
    }


def _row_line(row: Rollout) -> str:
    rewards = ", ".join(f"{visible(name)} {value:g}" for name, value in row.rewards.items())
    spans = ", ".join(f"v{span.policy_version} [{span.start}, {span.end})" for span in row.versions)
    if len(row.versions) == 1:
        spans = f"v{row.versions[0].policy_version}"
    verdict = "" if row.verdict is None else f", verdict {row.verdict:g}"
    baseline = "baseline, " if row.role == "baseline" else ""
    return (
        f"{baseline}{rewards}{verdict}, {len(row.response_ids)} tokens by {spans}, "
        f"{visible(row.finish_reason)}"
    )


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        sys.exit(main())
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
