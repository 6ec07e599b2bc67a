"""Hundreds of mutated configurations: whatever is wrong is answered in words, in at most three
lines, before any process starts.

Mutations are generated from the schema, every key at least once, with a seed. A mutant that is
valid after all is not counted.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import yaml12
from async_grpo.config.docs import Setting, settings
from async_grpo.config.load import ConfigError, load_config
from async_grpo.errors import EXIT_MEANING
from tests.support.verbs import train

ROOT = Path(__file__).resolve().parents[2]
SEED = 20310203
AT_LEAST, PROCESSES = 300, 8
JUNK = (
    [],
    {},
    [[]],
    {"": {}},
    {"a": {"b": [None, {"c": 1e308}]}},
    "\x1b[31mred",
    "é" * 300,
    "\u202eright to left",
    "../../etc/passwd",
    "${HOME}",
    "null ",
    "1e999",
    10**40,
    -(10**40),
    1e308,
    -0.5,
    True,
    "\0",
    "x\ny: 1",
    "{{7*7}}",
    "<<",
    "!!python/object:os.system",
)
MAPPINGS = ("task.options", "learner.deepspeed")
"""Their contents are somebody else's: what is wrong inside is found by the task, and by DeepSpeed.
"""


@dataclass(frozen=True)
class Mutant:
    """A configuration with one thing changed; `kind` says how, `key` where."""

    kind: str
    key: str
    values: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"


def base(home: Path) -> dict[str, Any]:
    return {
        "run": {"total_steps": 2, "dir": str(home / "run")},
        "model": {"warm_start": {"cache_dir": str(home / "cache")}},
        "rollout": {"group_size": 4},
    }


def put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy of `values` with another value at `path`."""
    inner = values.get(path[0])
    return {
        **values,
        path[0]: value
        if len(path) == 1
        else put(inner if isinstance(inner, dict) else {}, path[1:], value),
    }


def wrong_type(setting: Setting, draw: random.Random) -> Any:
    if setting.section or "mapping" in setting.allowed:
        return draw.choice([3, "text", [1], True])
    if "integer" in setting.allowed:
        return draw.choice(["3", 2.5, [3], {"value": 3}, True])
    if "number" in setting.allowed:
        return draw.choice(["0.1", [0.1], {}, True, "1e-4x"])
    if "true or false" in setting.allowed:
        return draw.choice([1, 0, "yes", "true", []])
    return draw.choice([7, 1.5, [7], {"a": 1}, True])


def out_of_range(setting: Setting) -> Iterator[Any]:
    """Values on the wrong side of every bound that the schema names; names that are one
    letter off.
    """
    words = setting.allowed.replace(",", " ").split()
    for sign, bound in itertools.pairwise(words):
        if sign in ("<", "<=", ">", ">="):
            step = {"<": 0, "<=": 1, ">": 0, ">=": -1}[sign]
            number = float(bound) + step
            yield int(number) if "integer" in setting.allowed else number
    if "one of" in setting.allowed:
        yield setting.allowed.removeprefix("one of ").split(",")[0] + "x"


def neighbour(leaf: str, draw: random.Random) -> str:
    """A key that is nearly right."""
    at = draw.randrange(len(leaf))
    return draw.choice(
        [
            leaf + "s",
            leaf[:at] + leaf[at + 1 :] or "x",
            leaf[:at] + "x" + leaf[at:],
            leaf.upper(),
            leaf.replace("_", "-") + "-",
            f" {leaf}",
        ]
    )


def mutants(home: Path) -> list[Mutant]:
    """Every key: a wrong type, null, junk, an unknown neighbour, and each bound passed."""
    draw, found = random.Random(SEED), []
    for name, setting in settings().items():
        good = base(home)
        if name.startswith("model.lora."):
            good = put(good, ("model", "lora"), {})
        path, wrong = setting.path, "[1.5, x]" if "list" in setting.allowed else None
        changed = [
            ("wrong type", wrong or wrong_type(setting, draw)),
            ("null", None),
            ("junk", draw.choice(JUNK)),
        ]
        changed += [("out of range", value) for value in out_of_range(setting)]
        found += [Mutant(kind, name, put(good, path, value)) for kind, value in changed]
        beside = neighbour(path[-1], draw)
        if (".".join((*path[:-1], beside))) not in settings():
            found.append(Mutant("neighbour", name, put(good, (*path[:-1], beside), 1)))
        if not setting.section and "mapping" not in setting.allowed:
            found.append(Mutant("nested", name, put(good, (*path, "inner"), draw.choice(JUNK))))
    return found


def command(mutant: Mutant, home: Path, number: int) -> list[str]:
    path = home / f"{number}.yaml"
    path.write_text(yaml12.write(mutant.values), encoding="utf-8")
    return [str(path)]


def message_of(mutant: Mutant, path: str) -> str | None:
    """What the configuration is refused with; None if it loads. Nothing but ConfigError may be
    raised.
    """
    try:
        load_config(path)
    except ConfigError as error:
        return str(error)
    return None


def test_every_mutant_is_answered_in_words(tmp_path: Path) -> None:
    refused, kinds = {}, {}
    for number, mutant in enumerate(mutants(tmp_path)):
        [path] = command(mutant, tmp_path, number)
        if (message := message_of(mutant, path)) is None:
            continue
        refused[str(mutant)] = message
        kinds.setdefault(mutant.key, set()).add(mutant.kind)
        assert len(message.splitlines()) <= 2 and len(message) <= 1500, f"{mutant}: {message}"
        assert all(letter.isprintable() or letter == "\n" for letter in message), (
            f"{mutant}: {message!r}"
        )
        for jargon in (
            "Traceback",
            "pydantic",
            "validation error",
            "[type=",
            "input_value",
            "Input should",
            "object at 0x",
        ):
            assert jargon not in message, f"{mutant}: {message}"
        assert path in message and message.splitlines()[0].endswith((".", "?", ")")), (
            f"{mutant}: {message}"
        )
    assert len(refused) >= AT_LEAST
    never = [name for name in settings() if not kinds.get(name)]
    assert never == [], f"no mutant of {never} was refused"
    assert {kind for found in kinds.values() for kind in found} == {
        "wrong type",
        "null",
        "junk",
        "out of range",
        "neighbour",
        "nested",
    }


def test_the_command_ends_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same through the command line, in this process: at most three lines, the last of which is
    the exit code's.
    """
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # joining a cluster would fail in another way
    for number, mutant in enumerate(random.Random(SEED).sample(mutants(tmp_path), 60)):
        [path] = command(mutant, tmp_path, number)
        if message_of(mutant, path) is None:
            continue
        assert train([path]) == 2, mutant
        check_output("".join(capsys.readouterr()), str(mutant))


def check_output(text: str, what: str) -> None:
    lines = [line for line in text.splitlines() if line.strip()]
    assert 2 <= len(lines) <= 3, f"{what}: {text}"
    assert lines[-1] == f"error: exit code 2: {EXIT_MEANING[2]}" and "Traceback" not in text, (
        f"{what}: {text}"
    )


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_bad_configurations_as_processes(tmp_path: Path) -> None:
    kinds = ("wrong type", "out of range", "neighbour", "nested")
    drawn = [mutant for mutant in mutants(tmp_path) if mutant.kind in kinds]
    chosen = random.Random(SEED).sample(drawn, PROCESSES)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "127.0.0.1:1"}

    def ended(number: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "async_grpo.run", *command(chosen[number], tmp_path, number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=60,
            check=False,
        )

    with ThreadPoolExecutor(2) as pool:
        for mutant, done in zip(chosen, pool.map(ended, range(PROCESSES)), strict=True):
            assert done.returncode == 2, f"{mutant}: {done.stdout}"
            check_output(done.stdout, str(mutant))
