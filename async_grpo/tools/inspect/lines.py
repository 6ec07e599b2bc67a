"""A look inside a run: its ledger and its groups, while it goes on or afterwards, as lines.

Runs in: the process of `async-grpo inspect`; it only reads. Hides tokenizers and layout.
Invariants: text from a run (answers, names, reasons) cannot move the cursor; off a terminal there
are no control characters, and no line is cut or wrapped.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_grpo.config.stored import read_settings
from async_grpo.errors import SetupError
from async_grpo.replay.history import History, read_history
from async_grpo.runtime.text import counted, on_one_line, shortened
from async_grpo.tools.inspect.groups import (
    GONE,
    Column,
    Facts,
    RewardWeights,
    Selection,
    columns_of,
    count,
    group_facts,
    ledger_facts,
    ledger_rows,
    reward,
    select,
    why_none,
    why_unknown,
)
from async_grpo.wire.codec import Group, Row, WireError

DecodeTokens = Callable[[Iterable[int]], str]

PLAIN_WIDTH = 100_000
"""Columns off a terminal, where no line is to wrap."""
TOKENIZER_CONFIG = "tokenizer_config.json"
SNIPPET = 60
"""Characters of a prompt or response in the table."""
LEAST_IMPORTANT = ("actor", "seconds", "ticket", "truncated", "accuracy")
"""Columns that a narrow terminal does without, the first one first."""
LONG = ("prompt", "best response", "reason")
"""Columns that may be folded."""
LONG_MIN_WIDTH, GAP = 16, 2
"""Characters that a column of long text gets at least, and between columns."""


def selection_of(options: Namespace) -> Selection:
    """Take which groups the options select, and their order."""
    return Selection(**{one.name: getattr(options, one.name) for one in fields(Selection)})


def lines(options: Namespace) -> Iterator[str]:
    """Write what the options ask for. Raises SetupError."""
    config = read_settings(options.run_dir / "config.yaml")
    history = _history(options.run_dir)
    weights = dict(_section(config, "task").get("rewards") or {})
    for task, one in _section(config, "tasks").items():
        weights |= {f"{task}.{name}": weight for name, weight in (one.get("rewards") or {}).items()}
    decode = _decoder(options, config) if options.text or options.group is not None else None
    if options.group is not None:
        yield from _one_group(options, history, weights, decode)
    elif options.ledger:
        yield from [json.dumps(ledger_facts(history))] if options.json else _ledger(history)
    else:
        selection = selection_of(options)
        found: Iterable[Facts] = islice(select(history, selection, weights), options.limit or None)
        if decode is not None:
            found = (
                facts | _texts(history, facts, weights, decode, whole=options.json)
                for facts in found
            )
        if options.json:
            yield from map(json.dumps, found)
        else:
            groups = list(found)
            cut = len(groups) == options.limit
            matching = count(history, selection, weights) if cut else len(groups)
            title = _title(history, selection, len(groups), matching)
            yield from (*_ledger(history), "", title, *_table(groups))


# ---- where things are ----


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _history(run_dir: Path) -> History:
    if not run_dir.is_dir():
        raise SetupError(f"{run_dir} is no directory")
    return read_history(run_dir / "journal")


def _decoder(options: Namespace, config: dict[str, Any]) -> DecodeTokens | None:
    """Decode token ids with special tokens; None without a tokenizer that no option asks for."""
    places = [options.tokenizer]
    if not options.tokenizer:
        model = _section(config, "model").get("path")
        checkpoints = sorted(options.run_dir.glob("checkpoints/step_*/hf"), reverse=True)
        places = [*([Path(model)] if model else []), *checkpoints]
    files = [place / name for place in places for name in ("tokenizer.json", TOKENIZER_CONFIG)]
    file = next(filter(Path.is_file, files), None)
    if file is None:
        if not options.text and not options.tokenizer:
            return None
        looked = ", ".join(map(str, places)) or f"{options.run_dir}, which has no checkpoint yet"
        raise SetupError(
            f"there is no tokenizer in {looked}; name its directory with --tokenizer DIR"
        )
    if file.name != TOKENIZER_CONFIG:
        # What AutoTokenizer wraps: alone, it is there in a hundredth of the time.
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(file.parent, local_files_only=True)
    return lambda ids: tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)


# ---- text ----


def _indented(ids: Iterable[int], decode: DecodeTokens | None) -> str:
    lines = decode(ids).split("\n") if decode else [" ".join(map(str, ids))]
    return "\n".join(f"    {on_one_line(line)}" for line in lines)


def _render(table: Table) -> Iterator[str]:
    """Write the lines of a table, fitted to a terminal; elsewhere they are as wide as they are."""
    terminal, out = sys.stdout.isatty(), io.StringIO()
    width = None if terminal else PLAIN_WIDTH
    screen = Console(file=out, force_terminal=terminal, width=width, highlight=False, emoji=False)
    screen.print(table)
    yield from (line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


# ---- the ledger ----


def _ledger(history: History) -> Iterator[str]:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in ledger_rows(history):
        table.add_row(name, Text(on_one_line(text)))
    yield from _render(table)


# ---- many groups ----


def _title(history: History, selection: Selection, shown: int, matching: int | None) -> str:
    """Say how many groups match (`matching` None: not counted), and in which order they stand."""
    if not shown:
        return why_none(history, selection)
    known = counted(len(history.groups), "group")
    order = f"{'smallest' if selection.reverse else 'largest'} {selection.sort} first"
    if selection.sort == "id":
        order = "oldest first" if selection.reverse else "newest first"
    if not selection.narrows:
        return (known if matching == shown else f"{shown:,} of {known}") + f", {order}"
    found = f"at least {shown:,}" if matching is None else f"{matching:,}"
    limited = "" if matching == shown else f", {shown:,} shown (--limit {shown})"
    return f"{found} of {known} {'matches' if matching == 1 else 'match'}, {order}{limited}"


def _table(groups: list[Facts]) -> Iterator[str]:
    """Write a line per group, without the least important columns where the terminal is narrow."""
    if not groups:
        return
    columns = columns_of(groups)
    if sys.stdout.isatty():
        columns = _narrowed(columns, shutil.get_terminal_size().columns)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for header, _ in columns:  # words begin at the left, numbers end at the right
        long = header in LONG
        table.add_column(
            Text(header),
            justify="left" if long or header in ("state", "actor") else "right",
            no_wrap=not long,
            overflow="fold" if long else "ellipsis",
        )
    for cells in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*map(Text, cells))
    yield from _render(table)


def _narrowed(columns: list[Column], width: int) -> list[Column]:
    """Leave out as many of the least important columns as `width` characters ask for."""
    for name in LEAST_IMPORTANT:
        if sum(_width(*column) for column in columns) <= width:
            break
        columns = [column for column in columns if column[0] != name]
    return columns


def _width(header: str, cells: Sequence[str]) -> int:
    """Count the characters that a column needs, with the gap to the next one."""
    widest = max(map(len, (header, *cells)))
    return GAP + (min(widest, LONG_MIN_WIDTH) if header in LONG else widest)


def _texts(
    history: History, facts: Facts, weights: RewardWeights, decode: DecodeTokens, *, whole: bool
) -> Facts:
    """Decode prompt and best response, short; or, `whole`, the prompt and all that are trained."""
    group = _group(history, facts["group_id"])
    if group is None:
        return {}
    rows = [row for row in group.rows if row.role == "train"]
    prompt = decode(group.prompts[0])
    if whole:
        return {"prompt": prompt, "texts": [decode(row.response_ids) for row in rows]}
    best = max(rows, key=lambda row: reward(row.rewards, weights))
    texts = {"prompt": prompt, "best_response": decode(best.response_ids)}
    return {name: shortened(on_one_line(text), SNIPPET) for name, text in texts.items()}


# ---- one group ----


def _group(history: History, group_id: int) -> Group | None:
    """Read the group's result; None also for a damaged one, whose facts say so."""
    try:
        return history.group(group_id)
    except WireError:
        return None


def _one_group(
    options: Namespace, history: History, weights: RewardWeights, decode: DecodeTokens | None
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
        yield f"an earlier attempt: {on_one_line(record.reason)}"
    if group is None:
        if facts["reason"] != GONE:
            yield "its responses are not in the journal"
        return
    if group.attempt != record.attempt:
        yield f"what follows is the result of attempt {group.attempt}"
    for prompt in group.prompts:
        yield from ("", f"prompt, {len(prompt)} tokens", _indented(prompt, decode), "")
    for index, row in enumerate(group.rows, 1):
        yield f"response {index}: {_row_line(row)}"
        yield from _turns(row, decode)


def _turns(row: Row, decode: DecodeTokens | None) -> Iterator[str]:
    """Show what was said; of an episode turn by turn, with what its environment said before."""
    if len(row.segments) == 1 and row.turn_rewards is None:
        yield _indented(row.response_ids, decode)
        return
    at = 0
    for number, (context, sampled) in enumerate(row.segments):
        if context:
            yield f"  environment, {context} tokens"
            yield _indented(row.response_ids[at : at + context], decode)
        worth = "" if row.turn_rewards is None else f", reward {row.turn_rewards[number]:g}"
        yield f"  turn {number + 1}, {sampled} tokens{worth}"
        yield _indented(row.response_ids[at + context : at + context + sampled], decode)
        at += context + sampled


def _whole(group: Group, decode: DecodeTokens | None) -> Facts:
    rollouts = [
        {
            "role": row.role,
            "rewards": row.rewards,
            "correct": row.verdict,
            "finish_reason": row.finish_reason,
            "versions": [[span.policy_version, span.start, span.end] for span in row.versions],
            "response_ids": row.response_ids.tolist(),
        }
        | ({"text": decode(row.response_ids)} if decode else {})
        | ({} if row.turn_rewards is None else _episode(row))
        for row in group.rows
    ]
    return ({"prompt": decode(group.prompts[0])} if decode else {}) | {
        "attempt": group.attempt,
        "prompt_ids": group.prompts[0].tolist(),
        "rollouts": rollouts,
        "times": group.times,
    }


def _episode(row: Row) -> Facts:
    """Return what only episodes have: tokens of context and sampled ones, and reward, by turn."""
    return {"segments": [list(pair) for pair in row.segments], "turn_rewards": row.turn_rewards}


def _row_line(row: Row) -> str:
    rewards = ", ".join(f"{on_one_line(name)} {value:g}" for name, value in row.rewards.items())
    spans = f"v{row.versions[0].policy_version}"
    if len(row.versions) > 1:
        parts = [f"v{span.policy_version} [{span.start}, {span.end})" for span in row.versions]
        spans = ", ".join(parts)
    parts = [rewards] if row.role == "train" else [row.role, *[rewards] * bool(rewards)]
    if row.verdict is not None:
        parts.append(f"judged {'correct' if row.verdict else 'wrong'}")
    by = "" if row.role == "demonstration" else f" by {spans}"
    parts += [f"{len(row.behavior_logprobs)} tokens{by}", on_one_line(row.finish_reason)]
    return ", ".join(parts)
