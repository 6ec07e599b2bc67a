"""A look inside a run: `python -m async_grpo.replay RUN_DIR` prints the ledger and its groups, while the run goes on or afterwards.

Runs in: a process of its own, on any machine that sees the run's directory; it only reads. Hides options, tokenizers and layout. Exit code
2 with one sentence for a directory, an option or a group that does not exist. Invariants: text from a run (answers, names, reasons) cannot
move the cursor; off a terminal there are no control characters, and no line is cut or wrapped.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_grpo.config import yaml12
from async_grpo.errors import RunError, SetupError
from async_grpo.replay.facts import (
    SORT_KEYS,
    Facts,
    Selection,
    candidates,
    columns_of,
    group_facts,
    ledger_facts,
    narrowed,
    reward,
    select,
    visible,
)
from async_grpo.replay.history import History, read_history
from async_grpo.replay.journal import segment_path, segments
from async_grpo.replay.ledger import State
from async_grpo.wire import Group, Rollout, WireError

Decode = Callable[[Sequence[int]], str]

PLAIN_WIDTH = 100_000
"""Columns off a terminal, where no line is to wrap."""
SNIPPET = 60
"""Characters of a prompt or response in the table."""
STATE_STYLES = {
    "trained": "green", "training": "bright_green", "ready": "cyan", "in flight": "blue", "waiting": "yellow", "rejected": "magenta",
    "failed": "red", "expired": "red",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 for one that makes no sense."""
    parser = _Parser(prog="python -m async_grpo.replay", description="Look into a run's replay queue, while it goes on or afterwards.")
    parser.add_argument("run_dir", type=Path, help="the run's directory (run.dir), which holds journal/")
    parser.add_argument("--ledger", action="store_true", help="print only the ledger, no groups")
    which = parser.add_argument_group("which groups")
    which.add_argument("--group", type=int, metavar="ID", help="this one, whole: prompt, responses, rewards, version spans")
    which.add_argument(
        "--state", action="append", choices=[state.value for state in State], metavar="STATE",
        help="in this state; may be repeated: " + ", ".join(State),
    )
    which.add_argument("--step", "--steps", dest="steps", type=_span, metavar="N|A-B", help="taken by these learner steps")
    which.add_argument("--version", type=int, metavar="V", help="with a token that policy version V sampled")
    which.add_argument("--actor", metavar="NAME", help="from this rollout actor; * stands for anything")
    which.add_argument("--min-reward", type=float, metavar="X", help="mean reward of at least X")
    which.add_argument("--max-reward", type=float, metavar="X", help="mean reward of at most X")
    how = parser.add_argument_group("how they are shown")
    how.add_argument("--sort", choices=list(SORT_KEYS), default="id", help="largest first (default: id, so the newest first)")
    how.add_argument("--reverse", action="store_true", help="smallest first")
    how.add_argument("--limit", type=int, default=20, metavar="N", help="at most N groups, 0 for all (default: 20)")
    how.add_argument("--text", action="store_true", help="with the prompt and the best response; with --json, all responses")
    how.add_argument("--tokenizer", type=Path, metavar="DIR", help="makes text of tokens (default: the model's, or the newest checkpoint's)")
    how.add_argument("--json", action="store_true", help="one JSON object per group and line; with --ledger, one for the ledger")
    parser.epilog = "The reward is weighted by task.rewards of the run's config.yaml; without weights there, it is the first component."
    return parser.parse_args(argv)


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
            states=options.state, steps=options.steps, version=options.version, actor=options.actor, min_reward=options.min_reward,
            max_reward=options.max_reward, sort=options.sort, reverse=options.reverse, limit=options.limit,
        )
        found = select(history, selection, weights)
        if decode is not None:
            found = (facts | _texts(history, facts, weights, decode, whole=options.json) for facts in found)
        if options.json:
            yield from map(json.dumps, found)
        else:
            yield from _ledger(history)
            groups = list(found)
            yield from ("", _title(selection, len(groups), len(candidates(history, selection))))
            yield from _table(groups)


# ---- where things are ----


def _span(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor a range of steps like 3-7")
    return int(match[1]), int(match[2] or match[1])


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
        raise SetupError(f"{run_dir} has no journal: it is not the directory of a run (run.dir), or replay.journal.enable is false")
    return read_history(run_dir / "journal")


def _decoder(options: argparse.Namespace, config: dict[str, Any]) -> Decode | None:
    """Token ids -> text, special tokens included. None where no tokenizer is at hand and no option insists on one."""
    model = _section(config, "model").get("path")
    checkpoints = sorted(options.run_dir.glob("checkpoints/step_*/hf"), reverse=True)
    places = [options.tokenizer] if options.tokenizer else [*([Path(model)] if model else []), *checkpoints]
    place = next((place for place in places if any((place / f"tokenizer{end}.json").is_file() for end in ("", "_config"))), None)
    if place is None and (options.text or options.tokenizer):
        looked = ", ".join(map(str, places)) or f"{options.run_dir}, which has no checkpoint yet"
        raise SetupError(f"there is no tokenizer in {looked}; name its directory with --tokenizer DIR")
    if place is None:
        return None
    if (place / "tokenizer.json").is_file():
        from tokenizers import Tokenizer  # what AutoTokenizer wraps; alone it is there in a hundredth of the time

        tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
    return lambda ids: tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)


# ---- text ----


def _snippet(text: str) -> str:
    text = visible(text)
    return text if len(text) <= SNIPPET else text[: SNIPPET - 3] + "..."


def _indented(ids: Sequence[int], decode: Decode | None) -> str:
    lines = decode(ids).split("\n") if decode else [" ".join(map(str, ids))]
    return "\n".join(f"    {visible(line)}" for line in lines)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def _render(table: Table) -> Iterator[str]:
    """Lines of a table: colours and the terminal's width on a terminal, plain and as wide as they are elsewhere."""
    terminal, out = sys.stdout.isatty(), io.StringIO()
    Console(file=out, force_terminal=terminal, width=None if terminal else PLAIN_WIDTH, highlight=False, emoji=False).print(table)
    yield from (line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


# ---- the ledger ----


def _ledger(history: History) -> Iterator[str]:
    ledger, totals, digest = history.ledger, history.ledger.totals, history.live.get(history.ledger.live)
    under_way = f"step {ledger.training_step} in training" if ledger.training_step else f"step {ledger.steps + 1} waits for its groups"
    rows = [
        ("journal", _files(history.directory)), ("run", _starts(history)),
        ("steps", f"{ledger.steps:,} trained, " + ("the run is over" if ledger.over else under_way)),
        ("live", f"version {ledger.live}" + (f", weights {digest}" if digest else "")),
        ("groups", f"{ledger.issued:,} issued: {_listed(ledger.counts()) or 'none'}"),
        ("rejected", _listed(ledger.rejected)), ("failed", _listed(ledger.failed)),
        ("lost", _listed({name: totals[name] for name in ("attempts_lost", "forfeited", "overdue", "expirations", "unreadable")})),
        ("refused", _listed({name: totals[name] for name in ("late", "duplicate", "invalid")})),
        ("", _last_refusal(history)),
        ("retired", f"{len(ledger.retired):,} problems" if ledger.retired else ""),
        *[("note", note) for note in history.notes],
    ]
    if (hidden := ledger.issued - len(history.groups)) > 0:
        rows.append(("note", f"{hidden:,} groups are counted but not listed: what the journal told of them was deleted or is damaged"))
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        if text:
            table.add_row(name, Text(visible(text)))
    yield from _render(table)


def _files(directory: Path) -> str:
    stats = [path.stat() for number in segments(directory) if (path := segment_path(directory, number)).exists()]
    size, newest = sum(stat.st_size for stat in stats), max((stat.st_mtime for stat in stats), default=0.0)
    return f"{directory}: {len(stats)} segment{'s' * (len(stats) != 1)}, {size / 1e6:,.1f} MB, written {_ago(time.time() - newest)}"


def _starts(history: History) -> str:
    restarts, resumed = history.ledger.totals["restarts"], [str(start.step) for start in history.starts if start.epoch]
    text = f"epoch {history.starts[-1].epoch}" + (f", resumed from step {', '.join(resumed)}" if resumed else "")
    return text + (f"; restarts of the queue's process: {restarts}" if restarts else "")


def _last_refusal(history: History) -> str:
    if not history.refusals:
        return ""
    last = history.refusals[-1]
    what = f"group {last.group_id} attempt {last.attempt}" if last.group_id >= 0 else "an unreadable frame"
    return f"the last one: {last.status}, {what} from {last.actor_id}: {last.reason}"


# ---- many groups ----


def _title(selection: Selection, shown: int, found: int) -> str:
    if not shown:
        return "no group matches"
    order = f"{'smallest' if selection.reverse else 'largest'} {selection.sort} first"
    if selection.sort == "id":
        order = "oldest first" if selection.reverse else "newest first"
    return f"{shown:,}" + ("" if selection.reads_frames else f" of {found:,}") + f" groups, {order}"


def _table(groups: list[Facts]) -> Iterator[str]:
    """One line per group. A terminal that is too narrow does without the least important columns, and folds long texts."""
    if not groups:
        return
    columns = columns_of(groups)
    if sys.stdout.isatty():
        columns = narrowed(columns, shutil.get_terminal_size().columns)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(Text(column.header), justify=column.justify, no_wrap=not column.long, overflow="fold" if column.long else "ellipsis")
    for cells in zip(*[column.cells for column in columns], strict=True):
        named = zip(columns, cells, strict=True)
        table.add_row(*[Text(cell, style=STATE_STYLES.get(cell, "") if column.header == "state" else "") for column, cell in named])
    yield from _render(table)


def _texts(history: History, facts: Facts, weights: Mapping[str, float], decode: Decode, *, whole: bool) -> Facts:
    """Prompt and best response, short enough for the table; or, `whole`, the prompt and all responses to train."""
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


def _one_group(options: argparse.Namespace, history: History, weights: Mapping[str, float], decode: Decode | None) -> Iterator[str]:
    record = history.groups.get(options.group)
    if record is None:
        raise SetupError(_why_unknown(options.group, history))
    facts, group = group_facts(history, record, weights), _group(history, options.group)
    if options.json:
        yield json.dumps(facts | (_whole(group, decode) if group is not None else {}))
        return
    yield from _table([facts])
    if record.reason and not facts["reason"]:
        yield f"an earlier attempt: {visible(record.reason)}"
    if group is None:
        yield "its responses are not in the journal"
        return
    if group.attempt != record.attempt:
        yield f"what follows is the result of attempt {group.attempt}"
    yield from ("", f"prompt, {len(group.prompt_ids)} tokens", _indented(group.prompt_ids, decode), "")
    for index, row in enumerate(group.rollouts, 1):
        yield from (f"response {index}: {_row_line(row)}", _indented(row.response_ids, decode))


def _why_unknown(group_id: int, history: History) -> str:
    first, after = history.ledger.first_group_id, history.ledger.next_group_id
    if first <= group_id < after:
        return f"what the journal told of group {group_id} was deleted or is damaged"
    return f"group {group_id} was never issued" + (f", only {first} to {after - 1} were" if after > first else ", nor was any other")


def _whole(group: Group, decode: Decode | None) -> Facts:
    rollouts = [
        {
            "role": row.role, "rewards": row.rewards, "verdict": row.verdict, "finish_reason": row.finish_reason,
            "versions": [[span.policy_version, span.start, span.end] for span in row.versions], "response_ids": row.response_ids.tolist(),
        } | ({"text": decode(row.response_ids)} if decode else {})
        for row in group.rollouts
    ]
    prompt = {"prompt": decode(group.prompt_ids)} if decode else {}
    return prompt | {"attempt": group.attempt, "prompt_ids": group.prompt_ids.tolist(), "rollouts": rollouts, "times": group.times}


def _row_line(row: Rollout) -> str:
    rewards = ", ".join(f"{visible(name)} {value:g}" for name, value in row.rewards.items())
    spans = ", ".join(f"v{span.policy_version} [{span.start}, {span.end})" for span in row.versions)
    if len(row.versions) == 1:
        spans = f"v{row.versions[0].policy_version}"
    verdict = "" if row.verdict is None else f", verdict {row.verdict:g}"
    baseline = "baseline, " if row.role == "baseline" else ""
    return f"{baseline}{rewards}{verdict}, {len(row.response_ids)} tokens by {spans}, {visible(row.finish_reason)}"


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        sys.exit(main())
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
