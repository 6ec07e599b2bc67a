"""`async-grpo serve` with a real engine: by hand, and with programs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from openai import AuthenticationError, OpenAI

from tests.support.models import write_model
from tests.support.programs import script

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
SIZES = (
    "rollout={prompt_length: 16, response_length: 30, context_length: 60, turn_length: 6, "
    "max_turns: 4}"
)
pytestmark = pytest.mark.timeout(150)


def serving(tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    model = write_model(tmp_path / "model")
    command = [
        sys.executable,
        "-m",
        "async_grpo",
        "serve",
        model,
        "--export",
        str(tmp_path / "out"),
    ]
    settings = [SIZES, "cluster.engine.kv_cache_gb=0.01"]
    settings += [f"task.eval={data}"] * ("--task" in more)
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*command, *settings, *more], stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )
    watch = threading.Timer(120, process.kill)
    watch.daemon = True
    watch.start()
    return process


def read_until(process: subprocess.Popen[str], begin: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(begin):
            return line
    raise AssertionError(f"no line begins with {begin!r}")


def client_of(process: subprocess.Popen[str]) -> OpenAI:
    variables = dict(
        word.split("=", 1) for word in read_until(process, "export").split() if "=" in word
    )
    return OpenAI(
        base_url=variables["OPENAI_BASE_URL"],
        api_key=variables["OPENAI_API_KEY"],
        max_retries=0,
        timeout=60,
    )


@pytest.mark.slow
def test_an_episode_by_hand_ends_with_a_line_and_all_with_a_signal(tmp_path: Path) -> None:
    process = serving(tmp_path)
    assert process.stdin is not None
    first = client_of(process)
    messages = [{"role": "user", "content": "1+1="}]
    for _ in range(2):
        reply = first.chat.completions.create(model="policy", messages=messages)
        messages += [reply.choices[0].message, {"role": "user", "content": "+2="}]
    first.chat.completions.create(model="policy", messages=[messages[0], messages[2]])
    process.stdin.write("\n")
    process.stdin.flush()
    assert "env_done" in read_until(process, "episode 1:")
    second = client_of(process)
    with pytest.raises(AuthenticationError):
        first.chat.completions.create(model="policy", messages=messages[:1])
    second.chat.completions.create(model="policy", messages=messages[:1])
    process.send_signal(signal.SIGINT)
    assert "env_done" in read_until(process, "episode 2:")
    assert process.wait(60) == 0
    shown = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [len(one["sequences"]) for one in shown] == [2, 1]
    assert [row["begun"] for row in shown[0]["sequences"]] == ["", "shortened"]
    assert "1+1=" in shown[0]["sequences"][0]["text"] and "+2=" in shown[0]["sequences"][0]["text"]


def test_programs_are_played_and_failures_are_told(tmp_path: Path) -> None:
    """Every program ends with exit status 3 behind its first turn."""
    options = {"command": [*script("failing"), "exits"], "of": "jsonl"}
    task = f"task.options={json.dumps(options)}"
    process = serving(tmp_path, "--task", "program", "--episodes", "3", task)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert said.count("failed after") == 3 and said.count("exit status 3: Boom") == 3
    shown = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert sorted(one["episode"] for one in shown) == [1, 2, 3]
    assert all(one["failed"]["reason"] == "exception" for one in shown)
    assert all(sum(one["sequences"][0]["mask"]) > 0 for one in shown), (
        "what was said before is there"
    )


def test_what_cannot_be_served_is_one_sentence(tmp_path: Path) -> None:
    process = serving(tmp_path, "--task", "program", "task.options={command: no_such_program}")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "there is no program no_such_program" in said
    assert "Traceback" not in said
