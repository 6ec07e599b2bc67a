"""status.json and the command that shows it: rates against a plain computation, and what became of
the run.
"""

from __future__ import annotations

import io
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import rich.console

from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.observe.console.console import Console
from async_grpo.observe.console.panel import panel, sparkline
from async_grpo.observe.console.progress import CURVE_POINTS, Curve, Progress
from async_grpo.observe.console.status_file import (
    EARLIER,
    STATUS,
    TIMELINE,
    StatusFile,
    Timeline,
    condition,
    newest_run,
    read_status,
    read_timeline,
)
from async_grpo.run.summary import _next_steps
from tests.support import verbs


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_rates_and_shares_are_those_of_the_window() -> None:
    clock, chance = Clock(), random.Random(1)
    progress, rows = Progress(clock=clock), []
    totals: Counter[str] = Counter()
    for step in range(101, 201):
        clock.now += (seconds := chance.uniform(0.2, 2.0))
        starved, paused = chance.uniform(0, seconds), chance.uniform(0, seconds)
        totals["goodput/generated"] += chance.randrange(900)
        totals["time/learner/idle"] += starved
        totals["time/learner/working"] += seconds - starved
        totals["time/engine/paused"] += paused
        totals["time/engine/working"] += seconds - paused
        row = dict(totals) | {
            "time/step": seconds,
            "time/wait": starved,
            "rollout/response_tokens": float(chance.randrange(500)),
        }
        rows.append((clock.now, step, row))
        progress.logged(step, 400, row)
    metrics = progress.facts()["metrics"]
    window = [row for row in rows if row[0] >= clock.now - 30]
    before = rows[rows.index(window[0]) - 1]
    seconds = clock.now - before[0]
    spent = {name: window[-1][2][name] - before[2][name] for name in totals}
    assert metrics["tokens_generated_per_s"] == pytest.approx(spent["goodput/generated"] / seconds)
    assert metrics["tokens_trained_per_s"] == pytest.approx(
        sum(row["rollout/response_tokens"] for _, _, row in window) / seconds
    )
    assert metrics["learner_idle"] == pytest.approx(spent["time/learner/idle"] / seconds)
    assert metrics["engine_idle"] == pytest.approx(spent["time/engine/paused"] / seconds)
    assert metrics["seconds_per_step"] == pytest.approx(seconds / len(window))
    assert progress.facts()["eta_s"] == pytest.approx(200 * seconds / len(window))


def test_what_nobody_measured_is_absent() -> None:
    progress = Progress()
    assert progress.facts()["metrics"] == {} and "eta_s" not in progress.facts()
    progress.logged(1, 2, {"time/step": 1.0, "rollout/score": float("nan")})
    facts = progress.facts()
    assert "rollout/score" not in facts["metrics"] and not {
        "engine_idle",
        "tokens_generated_per_s",
    } & set(facts["metrics"])
    json.dumps(facts, allow_nan=False)
    drawn = panel(facts, width=80, height=24, now=time.time())
    assert len(drawn.renderables) == 2, "the headline and the seconds per step"


def test_a_curve_keeps_few_points_and_its_mean() -> None:
    curve, values = Curve(), [random.Random(2).random() for _ in range(5000)]
    for value in values:
        curve.add(value)
    whole = curve.points
    assert CURVE_POINTS / 2 <= len(whole) <= CURVE_POINTS
    for index in (0, 7, len(whole) - 1):
        part = values[index * curve.stride : (index + 1) * curve.stride]
        assert whole[index] == pytest.approx(sum(part) / len(part))


def test_sparklines_go_from_low_to_high() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert (
        sparkline([0, 0, 7, 7], 2) == "▁█"
        and sparkline([3, 3, 3], 9) == "▁▁▁"
        and sparkline([], 5) == "" == sparkline([1], 0)
    )
    assert sparkline([float("nan"), 1, 2], 5) == "▁█"


@pytest.fixture
def facts(tmp_path: Path) -> dict[str, object]:
    """Of a run of this process, between two learner steps."""
    progress = Progress()
    row = {"time/step": 1.0, "time/wait": 0.1, "rollout/score": 0.5, "train/staleness_max": 1.0}
    for step in (1, 2, 3):
        progress.logged(step, 10, row | {"rollout/response_tokens": 5.0})
    file = StatusFile(tmp_path, progress, run="mine")
    file.close()
    return read_status(tmp_path)


def test_the_status_tells_what_became_of_a_run(facts: dict[str, object]) -> None:
    now = facts["written"]
    assert condition(facts, now=now).kind == "running"
    assert condition(
        facts | {"exit_code": 4, "message": "an engine died", "ended": now - 120}, now=now
    ).text == ("ended 2 min ago with exit code 4: an engine died")
    assert condition(facts | {"begun": facts["begun"] + 1}, now=now).kind == "killed", (
        "the process id is another process's by now"
    )
    elsewhere = facts | {"owner": "otherhost.1", "host": "other"}
    assert condition(elsewhere, now=now + 30).kind == "running"
    assert condition(elsewhere, now=now + 300).kind == "silent"
    late = facts | {"written": now + 1000, "metrics": {"seconds_per_step": 2.0}}
    assert condition(late, now=now + 1000).kind == "slow"


def test_a_killed_run_is_told_from_one_that_goes_on(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from "
        "async_grpo.observe.console.console import Console\n"
        "console = Console(); console.begin_run(Path(sys.argv[1]), run='mine')\n"
        "console.logged(1, 9, {'time/step': 1.0, 'rollout/score': 0.25})\n"
        "with console.phase('evaluating'): print('there', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / STATUS).exists() or read_status(tmp_path)["phase"] != "evaluating":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert condition(read_status(tmp_path), now=time.time()).kind == "running"
    finally:
        process.kill()
        process.wait(timeout=20)
        process.stdout.close()
    assert condition(read_status(tmp_path), now=time.time()).kind == "killed"
    shown = subprocess.run(
        [sys.executable, "-m", "async_grpo", "status", str(tmp_path), "--follow"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert (
        "step 1/9" in shown
        and "evaluating" in shown
        and "it was killed" in shown
        and "reward" in shown
    )


def test_of_a_directory_of_runs_the_newest_is_shown(tmp_path: Path) -> None:
    for at, name in enumerate(("older", "newest", "oldest")):
        (tmp_path / name).mkdir()
        (tmp_path / name / STATUS).write_text("{}")
        os.utime(tmp_path / name / STATUS, (100 + [1, 2, 0][at], 100 + [1, 2, 0][at]))
    assert newest_run(tmp_path) == tmp_path / "newest"
    assert newest_run(tmp_path / "oldest") == tmp_path / "oldest"
    assert newest_run(tmp_path / "none") == tmp_path / "none"


def test_the_command_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verbs.status([str(tmp_path)]) == 2
    assert "no run directory" in capsys.readouterr().err
    assert verbs.status([str(tmp_path / ("a" * 300))]) == 2
    assert "cannot be read: File name too long" in capsys.readouterr().err
    (tmp_path / STATUS).write_text('{"format": 99}')
    with pytest.raises(SetupError, match="not of this version"):
        read_status(tmp_path)


def test_the_end_is_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    file = StatusFile(tmp_path, progress, run="mine")
    progress.end(3, "no learning signal is left")
    file.close()
    assert verbs.status([str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["condition"], told["exit_code"], told["pid"]) == ("ended", 3, os.getpid())
    assert verbs.status([str(tmp_path)]) == 0
    assert "exit code 3: no learning signal is left" in capsys.readouterr().out


def test_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / STATUS).mkdir()
    progress = Progress()
    file = StatusFile(tmp_path, progress, run="mine")
    progress.logged(1, 2, {"time/step": 1.0})
    file.close()


def test_a_timeline_is_bounded_and_survives_a_cut(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    for index in range(60):
        timeline.add({"time": float(index), "kind": "note", "text": "x" * 200_000})
        timeline.flush()
    with open(tmp_path / TIMELINE, "ab") as file:
        file.write(b'{"time": 61.0, "kind": "no')
    assert sum((tmp_path / name).stat().st_size for name in (TIMELINE, EARLIER)) < 10 * 2**20
    kept = [event["time"] for event in read_timeline(tmp_path)]
    assert kept == [float(index) for index in range(60 - len(kept), 60)] and len(kept) > 20


def test_a_resumed_run_continues_the_curves(tmp_path: Path) -> None:
    def start(steps: range) -> list[float]:
        progress = Progress()
        file = StatusFile(tmp_path, progress, run="mine")
        for step in steps:
            progress.logged(step, 500, {"time/step": 1.0, "rollout/score": float(step)})
            if step % 100 == 0:
                progress.logged(step, 500, {"eval/accuracy_greedy": step / 1000})
        file.close()
        return progress.facts()["reward"]

    whole = start(range(1, 301))
    assert start(range(201, 301)) == pytest.approx(whole, abs=4), (
        "the steps after 200 were taken back"
    )
    assert read_status(tmp_path)["evaluations"] == [[100, 0.1], [200, 0.2], [300, 0.3]]
    start(range(1, 3))
    assert read_status(tmp_path)["evaluations"] == [] and len(read_status(tmp_path)["reward"]) == 2


def headline(progress: Progress, *, width: int) -> str:
    drawn = panel(progress.facts(), width=width, height=30, now=time.time())
    out = io.StringIO()
    rich.console.Console(file=out, width=width).print(drawn)
    return out.getvalue().splitlines()[0]


def test_the_panel_says_that_a_stopped_run_saves() -> None:
    progress = Progress()
    progress.logged(3, 10, {"time/step": 1.0})
    assert "stopping" not in headline(progress, width=120)
    progress.stopping = time.time()
    assert "stopping: this step, then a checkpoint" in headline(progress, width=120)
    progress.logged(4, 10, {"time/step": 1.0})  # the step that was under way
    assert "stopping" in headline(progress, width=120)
    progress.enter("evaluating")
    assert "evaluating" in headline(progress, width=120)


def test_whoever_waits_for_the_first_groups_is_not_starting_any_more() -> None:
    console = Console(io.StringIO())
    with console.phase("connecting weights"):
        console.weights_arrive({})
        assert "connecting weights" in headline(console.progress, width=120)
    assert headline(console.progress, width=120).startswith("waiting for the first groups 0:0")
    console.progress.logged(1, 10, {"time/step": 1.0})
    assert "waiting" not in headline(console.progress, width=120)


def test_a_run_that_waits_says_for_whom_and_promises_nothing() -> None:
    now = [100.0]
    progress = Progress(clock=lambda: now[0])
    for step in range(1, 9):
        now[0] += 1.0
        progress.logged(step, 20, {"time/step": 1.0})
    assert "ETA 0:12" in headline(progress, width=100)
    progress.note("publication v0.8 waits for actor-1.0 on h, 5 s")
    now[0] += 24.0
    facts = progress.facts()
    assert "eta_s" not in facts and "ETA" not in headline(progress, width=100)
    lines = [line.plain for line in panel(facts, width=100, height=20, now=now[0]).renderables]
    [quiet] = [line for line in lines if line.startswith("quiet")]
    assert quiet.endswith("for 0:24: publication v0.8 waits for actor-1.0 on h, 5 s")
    progress.logged(9, 20, {"time/step": 24.0})
    assert "eta_s" in progress.facts() and "quiet" not in progress.facts()


def test_the_bar_uses_the_width_of_the_terminal() -> None:
    progress = Progress()
    progress.logged(5, 10, {"time/step": 1.0})
    cells = [headline(progress, width=width).count("━") for width in (80, 120, 160)]
    assert cells[0] == 10 and cells[0] < cells[1] < cells[2]
    assert all(len(headline(progress, width=width)) <= width for width in (60, 80, 160, 300))


def test_the_version_that_is_shown_is_the_newest_that_was_published() -> None:
    now = [100.0]
    progress = Progress(clock=lambda: now[0])

    def shown() -> tuple[float, float]:
        facts = progress.facts()
        return facts["metrics"]["replay/live_version"], facts["published_at"]

    progress.logged(1, 9, {"time/step": 1.0, "replay/live_version": 0.0})
    progress.published(1)
    assert shown() == (1.0, 100.0)
    now[0] = 105.0
    progress.logged(2, 9, {"time/step": 1.0, "replay/live_version": 0.0})
    assert shown() == (1.0, 100.0), "the metrics of a step are of before its publication"
    progress.logged(3, 9, {"time/step": 1.0, "replay/live_version": 2.0})
    assert shown() == (2.0, 105.0)
    progress.published(1)
    assert shown() == (1.0, 105.0), "a learner that went back publishes an earlier version"


def test_commands_can_be_copied_where_a_name_has_spaces(facts: dict[str, object]) -> None:
    killed = facts | {"begun": facts["begun"] + 1, "run_dir": "/tmp/my run"}
    text = condition(killed, now=facts["written"]).text
    assert "/tmp/my run/config.yaml" in shlex.split(text)
    trainer = SimpleNamespace(
        config=Config.model_validate({"run": {"total_steps": 3}, "model": {"path": "m"}}),
        tracker=None,
        run_dir=Path("/tmp/my run"),
        steps_done=3,
        total_steps=3,
    )
    rows = dict(_next_steps(trainer, Path("/tmp/my run/checkpoints/step_000003")))
    assert "/tmp/my run" in shlex.split(rows["groups"])
    assert shlex.split(rows["next"])[2:4] == ["/tmp/my run/config.yaml", "run.total_steps=6"]


def test_a_run_that_has_ended_is_not_expected_to_end(facts: dict[str, object]) -> None:
    def one_line(facts: dict[str, object]) -> str:
        return panel(facts, width=120, height=2, now=facts["written"]).plain

    under_way = facts | {"phase": "training", "eta_s": 7.0}
    assert "ETA 0:07" in one_line(under_way)
    assert "ETA" not in one_line(under_way | {"exit_code": 0})
    stopping = under_way | {"phase": "stopping: this step"}
    for code, said in ((None, True), (3, True), (0, False)):
        ended = stopping | ({} if code is None else {"exit_code": code})
        assert ("stopping" in one_line(ended)) is said


def test_the_panel_shows_what_episodes_take() -> None:
    progress = Progress()
    progress.logged(1, 9, {"time/step": 1.0, "rollout/turns": 2.5, "rollout/environment_s": 0.25})
    [line] = [
        line.plain
        for line in panel(progress.facts(), width=120, height=30, now=time.time()).renderables
        if line.plain.startswith("episodes")
    ]
    assert line.split(None, 1)[1] == "2.5 turns   0.25 s in environments"


def test_a_long_line_is_folded_where_there_is_room_and_cut_where_there_is_none() -> None:
    progress = Progress()
    progress.logged(1, 9, {"time/step": 1.0, "replay/ready": 7.0, "replay/in_flight": 9.0})
    progress.say(kind="engines", text="add rollout actors " * 9)

    def lines(width: int, height: int) -> list[str]:
        drawn = panel(progress.facts(), width=width, height=height, now=time.time()).renderables
        assert all(len(line.plain) <= width for line in drawn) and len(drawn) < height
        return [line.plain for line in drawn]

    at = lines(26, 40).index("queue       7 ready   9 in")
    assert lines(26, 40)[at + 1] == "            flight"
    assert "queue       7 ready   9 i…" in lines(26, 10)
    verdict = " ".join(line[12:] for line in lines(80, 10)[-3:])
    assert verdict.split() == ["add", "rollout", "actors"] * 9, "a verdict is always whole"
    assert len(lines(9, 12)) == 11
