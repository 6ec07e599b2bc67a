"""Rows that are read when they are posed: the same as those read one after the other."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from async_grpo.config import schema
from async_grpo.run.preflight.run_check import check_run
from async_grpo.tasks import data, indexed
from async_grpo.tasks.base import Problem, TaskError
from async_grpo.tasks.indexed import open_rows
from async_grpo.tasks.jsonl import Jsonl
from async_grpo.tasks.registry import create_task, load_task
from async_grpo.tasks.sources import BadRow, read_rows

ROWS: list[dict[str, Any]] = [
    {"prompt": f"p{n}, é", "answer": str(n), "meta": None if n % 3 else {"n": n}}
    for n in range(500)
]
zipped = partial(gzip.compress, mtime=0)  # names of tests have it, in every worker the same
LINES = "".join(json.dumps(row, ensure_ascii=n % 2 > 0) + "\n" for n, row in enumerate(ROWS))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(indexed, "BLOCK", 999)  # lines go over its ends


def table(rows: list[dict[str, Any]] = ROWS) -> pa.Table:
    return pa.Table.from_pylist(rows)


def arrow(new: Callable[..., Any], path: Path) -> None:
    with new(str(path), table().schema) as writer:
        writer.write_table(table(), 70)


def zstd(path: Path) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as out:
        out.write(LINES.encode())


def categories(path: Path) -> None:
    """Columns whose batches have dictionaries of their own."""
    parts = [table(ROWS[:9]), table(ROWS[9:20])]
    coded = [part.set_column(1, "answer", part["answer"].dictionary_encode()) for part in parts]
    with pa.ipc.new_stream(str(path), coded[0].schema) as writer:
        for part in coded:
            writer.write_table(part)


def blank_lines(path: Path) -> None:
    first, *others = LINES.encode().splitlines()
    rest = b"\n".join(others)
    path.write_bytes(b"  \n\n" + first + b"\n\t\r\n5\n  " + rest + b"\n   \n}\n{}")


def at_an_address(path: Path) -> None:
    fsspec.filesystem("memory").pipe(f"/{path.name}", zipped(LINES.encode()))


MADE: dict[str, Callable[[Path], Any]] = {
    "lines": lambda path: path.write_text(LINES),
    "lines of Windows, some empty": lambda path: path.write_bytes(
        b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n\r\n").encode().rstrip()
    ),
    "blank lines, and some of two letters": blank_lines,
    "gzip": lambda path: path.write_bytes(zipped(LINES.encode())),
    "zstd": zstd,
    "parquet": lambda path: pq.write_table(table(), path, row_group_size=64),
    "parquet without rows": lambda path: pq.write_table(table().slice(0, 0), path),
    "arrow file": lambda path: arrow(pa.ipc.new_file, path),
    "arrow stream": lambda path: arrow(pa.ipc.new_stream, path),
    "dictionaries": categories,
    "saved": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(path),
    "memory://": at_an_address,
}


def plain(placed: tuple[str, Any]) -> tuple[str, Any]:
    place, row = placed
    return place, str(row) if isinstance(row, BadRow) else row


@pytest.mark.parametrize("kind", MADE)
def test_a_row_by_its_number_is_that_of_the_source_in_order(tmp_path: Path, kind: str) -> None:
    MADE[kind](path := tmp_path / "rows")
    source = f"{kind}rows" if "://" in kind else str(path)
    expected = list(read_rows(source, split="train"))
    for rows in (open_rows(source, split="train"), open_rows(source, split="train")):
        order = random.Random(0).sample(range(len(rows)), len(rows))
        found = {number: rows[number] for number in order}
        assert [plain(found[number]) for number in sorted(found)] == list(map(plain, expected))
    assert not list(tmp_path.glob("cache/*.draft"))


def test_several_files_are_one_after_the_other_and_a_change_is_another_digest(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    pq.write_table(table(ROWS[:7]), tmp_path / "b.parquet")
    source = f"{tmp_path}/*.*"
    rows = open_rows(source, split="train")
    assert [rows[n] for n in range(len(rows))] == list(read_rows(source, split="train"))
    assert rows[500][0] == "b.parquet row 0"
    (tmp_path / "c.jsonl").write_text(LINES.replace("p7,", "p8,"))
    digests = {open_rows(f"{tmp_path}/{name}.*", split="train").digest for name in "abc"}
    assert len({rows.digest, *digests}) == 4
    pq.write_table(table(ROWS[:8]), tmp_path / "b.parquet")
    assert len(open_rows(source, split="train")) == 1008, "the copy is of what is there now"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (json.dumps(ROWS).encode(), "needs JSON lines, parquet or Arrow, not a JSON array or CSV"),
        (b"prompt,answer\r\na,b\r\n", "needs JSON lines, parquet or Arrow"),
        (zipped(LINES.encode())[:-20], "rows cannot be read: Compressed file ended"),
        (b"PAR1 and then nothing", "rows cannot be read"),
        (b'{"prompt": "a"}\n' * 9, r"9 of 9 rows are malformed: line 1, .*no key 'answer'"),
        (b"", "has no training problem"),
    ],
)
def test_what_cannot_be_streamed_is_told_in_a_sentence(
    tmp_path: Path, raw: bytes, says: str
) -> None:
    (tmp_path / "rows").write_bytes(raw)
    with pytest.raises(TaskError, match=says):
        load_task(settings(tmp_path / "rows"), 0)
    assert not list(tmp_path.glob("cache/*[!k]")), "but locks"


def test_a_file_that_changes_while_it_is_in_use_is_no_other_row(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text(LINES)
    rows = open_rows(str(path), split="train")
    assert rows[3] == ("line 4", ROWS[3])
    replaced = tmp_path / "new"
    replaced.write_text(LINES.replace("p3", "p4"))
    replaced.rename(path)
    again = open_rows(str(path), split="train")
    with path.open("a") as file:
        file.write("{}\n")
    for one in (rows, again):
        with pytest.raises(TaskError, match="rows has changed while it was in use"):
            one[3]


def test_the_digest_does_not_depend_on_how_a_data_set_is_stored(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    swapped = data.rename_columns({"answer": "prompt", "prompt": "answer"})
    data.save_to_disk(tmp_path / "one")
    data.save_to_disk(tmp_path / "two", num_shards=3)
    swapped.save_to_disk(tmp_path / "swapped")
    data.select([*range(3), *range(4, 500), 3]).save_to_disk(tmp_path / "moved")
    names = ("one", "two", "swapped", "moved")
    found = [open_rows(str(tmp_path / name), split="train").digest for name in names]
    assert found[0] == found[1] and len({*found}) == 3


def test_what_is_at_an_address_now_is_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers tell a change by the header ETag or Last-Modified."""
    served = tmp_path / "served"
    served.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(served))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        source = f"http://127.0.0.1:{server.server_port}/rows.jsonl"
        for seconds, row in ((1_000, ROWS[0]), (9_000, ROWS[1])):
            (served / "rows.jsonl").write_text(json.dumps(row))
            os.utime(served / "rows.jsonl", (seconds, seconds))
            assert open_rows(source, split="train")[0] == ("line 1", row)
        server.shutdown()


def test_many_processes_make_one_copy(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "rows.parquet")
    work = (
        "import sys; from async_grpo.tasks.indexed import open_rows; "
        "print(len(open_rows(sys.argv[1], split='train')))"
    )
    argv = [sys.executable, "-c", work, str(tmp_path / "rows.parquet")]
    home = os.environ | {"HOME": str(tmp_path)}
    running = [subprocess.Popen(argv, env=home, stdout=subprocess.PIPE) for _ in range(3)]
    assert [one.communicate(timeout=60)[0] for one in running] == [b"500\n"] * 3
    [copy] = (tmp_path / ".cache" / "async_grpo" / "rows").glob("*[!k]")
    assert copy.suffix == ""


def test_a_cache_that_cannot_be_written_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(table(), tmp_path / "rows.parquet")
    monkeypatch.setattr(indexed, "CACHE", str(tmp_path / "rows.parquet" / "cache"))
    with pytest.raises(TaskError, match=r"rows.parquet cannot be copied to .*: Not a directory"):
        open_rows(str(tmp_path / "rows.parquet"), split="train")


# ---- a task ----


def settings(source: object, **more: Any) -> schema.TaskConfig:
    return schema.TaskConfig(name="jsonl", train=str(source), streaming=True, **more)


def test_bad_rows_and_held_out_prompts_leave_their_place_to_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, held_out = LINES.splitlines(), (3, 4, 499)
    lines[7], lines[8] = '{"prompt": "no answer"}', "{broken"
    lines[11] = '{"prompt": "half a pair \\ud83d", "answer": "11"}'
    (tmp_path / "rows").write_text("\n".join(lines))
    (tmp_path / "eval").write_text("\n".join(lines[n] for n in held_out))
    monkeypatch.setattr(data, "SAMPLE", 100)  # which meets neither bad row
    task = load_task(settings(tmp_path / "rows", eval=str(tmp_path / "eval")), 0)
    assert [one.reference["answer"] for one in task.evaluation(9)] == ["3", "4", "499"]
    posed = [int(task.train(n).reference["answer"]) for n in range(len(task))]
    moved = {3: 5, 4: 5, 7: 9, 8: 9, 11: 12, 499: 0}
    assert posed == [moved.get(n, n) for n in range(500)]
    assert "line 8 is left out: no key 'answer'" in caplog.text
    assert "line 12 is left out: UnicodeEncodeError: " in caplog.text
    for index in (-1, 500):
        with pytest.raises(IndexError):
            task.train(index)


def test_the_fingerprint_is_of_rows_columns_what_is_held_out_and_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows").write_text(LINES)
    (tmp_path / "eval").write_text(LINES.splitlines()[3])
    plain = settings(tmp_path / "rows")
    others = [
        plain,
        plain.model_copy(update={"columns": {"prompt": "answer"}}),
        plain.model_copy(update={"eval": str(tmp_path / "eval")}),
        plain.model_copy(update={"options": {"match": "contains"}}),
    ]
    found = [create_task(one, 0).fingerprint for one in [*others, plain]]
    assert len({*found}) == 4 and found[0] == found[-1]
    monkeypatch.setattr(Jsonl, "problem", lambda *_: Problem("another", None))
    assert create_task(plain, 0).fingerprint not in found


def test_where_nothing_can_be_trained_there_is_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rows", "eval"):
        (tmp_path / name).write_text(LINES)
    task = load_task(settings(tmp_path / "rows", eval=str(tmp_path / "eval")), 0)
    said = "of 500 rows from number 5 on 0 are malformed, and 500 have the prompt of a held-out"
    with pytest.raises(TaskError, match=said):
        task.train(5)


def test_streaming_without_data_is_refused() -> None:
    given = {"run": {"total_steps": 2}, "model": {"path": "m"}, "task": {"streaming": True}}
    with pytest.raises(ValueError, match=r"`task\.streaming` is set, and `task\.train` is not"):
        schema.Config.model_validate(given)


def test_tasks_and_agents_stream_their_rows(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text(LINES)
    rows = {"name": "jsonl", "train": str(tmp_path / "rows")}
    given = {"run": {"total_steps": 2}, "model": {"path": "hub/m"}, "task": {"streaming": True}}
    config = schema.Config.model_validate(given | {"tasks": {"rows": rows, "sums": {}}})
    assert check_run(config, notes=[]).problems > 500
    served = settings(tmp_path / "rows", options={"of": "jsonl"}).model_copy(
        update={"name": "external"}
    )
    assert load_task(served, 0).train(4).prompt == "p4, é"


# ---- 10 million rows ----

START = """
import re, sys, time
from pathlib import Path
from async_grpo.config import schema
from async_grpo.tasks.registry import load_task
def most():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

before, began = most(), time.monotonic()
task = load_task(schema.TaskConfig(name="jsonl", train=sys.argv[1], streaming=True), 0)
assert len(task.fingerprint) == 32 and len(task) == 10_000_000
for n in range(0, 10_000_000, 999_983):
    assert task.train(n).reference["answer"] == str(n)
print(f"{time.monotonic() - began:.1f} s, {(most() - before) / 2**20:.2f} GiB")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_ten_million_rows(tmp_path: Path, kind: str) -> None:
    """The aim is 30 s and 1 GB; `-s` shows the seconds."""
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        with path.open("w") as file:
            for n in range(10_000_000):
                file.write(f'{{"prompt": "What is the number of row {n}?", "answer": "{n}"}}\n')
    else:
        schema_ = pa.schema([("prompt", pa.string()), ("answer", pa.string())])
        with pq.ParquetWriter(path, schema_) as writer:
            for begin in range(0, 10_000_000, 500_000):
                names = [str(n) for n in range(begin, begin + 500_000)]
                asked = [f"What is the number of row {n}?" for n in names]
                writer.write_table(pa.table({"prompt": asked, "answer": names}, schema=schema_))
    for _ in range(2):  # the second time the copy is there
        done = subprocess.run(
            [sys.executable, "-c", START, str(path)],
            env=os.environ | {"HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        print(f"{kind}, {path.stat().st_size / 1e9:.2f} GB: {done.stdout.strip()}")
        assert float(done.stdout.split()[2]) < 1.0
