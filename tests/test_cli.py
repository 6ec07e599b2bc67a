"""The command line: every verb answers at once, errors have one form, old spellings still work."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from async_grpo import cli, old_names
from async_grpo.config.command_line import Parser, with_settings
from async_grpo.errors import FaultBudgetSpent, SetupError
from async_grpo.observe.console.console import Console
from async_grpo.run.command import Command

HEAVY = ("torch", "ray", "vllm", "transformers", "deepspeed", "mlflow", "matplotlib", "pydantic")


def test_the_help_of_every_verb_imports_nothing_large() -> None:
    code = (
        "import contextlib, io, json, sys\n"
        "from async_grpo import cli\n"
        "seen = {}\n"
        "for verb in cli.VERBS:\n"
        "    said = io.StringIO()\n"
        "    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):\n"
        "        cli.main([verb, '--help'])\n"
        f"    seen[verb] = [said.getvalue(), [one for one in {HEAVY} if one in sys.modules]]\n"
        "print(json.dumps(seen))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for verb, (said, large) in json.loads(done.stdout).items():
        assert said.startswith(f"usage: async-grpo {verb} ") and not large, (verb, large)


def test_without_a_verb_all_verbs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {verb} " in said for verb in cli.VERBS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["statsu"], "Did you mean `async-grpo status`?"),
        (["quickstrt"], "Did you mean `async-grpo train quickstart`?"),
        (["xyz"], "xyz is no verb. The verbs are train, check,"),
    ],
)
def test_a_word_that_is_no_verb(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (SetupError("no such run"), 2, "error: no such run\n"),
        (FaultBudgetSpent("it died"), 4, "error: it died\n"),
        (KeyError("a bug"), 1, "Traceback"),
        (BrokenPipeError(), 0, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_ends_a_verb_has_one_exit_code(
    error: BaseException,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(options: object) -> int:
        raise error

    home = types.SimpleNamespace(DESCRIPTION="x", arguments=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, "a_home", home)  # type: ignore[arg-type]
    monkeypatch.setitem(cli.VERBS, "trial", ("a_home", "is tried"))
    monkeypatch.setattr(cli.os, "dup2", lambda *_: None)
    assert cli.main(["trial"]) == code
    said = capsys.readouterr().err
    assert said.startswith(says) if says else not said


@pytest.mark.parametrize(
    ("words", "now"),
    [
        (["c.yaml", "a=1"], ("train", ["c.yaml", "a=1"])),
        (["c.yaml", "--dry-run", "a=1"], ("check", ["c.yaml", "a=1"])),
        (["--recipes"], ("recipes", [])),
        (["c.yaml", "--replay", "d", "a=1"], ("retrain", ["d", "--config", "c.yaml", "a=1"])),
        (["--replay=d", "c.yaml"], ("retrain", ["d", "--config", "c.yaml"])),
        (
            ["--after", "2", "--replay", "d", "c.yaml"],
            ("retrain", ["d", "--after", "2", "--config", "c.yaml"]),
        ),
        (["c.yaml", "--replay"], ("train", ["c.yaml", "--replay"])),
    ],
)
def test_options_of_before_are_verbs_now(words: list[str], now: tuple[str, list[str]]) -> None:
    assert cli.as_now("train", words) == now


@pytest.mark.parametrize("name", old_names.COMMANDS)
def test_a_module_that_was_a_command_does_what_it_did(name: str) -> None:
    module, verb = name.removesuffix(".__main__"), old_names.COMMANDS[name]
    done = subprocess.run(
        [sys.executable, "-m", f"async_grpo.{module}", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"usage: async-grpo {verb} ")
    assert done.stderr == f"note: `python -m async_grpo.{module}` is `async-grpo {verb}` now\n"


@pytest.mark.parametrize("name", old_names.MODULES)
def test_a_module_that_moved_is_the_same_one(name: str) -> None:
    with pytest.warns(FutureWarning, match=f"{old_names.MODULES[name]} now"):
        sys.modules.pop(f"async_grpo.{name}", None)
        found = importlib.import_module(f"async_grpo.{name}")
    assert found is importlib.import_module(f"async_grpo.{old_names.MODULES[name]}")


def test_a_verb_that_takes_a_run_takes_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for verb in ("status", "inspect", "report", "retrain", "export", "eval", "serve"):
        parser = Parser(prog=verb)
        importlib.import_module(cli.VERBS[verb][0]).arguments(parser)
        given = vars(parser.read(["--push", "a/b"] if verb == "export" else []))
        found = given.get("run_dir") or given.get("checkpoint") or given.get("source")
        assert str(found) == "runs", verb
    assert cli.main(["status"]) == 2
    assert "runs has no status.json" in capsys.readouterr().err


def test_the_systems_of_migrate_are_those_with_a_table() -> None:
    from async_grpo.tools.migrate.command import SYSTEMS
    from async_grpo.tools.migrate.peers import PEER_TABLES

    assert sorted(PEER_TABLES) == list(SYSTEMS)


def test_the_sort_keys_of_inspect_are_those_that_it_sorts_by() -> None:
    from async_grpo.tools.inspect import command, groups

    assert tuple(groups.SORT_KEYS) == command.SORT_KEYS


@pytest.mark.parametrize("name", ["a", "a #b", "it's: me"])
def test_a_run_is_trained_again_in_a_directory_beside_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its name means something in YAML, and where it is `.`."""
    run, seen = tmp_path / name, []
    run.mkdir()
    (run / "status.json").write_text("{}")
    (run / "config.yaml").write_text("run: {total_steps: 1}\nmodel: {path: m}\n")

    @contextlib.contextmanager
    def command(config):
        seen.append(config())
        yield Command(Console())

    monkeypatch.setattr("async_grpo.run.command.command", command)
    monkeypatch.chdir(run)
    assert cli.main(["retrain", str(run)]) == cli.main(["retrain", "."]) == 0
    assert [config.run.dir for config in seen] == [f"{run}-retrained"] * 2


def test_options_of_before_may_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--recipes"]) == 0
    said = capsys.readouterr()
    assert "quickstart " in said.out
    assert said.err == "note: `--recipes` is `async-grpo recipes` now\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "c.yaml", "--dry-run"], "--dry-run is a verb: `async-grpo check`"),
        (["train", "c.yaml", "--lr", "1"], "--lr is no option; settings are written"),
        (["export", "c", "o", "--lr=1"], "--lr is no option of `async-grpo export`; --help"),
        (["eval"], "there is no run in runs: name a checkpoint, a run or a model"),
        (["serve", "seed=1"], "there is no run in runs: name a checkpoint, a run or a model"),
        (["retrain", "a=" + "b" * 300], "runs/config.yaml"),
        (["train", "b" * 300], "b" * 300),
    ],
)
def test_what_a_wrong_command_line_is_answered(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        assert cli.main(words) == 2
    except SystemExit as end:
        assert end.code == 2
    said = "".join(capsys.readouterr())
    assert says in said and "Traceback" not in said


@pytest.mark.parametrize("place", ["runs/first", "runs"])
def test_a_run_without_a_checkpoint_is_told_from_a_model(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the directory of runs is a run itself, which is the newest then."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "status.json").write_text("{}")
    assert cli.main(["eval"]) == cli.main(["eval", "runs"]) == 2
    assert capsys.readouterr().err.count(f"{place} is no checkpoint and has none") == 2


@pytest.mark.parametrize("words", ["recipes", "train --help", "--help"])
def test_a_reader_that_has_read_enough_ends_a_verb_in_peace(words: str) -> None:
    code = "import sys; sys.stdin.close(); sys.exit(0)"
    shell = f"{sys.executable} -m async_grpo {words} | {sys.executable} -c '{code}'; "
    done = subprocess.run(
        ["bash", "-c", f"{shell} echo ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert done.stdout == "0\n" and not done.stderr


@pytest.mark.parametrize(
    ("code", "said", "exit_code"), [("'no data'", "no data\n", 1), ("3", "", 3), ("None", "", 0)]
)
def test_what_ends_a_process_is_its_exit_code(code: str, said: str, exit_code: int) -> None:
    """Also where it has no standard output, and where the interpreter is not finalised."""
    work = f"import sys\nfrom async_grpo import cli\nwith cli.process('eval'):\n sys.exit({code})"
    shell = f'{sys.executable} -c "{work}" >&-'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (exit_code, said)


def test_a_directory_that_was_removed_is_said(tmp_path: Path) -> None:
    shell = f"rmdir {tmp_path}/here; {sys.executable} -m async_grpo recipes"
    (tmp_path / "here").mkdir()
    root = Path(cli.__file__).parents[1]
    done = subprocess.run(
        ["bash", "-c", shell],
        cwd=tmp_path / "here",
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "error: the current directory was removed: change to one that exists\n"


def test_a_setting_in_place_of_a_run_stays_as_it_is() -> None:
    parser = Parser(prog="retrain")
    importlib.import_module(cli.VERBS["retrain"][0]).arguments(parser)
    options = with_settings(parser.read(["tracking.uri=http://h:5000", "seed=2"]))
    assert options.source == "runs"
    assert options.settings == ["tracking.uri=http://h:5000", "seed=2"]
