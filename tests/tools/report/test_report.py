"""The report: one file that needs nothing else, every section there, and numbers that are the
run's.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.config.schema import Config, Model, Run, Tracking
from async_grpo.observe.console.console import Console
from async_grpo.observe.console.status_file import read_timeline
from async_grpo.observe.reward_hacking import EARNED
from async_grpo.replay.resume import open_queue
from async_grpo.run.ending import end
from async_grpo.run.trainer import Trainer
from async_grpo.tools.report import plots
from async_grpo.tools.report.data import ROWS, read_run
from async_grpo.tools.report.facts import (
    alarms,
    bottleneck,
    origin,
    restarts,
    sample_sections,
    swings,
    tiles,
)
from async_grpo.tools.report.failures import failures, slowest
from async_grpo.tools.report.gantt import Window, _counts, read_window
from async_grpo.tools.report.launch import report_on, write_report
from async_grpo.tools.report.plots import lag_colour, smooth, times_by_cause, tokens_by_fate
from tests.support import verbs
from tests.support.frames import frame_of
from tests.support.journal_life import journal_in, queue_settings

PICTURES = [
    "learning",
    "rewards",
    "throughput",
    "staleness",
    "length_by_staleness",
    "clip_ess",
    "health",
]
TABLES = ["mismatch", "samples", "failures", "restarts", "configuration"]
SECTIONS = [*PICTURES, "goodput", "timeline", *TABLES]
EVIL = "<script>alert(1)</script><img src=https://evil.example/x.png onerror=y>\x1b[31m\u202e"


def row(step: int, when: float) -> dict[str, Any]:
    """What a learner step logs, as far as the report reads it."""
    return {
        "step": step,
        "time": when,
        "rollout/score": 0.5 + step / 1000,
        "rollout/response_length": 7.0,
        "rollout/reward/correct": 0.5,
        "rollout/all_right_groups": 0.25,
        "train/staleness_mean": 0.8,
        "train/staleness_max": 3.0,
        "train/entropy": 1.0 / step,
        "train/grad_norm": 1.0,
        "train/approx_kl": 1e-3,
        "train/tokens_per_s": 900.0,
        "train/loss": 0.0,
        **{
            f"train/staleness_{bucket}/{name}": share
            for bucket, share in (("0", 0.3), ("1", 0.6), ("3-4", 0.1))
            for name in ("token_share", "sequence_length", "pg_clipfrac", "ess")
        },
        "time/step": 0.5,
        "time/wait": 0.2,
        "time/train": 0.25,
        "time/weight_sync": 0.05,
        "time/learner_idle": 0.4,
        "cluster/restarts": 1.0,
        "goodput/generated": step * 1000.0,
        "goodput/trained": step * 800.0,
        "goodput/rejected": step * 150.0,
        "goodput/held": 50.0 * step,
        "time/learner/working": step * 0.25,
        "time/learner/idle": step * 0.2,
        "time/engine/working": step * 0.4,
        "time/engine/paused": step * 0.1,
    }


def write(file: Path, rows: Iterable[dict[str, Any]], *, end: str = "") -> None:
    """Rows as JSON, a line each."""
    file.write_text("".join(json.dumps(each) + "\n" for each in rows) + end)


def make_run(directory: Path, *, steps: int = 60) -> Path:
    """A run directory as a run would leave it, without a journal; step 30 on was taken back
    once.
    """
    directory.mkdir()
    start = time.time() - steps
    rows: list[dict[str, Any]] = [
        {"step": 0, "time": start, "eval/accuracy_greedy": 0.4, "eval/problems": 100.0}
    ]
    rows += [row(step, start + step * 0.5) | {"rollout/score": -9.0} for step in range(1, 41)]
    rows += [row(step, start + 20 + step * 0.5) for step in range(30, steps + 1)]
    accuracy = {"": 0.7, "/low": 0.6, "/high": 0.8}
    middle = {f"eval/accuracy_greedy{part}": value for part, value in accuracy.items()}
    rows.insert(30, {"step": 25, "time": start + 12} | middle)
    rows.append({"step": 41, "time": start + 41, "checkpoint/seconds": 0.5})
    last = {"step": steps, "time": start + 20 + steps}
    rows.append(last | {"goodput/held": 0.0, "goodput/unused": 3000.0})
    rows.append(last | {"eval/accuracy_greedy": 0.9, "eval/pass@4": 0.95})
    write(directory / "metrics.jsonl", rows, end='{"step": 99, "ti')
    said = {"response": EVIL, "rewards": "{'correct': 1.0, 'form': 0.5}", "verdict": 1.0}
    samples = ({"step": step, "prompt": f"1+{step}="} | said for step in (0, 25, steps))
    write(directory / "samples.jsonl", samples)
    (directory / "config.yaml").write_text(
        f"run: {{name: mine}}\nreplay: {{max_staleness: 4}}\nlearner: {{lr: 0.001}}\ntask: "
        f"{{name: '{EVIL[:25]}'}}\n"
    )
    console = Console(open(directory / "log.txt", "w"))  # noqa: SIM115 - as long as the process lives
    console.begin_run(directory, run="mine")
    console.info("actor-1 died; actor-2 replaces it")
    console.info("actor-3 is given up (no answer to a probe in 30 s); actor-4 replaces it")
    console.logged(steps, steps, row(steps, start))
    console.published(50, 0.2)
    console.bottleneck(kind="engines", text="the engines limit")
    for _ in range(2):
        console.info(f"warning: step 2: the score rose: {EARNED}")
    console.end(0, "")
    return directory


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with its report."""
    directory = make_run(tmp_path_factory.mktemp("runs") / "run")
    assert verbs.report([str(directory)]) == 0
    return directory


class Page(HTMLParser):
    """What is in a page: ids of sections, text by section, and everything that a browser would ask
    for.
    """

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: dict[str, str] = {}
        self.tags: dict[str, list[str]] = {}
        self.requests: list[str] = []
        self.ids: list[str] = []
        self._open: list[str] = []
        self._section = ""
        self.feed(text)
        assert self._open == [], "a tag is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self._open.append(tag)
        values = dict(attrs)
        if "id" in values:
            self.ids.append(values["id"] or "")
        if tag == "section":
            self._section = values["id"] or ""
            self.sections[self._section], self.tags[self._section] = "", []
        self.tags.setdefault(self._section, []).append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action", "poster", "srcset") and not (
                value or ""
            ).startswith(("#", "data:")):
                self.requests.append(f"{tag} {name}={value}")
            if name == "style" and re.search(r"url\((?!['\"]?#)", value or ""):
                self.requests.append(f"{tag} style={value}")
            assert not name.startswith("on"), f"{tag} has a handler"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        if self._section:
            self.sections[self._section] += data


def test_the_page_has_every_section_and_asks_for_nothing(run_dir: Path) -> None:
    text = (run_dir / "report" / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert list(page.sections) == SECTIONS
    assert page.requests == [] and "script" not in {
        tag for tags in page.tags.values() for tag in tags
    }
    assert [name for name in PICTURES if "svg" not in page.tags[name]] == []
    assert len(page.ids) == len(set(page.ids)), "two pictures share a name"
    assert (
        "default-src 'none'" in text
        and "prefers-color-scheme: dark" in text
        and "@import" not in text
    )
    assert "\x1b" not in text and "\u202e" not in text and "<script>" not in text
    assert set(re.findall(r"https?://[^\s\"<&]+", text)) <= {
        "http://www.w3.org/1999/xlink",
        "https://evil.example/x.png",
    }
    assert (
        "actor-1 died; actor-2 replaces it" in page.sections["restarts"]
        and "actor-4 replaces it" in page.sections["restarts"]
        and "1 rollout actors replaced" in page.sections["restarts"]
    )
    assert (
        "max_staleness" in page.sections["configuration"]
        and "reward correct" in page.sections["samples"]
    )
    assert all(f"step {step}" in page.sections["samples"] for step in (0, 25, 60))


def test_every_picture_is_a_file_too(run_dir: Path) -> None:
    for name in PICTURES:
        data = (run_dir / "report" / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5000, name


def test_steps_that_were_taken_back_do_not_count(run_dir: Path) -> None:
    data = read_run(run_dir)
    assert [each.step for each in data.rows] == list(range(1, 61))
    assert [each.values["rollout/score"] < 0 for each in data.rows] == [True] * 29 + [False] * 31
    assert [each.step for each in data.evaluations] == [0, 25, 60]
    assert [each.step for each in data.between(35, 40)] == list(range(35, 41)) and data.between(
        35, 35
    )[0].values["rollout/score"] > 0
    lead, kind, shown = tiles(data)
    assert kind == "good" and "exit code 0" in lead
    assert bottleneck(data) == "What limits it: the engines limit."
    assert alarms(data) == f"Step 2: the score rose: {EARNED}."
    began = next(event for event in data.events if event["kind"] == "start")
    assert origin(data).endswith(f"host {began['host']} · task {EVIL[:25]}")
    assert ("learner steps", "60 of 60") in shown and (
        "held-out accuracy, step 60",
        "40.0% → 90.0%",
    ) in shown
    assert ("of the generated tokens were trained", "80.0%") in shown and (
        "staleness, largest (bound 4)",
        "3",
    ) in shown


def test_of_several_tasks_each_accuracy_is_drawn(tmp_path: Path) -> None:
    tasks = {"eval/task/sums/accuracy_greedy": 0.3, "eval/task/words/accuracy_greedy": 0.5}
    found = [
        {"step": step, "time": float(step), "eval/accuracy_greedy": 0.4, "eval/pass_at_4": 0.9}
        | {name: value + step / 10 for name, value in tasks.items()}
        for step in (0, 2)
    ]
    write(tmp_path / "metrics.jsonl", found)
    figure = plots.learning(read_run(tmp_path))
    assert figure is not None
    labels = [text.get_text() for text in figure.axes[-1].get_legend().get_texts()]
    assert labels == ["greedy", "sums", "words"]


def test_the_breakdown_is_that_of_the_last_step(run_dir: Path) -> None:
    data = read_run(run_dir)
    assert tokens_by_fate(data) == (
        "tokens",
        {"trained": 48000.0, "rejected": 9000.0, "unused": 3000.0},
    ), "the line of the end counts"
    times = dict(times_by_cause(data))
    assert times["learner time"] == {"working": 15.0, "idle": 12.0} and times["engine time"] == {
        "working": 24.0,
        "paused": 6.0,
    }
    counts, lines = restarts(data)
    assert (
        "rollout actors replaced" in counts
        and [text for _, text in lines][-1] == "ended with exit code 0"
    )
    assert [heading for heading, _, _ in sample_sections(data)] == [
        "Start: step 0, held out",
        "Middle: step 25, held out",
        "End: step 60, held out",
    ]


def test_a_long_run_is_thinned_and_keeps_its_last_step(tmp_path: Path) -> None:
    each = {"time/step": 1.0, "rollout/score": 1.0}
    steps = ({"step": step, "time": float(step)} | each for step in range(1, 10_002))
    write(tmp_path / "metrics.jsonl", steps)
    rows = read_run(tmp_path).rows
    assert ROWS / 2 <= len(rows) <= ROWS + 1 and rows[-1].step == 10_001
    gaps = {later.step - earlier.step for earlier, later in pairwise(rows[1:-1])}
    assert gaps == {4}


@pytest.mark.parametrize(
    ("third", "last", "lag", "said"),
    [
        (0.80, 0.80, 16.0, True),
        (0.80, 0.75, 16.0, True),
        (0.80, 0.90, 16.0, False),
        (0.99, 0.985, 16.0, False),
        (0.80, 0.80, 1.0, False),
    ],
)
def test_a_policy_that_swings_around_old_data_is_told_of(
    tmp_path: Path, third: float, last: float, lag: float, said: bool
) -> None:
    old = {"train/staleness_max": lag, "train/staleness_mean": lag, "time/step": 1.0}
    shares = [0.6] * 40 + [third] * 20 + [last] * 20
    rows = (
        old | {"step": step, "time": float(step), "train/ess": share}
        for step, share in enumerate(shares, 1)
    )
    write(tmp_path / "metrics.jsonl", rows)
    text = swings(read_run(tmp_path))
    assert ("does not come back" in text and f"{last:.0%} in the last" in text) == said
    assert bool(text) == said


def test_the_window_tells_what_the_learner_did_when(run_dir: Path) -> None:
    data = read_run(run_dir)
    window = read_window(data, steps=(40, 42))
    rows = data.between(40, 42)
    assert (window.first, window.last) == (40, 42) and window.end - window.begin == pytest.approx(
        1.5
    )
    for index, each in enumerate(rows):
        (wait, train, sync) = (
            window.learner[cause][index] for cause in ("wait", "train", "weight_sync")
        )
        assert (
            wait[0] == each.time - 0.5
            and wait[1] - wait[0] == pytest.approx(0.2)
            and train == pytest.approx((wait[1], wait[1] + 0.25))
        )
        assert sync[1] == pytest.approx(each.time)
    assert "no journal" in window.notes[0] and list(window.phases) == ["checkpoint"]
    assert read_window(data, steps=(500, 510)) is None


def test_open_spans_are_counted() -> None:
    window = Window(1, 1, 10.0, 20.0)
    times, [one, two] = _counts([[(8.0, 12.0), (11.0, 15.0)], [(12.0, 30.0)]], window)

    def at(moment: float, counts: list[int]) -> int:
        return [count for time, count in zip(times, counts, strict=True) if time <= moment][-1]

    assert [at(moment, one) for moment in (0.5, 1.5, 2.5, 6.0)] == [1, 2, 1, 0]
    assert [at(moment, two) for moment in (0.5, 2.5, 9.9)] == [0, 1, 1]
    assert times[0] == 0.0 and times[-1] == 10.0 and times == sorted(times)


def test_means_and_colours() -> None:
    values = [float(index % 7) for index in range(300)]
    smoothed = smooth(values)
    assert (
        smoothed[150] == pytest.approx(sum(values[145:156]) / 11)
        and smoothed[0] == pytest.approx(sum(values[:6]) / 6)
        and smooth([]) == []
    )
    assert (
        len({lag_colour(bucket) for bucket in ("0", "1", "2", "3-4", "5-8", "9-16", "17-32")}) == 7
    )


@pytest.mark.slow
def test_episodes_and_pass_rates_have_a_picture_where_there_are_any(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    text = (run / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    for line in lines:
        line |= {"rollout/turns": 2.5, "rollout/turns_max": 4.0, "rollout/sampled_share": 0.6}
        line |= {"rollout/ended/env_done": 0.9, "rollout/ended/length": 0.1}
        line |= {f"replay/pass_rate/{fifth}": 3.0 for fifth in range(5)}
    write(run / "metrics.jsonl", lines)
    assert verbs.report([str(run)]) == 0
    page = Page((run / "report" / "report.html").read_text(encoding="utf-8"))
    assert list(page.sections) == [*SECTIONS[:2], "episodes", "pass_rates", *SECTIONS[2:]]
    for name in ("episodes", "pass_rates"):
        assert "svg" in page.tags[name] and (run / "report" / f"{name}.png").stat().st_size


def test_a_run_without_a_step_has_a_report_without_pictures(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert verbs.report([str(tmp_path)]) == 0
    page = Page((tmp_path / "report" / "report.html").read_text(encoding="utf-8"))
    assert list(page.sections) == SECTIONS and not any("svg" in tags for tags in page.tags.values())
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["report.html"]


def test_what_is_no_run_is_refused(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verbs.report([str(tmp_path)]) == 2
    assert "no run directory" in capsys.readouterr().err
    assert verbs.report([str(run_dir), "--steps", "500-510"]) == 2


@pytest.mark.slow
def test_the_driver_gets_a_line_whatever_happens(tmp_path: Path, run_dir: Path) -> None:
    nothing, line = write_report(tmp_path)
    assert (
        nothing is None
        and line.startswith("the report could not be written (error: ")
        and str(tmp_path) in line
    )
    again = tmp_path / "again"
    shutil.copytree(run_dir, again)
    shutil.rmtree(again / "report")
    (again / "report").write_text("in the way")
    nothing, line = write_report(again)
    assert nothing is None and "cannot be written" in line


def test_the_process_that_trains_never_imports_matplotlib() -> None:
    code = (
        "import sys, async_grpo.run.trainer, async_grpo.run.command; "
        "import async_grpo.tools.report.launch; sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


async def test_engines_and_queue_come_from_the_journal(tmp_path: Path) -> None:
    """Two actors, three steps of two groups; what the window says of each group is what its frame
    and its step say.
    """
    queue = open_queue(queue_settings(), journal_in(tmp_path / "journal"))
    await queue.live(0)
    times, taken, rows = {}, {}, []
    for step in (1, 2, 3):
        for actor in ("actor-0.0", "actor-1.0"):
            [ticket] = await queue.acquire(actor, step - 1, [], 1)
            begin = 100.0 * step + ticket.group_id
            after = {"queued": 0, "first_token": 1, "done": 20, "scored": 25}
            known = {name: begin + seconds for name, seconds in after.items()}
            times[ticket.group_id] = (actor, known)
            verdicts = await queue.put(actor, [frame_of(ticket, actor=actor, times=known)])
            assert verdicts[0].status == "accepted"
        batch = await queue.get_batch(step)
        taken |= {meta.group_id: 100.0 * step + 40 for meta in batch.groups}
        rows.append(
            row(step, 100.0 * step + 90)
            | {"time/step": 80.0, "time/wait": 30.0, "time/train": 45.0, "time/weight_sync": 5.0}
        )
        await queue.get_batch(step + 1)
        await queue.live(step)
    await queue.close()
    write(tmp_path / "metrics.jsonl", rows)
    window = read_window(read_run(tmp_path), steps=(2, 3))
    shown = {group_id: each for group_id, each in times.items() if each[1]["scored"] > window.begin}
    assert window.notes == [] and (window.begin, window.end) == (210.0, 390.0)
    assert len(shown) == 4 and set(window.generating) == {"actor-0.0", "actor-1.0"}
    for actor in window.generating:
        mine = [each for name, each in shown.values() if name == actor]
        assert window.generating[actor] == [(each["queued"], each["done"]) for each in mine]
        assert window.scoring[actor] == [(each["done"], each["scored"]) for each in mine]
    assert sorted(window.ready) == sorted(
        (each["scored"], taken[group_id]) for group_id, (_, each) in shown.items()
    )


def test_failures_are_listed_by_reason_with_what_they_mean(tmp_path: Path, run_dir: Path) -> None:
    assert (
        "Nothing failed"
        in Page((run_dir / "report" / "report.html").read_text()).sections["failures"]
    )
    run = make_run(tmp_path / "run")
    totals = {
        "rollout/environment_failures/exception": 3.0,
        "rollout/environment_failures/lease": 1_204.0,
        "rollout/environment_failures/crash": 0.0,
        "rollout/verifier_errors_timeout": 7.0,
        "rollout/requests/429": 5.0,
        "rollout/requests/answered": 99.0,
    }
    when = time.time()
    rows = (
        row(step, when + step) | {name: value * step / 2 for name, value in totals.items()}
        for step in (1, 2)
    )
    write(run / "metrics.jsonl", rows)
    data = read_run(run)
    assert [(kind, count) for kind, count, _ in failures(data)] == [
        ("episode: lease", "1,204"),
        ("verifier: timeout", "7"),
        ("request: 429", "5"),
        ("episode: exception", "3"),
    ]
    assert verbs.report([str(run)]) == 0
    section = Page((run / "report" / "report.html").read_text()).sections["failures"]
    assert "its worker said nothing" in section and "answered" not in section
    assert slowest(data) == [], "there is no journal"


async def test_the_slowest_episodes_come_from_the_journal(tmp_path: Path) -> None:
    """Two groups of two episodes, one of which has two rows."""
    settings = queue_settings(rollout_batch_size=1)
    queue = open_queue(settings, journal_in(tmp_path / "journal"))
    await queue.live(0)
    rows = []
    for step, ends in ((1, (103.0, 108.5)), (2, (104.0, 101.0))):
        [ticket] = await queue.acquire("actor-0.0", step - 1, [], 1)
        times = {"queued": 100.0, "first_token": 101.0, "done": 103.0, "scored": 109.0}
        times |= {f"episode_{number}": at for number, at in enumerate(ends)}
        verdicts = await queue.put("actor-0.0", [frame_of(ticket, times=times)])
        assert verdicts[0].status == "accepted"
        await queue.get_batch(step)
        rows.append(row(step, 200.0 + step))
        await queue.live(step)
    await queue.close()
    write(tmp_path / "metrics.jsonl", rows)
    found = slowest(read_run(tmp_path))
    assert [(one.seconds, one.group_id, one.number) for one in found] == [
        (8.5, 0, 1),
        (4.0, 1, 0),
        (3.0, 0, 0),
        (1.0, 1, 1),
    ]
    assert all(one.sampled > 0 and one.finish_reason for one in found)


@pytest.mark.parametrize("enabled", [True, False])
def test_whatever_goes_wrong_with_the_report_is_a_line(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    def breaks(path: Path) -> None:
        raise RuntimeError(f"no report of {path.name}")

    monkeypatch.setattr("async_grpo.tools.report.launch.write_report", breaks)
    config = Config(
        run=Run(name="mine", dir=str(run_dir), total_steps=60),
        model=Model(path="somewhere"),
        tracking=Tracking(report=enabled),
    )
    said = io.StringIO()
    report_on(config, Console(said), None)
    assert (
        said.getvalue().startswith(
            "error: the report could not be written (no report of run)" if enabled else ""
        )
        and bool(said.getvalue()) == enabled
    )


@pytest.mark.parametrize("ending", [None, (0, ""), (4, "actor-0.0 died")])
def test_a_run_that_ends_through_the_trainer_has_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: tuple[int, str] | None
) -> None:
    """A notebook's `stop()`, the end of a `with` block, and the command line, which says how it
    ended.
    """
    done = []
    monkeypatch.setattr(
        "async_grpo.tools.report.launch.report_on",
        lambda config, console, tracker: done.append(("report", console.progress.ended)),
    )
    config = Config(
        run=Run(name="mine", dir=str(tmp_path), total_steps=1), model=Model(path="somewhere")
    )
    trainer = Trainer(config, console=Console(io.StringIO()))
    trainer._log.tracker = SimpleNamespace(
        tag=lambda *_: None,
        conclude=lambda status: done.append(("conclude", status)),
        finish=lambda status: done.append(("finish", status)),
    )
    trainer.stop(ending=ending)
    trainer.stop()
    assert [what for what, _ in done] == ["conclude", "report", "finish"] and dict(done)[
        "report"
    ], "it tells of the end"


def test_a_start_that_was_refused_is_recorded_once(tmp_path: Path) -> None:
    config = Config(
        run=Run(name="mine", dir=str(tmp_path), total_steps=1), model=Model(path="somewhere")
    )
    console = Console(io.StringIO())
    trainer = Trainer(config, console=console)
    console.begin_run(tmp_path, run="mine")
    trainer.stop("FAILED", ending=(2, "it does not fit"))
    end(console, 2, "it does not fit")
    codes = [event["exit_code"] for event in read_timeline(tmp_path) if "exit_code" in event]
    assert codes == [2]


BROWSERS = [
    path
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
    if (path := shutil.which(name))
]


@pytest.mark.skipif(
    not BROWSERS, reason="no Chromium is installed here; the parser has checked the page"
)
def test_a_browser_opens_it(run_dir: Path) -> None:
    page = run_dir / "report" / "report.html"
    done = subprocess.run(
        [BROWSERS[0], "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert all(f'<section id="{name}">' in done.stdout for name in SECTIONS)
