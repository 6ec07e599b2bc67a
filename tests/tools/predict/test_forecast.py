"""The prediction of a run, where its measurement is from, and the planner's command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.tools.check.dry_run import _speed
from async_grpo.tools.predict.forecast import PROBE, Forecast, describe, measured_beside
from async_grpo.tools.predict.workload import CPU_CONTENTION
from tests.support.plan_case import lines
from tests.support.verbs import predict

GROUPS = [(20, 30, 10, 40), (25, 25, 35, 15)]
SETTINGS = ["rollout.rollout_batch_size=7", "rollout.group_size=4", "replay.max_staleness=2"]


def config(run_dir: Path, *more: str) -> Config:
    return load_config("configs/quickstart.yaml", [*SETTINGS, f"run.dir={run_dir}", *more])


def forecast(run_dir: Path, *more: str, cores: int | None = 2, told: list | None = None):
    run_dir.mkdir(exist_ok=True)
    return Forecast(
        config(run_dir, *more),
        run_dir=run_dir,
        max_num_seqs=256,
        actors=1,
        cores=cores,
        error=(told if told is not None else []).append,
    )


def ran(run_dir: Path, *more: str, steps: int = 60) -> Forecast:
    found = forecast(run_dir, *more)
    for line in lines(steps):
        found.observe(line, GROUPS, [2.0] * len(GROUPS))
    found.write()
    return found


def test_the_first_steps_tell_what_the_rest_will_be(tmp_path: Path) -> None:
    found, made = forecast(tmp_path / "a"), []
    for number, line in enumerate(lines(PROBE + 2 * 25), 1):
        if more := found.observe(line, GROUPS, [2.0] * len(GROUPS)):
            made.append((number, more))
    ((when, told),) = made
    assert when == 3 + 2 + 1 + PROBE and found.source == f"the first {when} steps"
    assert found.predicted is not None and told["plan/idle"] == found.predicted.idle
    assert set(told) == {
        f"plan/{name}"
        for name in ("groups_per_s", "tokens_per_s", "idle", "staleness_mean", "masked")
    }
    errors = found.errors()
    assert errors["plan/error_throughput"] == pytest.approx(found.predicted.groups_per_s / 1.75 - 1)
    assert errors["plan/error_idle"] == pytest.approx(found.predicted.idle - 0.125)
    found.write()
    record = json.loads((tmp_path / "a" / "plan.json").read_text())
    assert record["errors"] == errors and record["source"] == found.source
    assert record["found"]["steps"] == PROBE + 50 - when - 1
    assert f"{found.predicted.idle:.0%}" in describe(found.predicted)


def test_a_run_of_the_same_kind_is_remembered(tmp_path: Path) -> None:
    ran(tmp_path / "old")
    ran(tmp_path / "new")
    os.utime(tmp_path / "old" / "plan.json", (1e9, 1e9))
    ran(tmp_path / "other", "rollout.response_length=5")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "plan.json").write_text("{")
    again = forecast(tmp_path / "again", "replay.max_staleness=4", "rollout.rollout_batch_size=14")
    assert again.source == str(tmp_path / "new") and again.predicted is not None
    assert forecast(tmp_path / "old").source == str(tmp_path / "old"), "it goes on"
    assert set(again.metrics()) and not again.errors(), "nothing came yet"
    told = [again.observe(line, GROUPS, [2.0] * len(GROUPS)) for line in lines(60)]
    assert told[0] == again.metrics() and not any(told[1:])
    assert again.errors()
    beside = list(measured_beside(config(tmp_path / "x"), tmp_path / "x"))
    assert [path.parent.name for path in beside] == ["new", "old"]
    assert forecast(tmp_path / "third", "learner.zero_stage=2").predicted is None


def test_what_a_run_chose_is_what_auto_would_choose(tmp_path: Path) -> None:
    """Runs write the numbers of their micro-batches; a file on its own says `auto`."""
    chosen = ["learner.tokens_per_micro_batch=8192", "learner.gradient_checkpointing=true"]
    ran(tmp_path / "run", *chosen)
    assert forecast(tmp_path / "new").source == str(tmp_path / "run")
    assert forecast(tmp_path / "given", "learner.tokens_per_micro_batch=4096").predicted is None


def test_cores_and_contention(tmp_path: Path) -> None:
    for cores, expected in ((None, 1.0), (1, 1.0), (2, CPU_CONTENTION)):
        found = forecast(tmp_path / str(cores), cores=cores)
        for line in lines(40):
            found.observe(line, GROUPS, [2.0] * len(GROUPS))
        found.write()
        record = json.loads((tmp_path / str(cores) / "plan.json").read_text())
        assert record["measured"]["contention"] == expected


def test_what_an_advice_would_bring(tmp_path: Path) -> None:
    found = forecast(tmp_path / "a")
    assert found.gain({"learner.ranks": 2.0}) is None, "nothing is measured"
    for line in lines(40):
        found.observe(line, GROUPS, [2.0] * len(GROUPS))
    factor = found.gain({"task.verifier.workers": 8.0})
    assert factor is not None and factor > 1.1, "they take 7 s for a step"
    assert found.gain({"learner.ranks": 2.0}) == pytest.approx(1.0)
    assert found.gain({"rollout.max_open_episodes": 9.0}) is None, "not rehearsed"


def test_a_disk_that_takes_nothing_is_told_of_once(tmp_path: Path) -> None:
    told: list[str] = []
    found = forecast(tmp_path / "a", told=told)
    (tmp_path / "a" / "plan.json.draft").mkdir()
    for line in lines(40):
        found.observe(line, GROUPS, [2.0] * len(GROUPS))
    found.write()
    (line,) = told
    assert "plan.json could not be written" in line


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(tmp_path / "a")
    where = [*SETTINGS, f"run.dir={tmp_path / 'b'}"]
    assert predict(["configs/quickstart.yaml", *where]) == 0
    shown = capsys.readouterr().out
    for word in (str(tmp_path / "a"), "expected", "outstanding", "max_staleness 4", "to change"):
        assert word in shown
    plain = {}
    for name, extra in {
        "now": [],
        "lower": ["replay.max_staleness=0"],
        "slow": ["--verify-s", "9"],
        "more": ["--actors", "3", "learner.ranks=1"],
    }.items():
        command = ["configs/quickstart.yaml", *where, *extra, "--json"]
        assert predict([*command, "--from", str(tmp_path / "a")]) == 0
        plain[name] = json.loads(capsys.readouterr().out)
    rates = {name: one["predicted"]["groups_per_s"] for name, one in plain.items()}
    assert rates["lower"] < 0.9 * rates["now"] and rates["slow"] < 0.5 * rates["now"]
    assert plain["more"]["limits"]["engines"] > 2 * plain["now"]["limits"]["engines"]
    assert plain["now"]["measured_in"] == str(tmp_path / "a")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (None, "cannot be read"),
        ("{", "no measurement of a run"),
        ('{"measured": {"lengths": [], "curve": []}}', "no measurement of a run"),
    ],
)
def test_a_wrong_measurement_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str | None, said: str
) -> None:
    if written is not None:
        (tmp_path / "plan.json").write_text(written)
    assert predict(["configs/quickstart.yaml", "--from", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_without_any_measurement_it_says_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(["configs/quickstart.yaml", f"run.dir={tmp_path / 'a'}"]) == 2
    assert "train 30 steps" in capsys.readouterr().err
    assert predict(["configs/quickstart.yaml", "replay.max_stalenes=2"]) == 2
    assert "max_staleness" in capsys.readouterr().err


def test_a_dry_run_says_what_to_expect(tmp_path: Path) -> None:
    from async_grpo.cluster.placement import Placement

    class Placed(Placement):
        def __init__(self) -> None: ...

        engines = (None,)

    run_dir, placed = tmp_path / "b", Placed.__new__(Placed)
    ((_, text),) = _speed(config(run_dir), placed, "cpu", assumed=False)
    assert "not known" in text
    ran(tmp_path / "a")
    (_, text), (_, change) = _speed(config(run_dir), placed, "cpu", assumed=False)
    assert "response tokens/s" in text and str(tmp_path / "a") in text and change
    ((_, text),) = _speed(config(run_dir), placed, "cpu", assumed=True)
    assert "not known" in text
