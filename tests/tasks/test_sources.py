"""Rows from files of every format, each written by its own library, and from files that are broken
in every way: one sentence, which names the file.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from async_grpo.config import schema
from async_grpo.tasks.base import TaskError
from async_grpo.tasks.registry import create_task, load_task

MESSAGES = [{"role": "user", "content": "What is 1 + 1?"}]
ROWS: list[dict[str, Any]] = [{"prompt": f"p{n}, é", "answer": str(n)} for n in range(3)]
TABLE = pa.Table.from_pylist(ROWS)
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def as_csv(delimiter: str = ",") -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, ["prompt", "answer"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return out.getvalue().encode()


def as_arrow(new: Callable[..., Any]) -> bytes:
    sink = pa.BufferOutputStream()
    with new(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return sink.getvalue().to_pybytes()


def as_parquet(table: pa.Table = TABLE) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def zstd(raw: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(raw)
    return sink.getvalue().to_pybytes()


zipped = partial(gzip.compress, mtime=0)  # names of tests have it, in every worker the same
WHOLE = {
    "lines": LINES,
    "array": json.dumps(ROWS, indent=1).encode(),
    "csv": as_csv(),
    "tsv": as_csv("\t"),
    "csv of excel": b"\xef\xbb\xbf" + as_csv(";"),
    "parquet": as_parquet(),
    "arrow file": as_arrow(pa.ipc.new_file),
    "arrow stream": as_arrow(pa.ipc.new_stream),
    "gzip": zipped(LINES),
    "zstd": zstd(LINES),
    "csv in gzip": zipped(as_csv()),
    "array in zstd": zstd(json.dumps(ROWS).encode()),
}


def settings(source: object, **more: Any) -> schema.TaskConfig:
    return schema.TaskConfig(name="jsonl", train=str(source), **more)


def problems(source: object, **more: Any) -> list[tuple[Any, Any]]:
    task = load_task(settings(source, **more), 0)
    found = [task.train(n) for n in range(len(task))]
    return [(one.prompt, one.reference["answer"]) for one in found]


EXPECTED = [(row["prompt"], row["answer"]) for row in ROWS]


@pytest.mark.parametrize("kind", WHOLE)
def test_a_format_is_told_by_content(tmp_path: Path, kind: str) -> None:
    """Its name is that of another format, or none."""
    for name in ("rows", "rows.data"):
        (tmp_path / name).write_bytes(WHOLE[kind])
        assert problems(tmp_path / name) == EXPECTED
    if "csv" not in kind and kind != "tsv":  # text of an ending that says JSON is JSON
        (tmp_path / "rows.jsonl").write_bytes(WHOLE[kind])
        assert problems(tmp_path / "rows.jsonl") == EXPECTED


def test_directories_patterns_and_addresses(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "a.parquet").write_bytes(as_parquet(TABLE.slice(0, 1)))
    (tmp_path / "part" / "b.jsonl.gz").write_bytes(zipped(LINES.split(b"\n")[1]))
    (tmp_path / "part" / "c.csv").write_bytes(b'answer,prompt\r\n2,"p2, \xc3\xa9"\r\n')
    (tmp_path / "README.md").write_text("of no interest")
    (tmp_path / ".hidden.jsonl").write_text("{broken")
    assert problems(tmp_path) == EXPECTED
    assert problems(tmp_path / "part" / "*.csv") == EXPECTED[2:]
    assert problems(f"{tmp_path}/**/*.[cj]s*") == EXPECTED[1:]
    assert problems(f"file://{tmp_path}/a.parquet") == EXPECTED[:1]
    memory = fsspec.filesystem("memory")
    for name in ("a.parquet", "part/c.csv"):
        memory.pipe(f"/bucket/{name}", (tmp_path / name).read_bytes())
    assert problems("memory://bucket/a.parquet") == EXPECTED[:1]
    assert problems("memory://bucket/part") == EXPECTED[2:]
    assert problems("memory://bucket/*/*.csv") == EXPECTED[2:]
    (tmp_path / "train.jsonl").write_bytes(LINES)
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "test-0.parquet").write_bytes(as_parquet(TABLE.slice(2, 1)))
    assert problems(tmp_path) == EXPECTED, "of several splits the one that is wanted"
    task = create_task(settings(f"{tmp_path}/part", eval=str(tmp_path)), 0)
    with pytest.raises(TaskError, match=r"every problem of task.eval"):
        task.evaluation(9)
    (tmp_path / "train.jsonl").rename(tmp_path / "dev.jsonl")
    with pytest.raises(TaskError, match=r"the splits test, dev, and none of train: name those of"):
        problems(tmp_path)
    assert problems(f"{tmp_path}/dev*") == EXPECTED


def test_what_datasets_saves_and_what_it_converts(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(tmp_path / "both")
    assert problems(tmp_path / "saved") == EXPECTED
    both = settings(tmp_path / "both", eval=str(tmp_path / "both"))
    with pytest.raises(TaskError, match=r"every problem of task.eval"):
        load_task(both, 0).evaluation(9)
    assert len(load_task(both, 0)) == 3
    data.to_parquet(tmp_path / "rows.parquet")
    data.to_csv(tmp_path / "rows.csv")
    data.to_json(tmp_path / "rows.json")
    for name in ("rows.parquet", "rows.csv", "rows.json"):
        assert problems(tmp_path / name) == EXPECTED


def test_a_directory_with_a_card_of_the_hub_is_read_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    for name, part in (("main", TABLE), ("other", TABLE.slice(0, 1))):
        (folder / name).mkdir(parents=True)
        (folder / name / "train-0.parquet").write_bytes(as_parquet(part))
    assert len(problems(folder)) == 4
    card = "configs:\n" + "".join(
        f"- config_name: {name}\n  data_files: {name}/train*\n" for name in ("main", "other")
    )
    (folder / "README.md").write_text(f"---\n{card}---\nRows.\n")
    assert problems(f"{folder}:main") == EXPECTED
    with pytest.raises(TaskError, match=r"could not load data set .*Config name is missing"):
        problems(folder)


def test_a_null_of_a_table_is_a_key_that_is_not_given(tmp_path: Path) -> None:
    rows = [
        {"messages": [*MESSAGES], "answer": "2", "rewards": None},
        {"messages": [{"role": "user", "content": "x", "tool": "t"}], "answer": "3"},
        {"prompt": "p", "answer": "4", "solution": "s"},
    ]
    (tmp_path / "rows").write_bytes(as_parquet(pa.Table.from_pylist(rows[:1] + rows[2:])))
    data = pa.Table.from_pylist(rows)
    assert "tool" in str(data.schema)
    assert data.to_pylist()[0]["messages"][0]["tool"] is None
    (tmp_path / "rows").write_bytes(as_parquet(data.slice(0, 1)))
    assert problems(tmp_path / "rows") == [(MESSAGES, "2")]


VERL = {
    "data_source": "sums",
    "prompt": MESSAGES,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7, "none": None},
}
ROLL = {
    "id": "0",
    "messages": json.dumps(MESSAGES),
    "ground_truth": "2",
    "tag": "math",
    "case_type": None,
}
TRL = {"prompt": MESSAGES, "solution": "2"}


@pytest.mark.parametrize(("layout", "row"), [("verl", VERL), ("roll", ROLL), ("trl", TRL)])
def test_layouts_of_others(tmp_path: Path, layout: str, row: dict[str, Any]) -> None:
    (tmp_path / "rows.parquet").write_bytes(as_parquet(pa.Table.from_pylist([row])))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    for name in ("rows.parquet", "rows.jsonl"):
        assert problems(tmp_path / name, layout=layout) == [(MESSAGES, "2")]
    if layout == "verl":
        with pytest.raises(TaskError, match=r"a row in verl's layout: set task.layout=verl"):
            problems(tmp_path / "rows.jsonl")


def test_columns_name_what_a_task_wants(tmp_path: Path) -> None:
    row = {"q": "What is 1 + 1?", "meta": {"final": "2"}, "a.b": "3"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    for columns, found in (
        ({"messages": "q", "answer": "meta.final"}, (MESSAGES, "2")),
        ({"prompt": "q", "answer": "a.b"}, ("What is 1 + 1?", "3")),
    ):
        assert problems(tmp_path / "rows.jsonl", columns=columns) == [found]
    for theirs in ("final", "meta.other", "q.x"):
        with pytest.raises(TaskError, match=rf"line 1: no key '{theirs}' \(task.columns.answer\)"):
            problems(tmp_path / "rows.jsonl", columns={"prompt": "q", "answer": theirs})
    (tmp_path / "rows.csv").write_text("ask,worked\nWhat?,1 + 1 #### 2\n")
    source = {"train": str(tmp_path / "rows.csv")}
    columns = {"question": "ask", "answer": "worked"}
    task = load_task(schema.TaskConfig(name="gsm8k", columns=columns, **source), 0)
    assert task.train(0).reference == "2"
    over = {"answer": "data_source"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(VERL))
    found = problems(tmp_path / "rows.jsonl", layout="verl", columns=over)
    assert found == [(MESSAGES, "sums")]


FUNCTIONS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info["index"] == 7
    return {"score": 0.5 + (solution_str == ground_truth), "acc": solution_str == ground_truth}

def plain(solution_str, ground_truth, **others):
    assert others == {"data_source": "sums", "extra_info": {"split": "train", "index": 7}}
    return solution_str == ground_truth

def strict(solution_str, ground_truth):
    return 0.7

def graded(solution_str, ground_truth):
    return {"score": 1.0, "acc": 0.5 + 0.5 * (solution_str == ground_truth)}

async def waits(solution_str, ground_truth): ...
"""


def test_a_reward_function_of_verl_runs_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_verl.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rows.parquet").write_bytes(as_parquet(pa.Table.from_pylist([VERL])))
    for name, wrong, right in (
        ("compute_score", (0.5, 0.0), (1.5, 1.0)),
        ("plain", (0.0, 0.0), (1.0, 1.0)),
        ("strict", (0.7, 0.0), (0.7, 0.0)),
        ("graded", (1.0, 0.0), (1.0, 1.0)),
    ):
        for layout in (None, "verl"):
            source = {"train": str(tmp_path / "rows.parquet"), "layout": layout}
            task = load_task(schema.TaskConfig(name=f"of_verl:{name}", **source), 0)
            problem = task.train(0)
            assert problem.prompt == MESSAGES
            for response, (score, correct) in (("3", wrong), ("2", right)):
                found = task.score(response, problem.reference)
                assert (found.rewards, found.correct) == ({"score": score}, correct)
    with pytest.raises(TaskError, match="of_verl:waits is a coroutine function: write a task"):
        create_task(schema.TaskConfig(name="of_verl:waits"), 0)


def cut(raw: bytes) -> bytes:
    return raw[: len(raw) * 2 // 3]


def table(**columns: Any) -> bytes:
    return as_parquet(pa.table(columns))


BROKEN: list[tuple[bytes, str]] = [
    (b"\x00\x01\x02\x03" * 99, "is in no format that is known: JSON lines, JSON, CSV, parquet"),
    (b"\x89PNG\r\n\x1a\n" + b"\0" * 50, "is in no format that is known"),
    (b"PK\x03\x04" + b"\0" * 50, "is in no format that is known"),
    (LINES.decode().encode("utf-16"), "is in no format that is known"),
    (b"PAR1", "cannot be read: "),
    (b"PAR1" + b"\0" * 100 + b"PAR1", "cannot be read: "),
    (cut(WHOLE["parquet"]), "cannot be read: "),
    (cut(WHOLE["arrow file"]), "cannot be read: "),
    (b"ARROW1\0\0", "cannot be read: "),
    (cut(WHOLE["arrow stream"]), "cannot be read: "),
    (b"\xff\xff\xff\xff\xff", "cannot be read: "),
    (cut(WHOLE["gzip"]), "cannot be read: Compressed file ended before the end-of-stream"),
    (b"\x1f\x8b", "cannot be read: "),
    (b"\x1f\x8b" + b"x" * 50, "cannot be read: "),
    (zipped(LINES)[:-6] + b"\0\0\0\0\0\0", "cannot be read: "),
    (cut(WHOLE["zstd"]), "cannot be read: "),
    (b"\x28\xb5\x2f\xfd" + b"x" * 50, "cannot be read: "),
    (zipped(b"\0" * 99), "is in no format that is known"),
    (zipped(WHOLE["parquet"])[:60], "cannot be read: "),
    (cut(WHOLE["array"]), "it is no JSON array"),
    (b"[" * 100_000, "it is nested too deeply"),
    (b'[1, "a"]', "row 0, row 1: not a JSON object"),
    (b"[\xe9]", "it is no JSON array"),
    (b"{broken", "line 1: not JSON on one line"),
    (b'{"prompt": "p",\n"answer": "a"}', "line 1: not JSON on one line"),
    (LINES + b'{"prompt": "\xe9", "answer": "a"}', "line 4: not UTF-8 text"),
    (LINES + b"[1]\n", "line 4: not a JSON object"),
    (b'{"prompt": null, "answer": "a"}', "line 1: 'prompt' must be non-empty text, got None"),
    (b'{"prompt": "p", "answer": {"a": null}}', "line 1: 'answer' must be non-empty text"),
    (b'{"prompt": [null], "answer": "a"}', "line 1: every entry of 'messages' must have"),
    (b"prompt,answer\np,a,b\n", "line 2: 3 values under 2 names of columns"),
    (b"prompt,answer\np\n", "line 2: 1 values under 2 names of columns"),
    (b'prompt,answer\n"p,a\n', "line 2: not CSV"),
    (b'prompt,answer\n"p"x,a\n', "line 2: not CSV"),
    (b"prompt,answer\np,\xe9\n", "line 2: not UTF-8 text"),
    (b"prompt,prompt\np,a\n", "its first row must name the columns, each once: prompt, prompt"),
    (b"prompt,\np,a\n", "its first row must name the columns, each once"),
    (b"question,final\nq,a\n", "line 2: no key 'answer' (its keys are 'question', 'final')"),
    (b"just some words\n", "line 1: not JSON on one line"),
    (table(prompt=["p"], answer=pa.array([b"a"])), "row 0: 'answer' must be non-empty text"),
    (table(prompt=["p"], answer=pa.array([None], pa.string())), "row 0: no key 'answer'"),
    (table(prompt=[["p"]], answer=["a"]), "row 0: every entry of 'messages' must have"),
    (table(prompt=[7], answer=["a"]), "row 0: 'prompt' must be non-empty text, got 7"),
    (as_parquet(pa.table({})), "has no training problem"),
    (b"", "has no training problem"),
    (b"\n \n", "has no training problem"),
    (b"[]", "has no training problem"),
    (b"prompt,answer\n", "has no training problem"),
    (zipped(b""), "has no training problem"),
]


@pytest.mark.parametrize(("raw", "says"), BROKEN)
def test_what_is_broken_is_told_in_a_sentence(tmp_path: Path, raw: bytes, says: str) -> None:
    (tmp_path / "rows").write_bytes(raw)
    with pytest.raises(TaskError) as caught:
        load_task(settings(tmp_path / "rows"), 0)
    message = str(caught.value)
    assert says in message and "\n" not in message and len(message) < 500
    assert str(tmp_path / "rows") in message or "training problem" in message


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "locked.jsonl").write_bytes(LINES)
    (tmp_path / "link.jsonl").symlink_to("nowhere")
    for source, says in (
        ("rows.parquet", r"there is no file rows.parquet \(looked in .*\); correct task.train"),
        ("empty", "empty holds no file that ends in jsonl, json, csv"),
        ("*.csv", r"no file matches \*.csv"),
        ("link.jsonl", "there is no file link.jsonl"),
        ("memory://nowhere/*.csv", "no file matches memory://nowhere"),
        ("memory://nowhere/a.csv", "memory://.*nowhere/a.csv cannot be read"),
        ("nosuch://bucket/a.csv", "nosuch://bucket/a.csv cannot be read: Protocol not known"),
    ):
        with pytest.raises(TaskError, match=says):
            load_task(settings(source), 0)
    if os.geteuid():
        (tmp_path / "locked.jsonl").chmod(0)
        with pytest.raises(TaskError, match=r"locked.jsonl cannot be read: Permission denied"):
            load_task(settings("locked.jsonl"), 0)


def test_the_place_of_a_bad_row_names_its_file_where_there_are_several(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl").write_bytes(b"{broken\n")
    with pytest.raises(TaskError, match=r"1 of 4 rows are malformed: b.jsonl line 1: not JSON"):
        load_task(settings(tmp_path), 0)
    task = load_task(settings(tmp_path, max_bad_fraction=0.3), 0)
    assert len(task) == 3
