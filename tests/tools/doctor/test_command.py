"""`async-grpo doctor`: a table and its faults, the same as JSON, and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from async_grpo import cli
from async_grpo.tools.doctor import command
from async_grpo.tools.doctor.machine import Finding, row

WARNED = row("gpu", "none", True, "a GPU is there, and torch is a build without CUDA: make install")
REFUSED = row("memory", "1 GiB", True, "1 GiB of memory is free", warns=False)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What is found on this machine, instead of looking."""
    rows = [row("python", "3.11.7")]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(command, "findings", lambda: rows)
    monkeypatch.setattr(command, "disk", lambda _: [row("disk", "9 GiB are free")])
    return rows


def test_a_machine_that_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "python          3.11.7",
        "disk            9 GiB are free",
        "ray cluster     none is named (RAY_ADDRESS); a run starts its own",
        "nothing is missing; next: async-grpo train quickstart",
    ]


def test_a_warning_does_not_keep_a_run_from_starting(
    machine: list[Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    machine.append(WARNED)
    assert cli.main(["doctor"]) == 0
    assert f"\nwarning: {WARNED[3]}\nnothing is missing" in capsys.readouterr().out
    machine.append(REFUSED)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().out.endswith("\nerror: 1 GiB of memory is free\n")


def test_json_is_one_line_with_every_row(
    machine: list[Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    machine += [WARNED, REFUSED]
    assert cli.main(["doctor", "--json"]) == 2
    [line] = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert told["missing"] == 1
    assert told["rows"][1:3] == [
        dict(node="", label="gpu", found="none", fault=WARNED[3], severity="warning"),
        dict(node="", label="memory", found="1 GiB", fault=REFUSED[3], severity="error"),
    ]


def test_a_node_shows_what_differs_from_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = []

    def nodes(file: str | None, settings: list[str]) -> list[Finding]:
        named.append((os.environ["RAY_ADDRESS"], file, settings))
        found = [row("python", "3.11.7"), row("cores", "4"), REFUSED]
        return [("10.0.0.7", *one[1:]) for one in found]

    monkeypatch.setattr("async_grpo.tools.doctor.cluster.nodes", nodes)
    monkeypatch.setenv("RAY_ADDRESS", "before:1")
    assert cli.main(["doctor", "--address", "10.0.0.7:6379"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == ["10.0.0.7 cores  4", "10.0.0.7 memory 1 GiB"]
    assert lines[4] == "error: 10.0.0.7: 1 GiB of memory is free"
    assert named == [("10.0.0.7:6379", None, [])]


def test_an_address_where_nothing_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert cli.main(["doctor"]) == 2
    said = capsys.readouterr().out
    assert "error: RAY_ADDRESS is 127.0.0.1:1, and no Ray cluster answers there" in said


@pytest.mark.parametrize("address", ["", "local"])
def test_no_cluster_is_started(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert cli.main(["doctor"]) == 0


def test_a_configuration_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "nowhere.yaml", "seed=1"]) == 2
    assert "error: The configuration file nowhere.yaml does not exist" in capsys.readouterr().out


def test_its_help_imports_nothing_large() -> None:
    code = (
        "import contextlib, sys\nfrom async_grpo import cli\n"
        "with contextlib.suppress(SystemExit):\n    cli.main(['doctor', '--help'])\n"
        "large = {'torch', 'ray', 'pydantic', 'transformers'} & sys.modules.keys()\n"
        "print('large:', large)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("large: set()\n"), done
    assert "--address RAY" in done.stdout and "--json" in done.stdout
