"""The live page: what it is sent is what a plain reading finds, it only reads, and a browser draws
it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from async_grpo import cli
from async_grpo.config.command_line import RUNS, Parser
from async_grpo.observe.console.progress import Progress
from async_grpo.observe.console.status_file import STATUS, StatusFile
from async_grpo.tools.report import data
from async_grpo.tools.watch import command, follow
from async_grpo.tools.watch.follow import FollowedRun

METRICS = ("rollout/score", "eval/accuracy_greedy")
QUICKSTART = Path(command.__file__).parents[3] / "docs" / "runs" / "quickstart"
EVIL = "<img src=x onerror=alert(1)>\x1b[31m\u202e\ud800"


def line(step: int, when: float, **metrics: float) -> bytes:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return json.dumps({"step": step, "time": when} | named).encode() + b"\n"


def learned(step: int, when: float, score: float = 0.5) -> bytes:
    return line(step, when, time__step=1.0, rollout__score=score, train__entropy=1.0 / step)


def make_run(directory: Path, *, name: str = "mine", steps: int = 3, begin: float = 1.0) -> Path:
    """A run of this process, which goes on."""
    directory.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    progress.note(EVIL)
    for step in range(1, steps + 1):
        row = {"time/step": 1.0, "rollout/score": 0.5, "train/staleness_mean": 0.75}
        progress.logged(step, 10, row)
    StatusFile(directory, progress, run=name).close()
    rows = [learned(step, begin + step) for step in range(1, steps + 1)]
    rows.append(line(steps, begin + steps + 0.5, eval__accuracy_greedy=0.25))
    (directory / "metrics.jsonl").write_bytes(b"".join(rows))
    return directory


class Page:
    """What the page keeps of one run: it adds what is new, and begins anew where told to."""

    def __init__(self, run: FollowedRun) -> None:
        self.run, self.after = run, ""
        self.points: list[list[Any]] = []
        self.got: list[int] = []
        self.fresh = 0

    def poll(self) -> dict[str, Any]:
        seen = self.run.look(f"7-1,{self.after},8-2")
        self.points = [] if seen["fresh"] else self.points
        self.points += seen["points"]
        self.got.append(len(seen["points"]))
        self.fresh += seen["fresh"]
        self.after = seen["after"]
        return seen


def plain(run_dir: Path) -> list[list[Any]]:
    """The points that a reading from the start finds."""
    read, path = data.RunData(run_dir, {}), run_dir / "metrics.jsonl"
    for each in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        read.take(each)
    rows = sorted([*read.rows, *read.evaluations], key=lambda row: row.time)
    return [
        [row.step, *(f"{row.values.get(name, float('nan')):.6g}" for name in METRICS)]
        for row in rows
    ]


class Story:
    """A metrics file to which everything happens that may happen."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.chance = path, random.Random(seed)
        self.step, self.now = 0, 0.0

    def lines(self) -> bytes:
        """A few lines of a run that goes on."""
        made = b""
        for _ in range(self.chance.randrange(1, 12)):
            self.step, self.now = self.step + 1, self.now + 1.0
            made += learned(self.step, self.now, self.chance.random())
            if self.chance.random() < 0.2:
                self.now += 0.5
                made += line(self.step, self.now, eval__accuracy_greedy=self.chance.random())
        return made

    def add(self, more: bytes) -> None:
        with open(self.path, "ab") as file:
            file.write(more)

    def happen(self) -> str:
        """Do one thing; its name."""
        kind = self.chance.choice(
            ["grow"] * 6 + ["back", "half", "garbage", "cut", "replace", "remove", "nothing"]
        )
        if kind == "back":
            self.step = self.chance.randrange(self.step + 1)
        elif kind == "half":
            whole = self.lines()
            self.add(whole[: self.chance.randrange(len(whole))])
        elif kind == "garbage":
            self.add(self.chance.choice([b"\xff\x00{\n", b"[1]\n", b'{"step": "x", "time": 1}\n']))
        elif kind == "cut" and self.path.exists():
            os.truncate(self.path, self.chance.randrange(self.path.stat().st_size + 1))
        elif kind == "replace":
            self.step = 0
            other = self.path.with_suffix(".new")
            other.write_bytes(self.lines())
            os.replace(other, self.path)
        elif kind == "remove":
            self.path.unlink(missing_ok=True)
        if kind in ("grow", "back"):
            self.add(self.lines())
        return kind


@pytest.mark.parametrize("seed", range(8))
def test_what_a_page_has_is_what_a_plain_reading_finds(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a page that looks seldom, and where the curves are thinned."""
    monkeypatch.setattr(data, "ROWS", 40)
    story, run = Story(tmp_path / "metrics.jsonl", seed), FollowedRun(tmp_path, METRICS)
    often, seldom = Page(run), Page(run)
    told = []
    for turn in range(150):
        told.append(story.happen())
        pages = [often, seldom] if turn % 7 == 0 else [often]
        for page in pages:
            page.poll()
            assert page.points == plain(tmp_path), told
    assert often.fresh < 100, "most looks are of a file that grew"


def test_steps_that_were_taken_back_are_gone_with_their_evaluations(tmp_path: Path) -> None:
    path, page = tmp_path / "metrics.jsonl", Page(FollowedRun(tmp_path, METRICS))
    evaluated = line(3, 3.5, eval__accuracy_greedy=0.75)
    path.write_bytes(b"".join(learned(step, step) for step in (1, 2, 3)) + evaluated)
    page.poll()
    with open(path, "ab") as file:
        file.write(learned(3, 9.0, 0.125))
    page.poll()
    assert page.points == [[1, "0.5", "nan"], [2, "0.5", "nan"], [3, "0.125", "nan"]]
    assert page.fresh == 2


def test_a_file_that_grows_is_sent_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 MB of it."""
    count = [0]

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            done = super().readinto(buffer)
            count[0] += done or 0
            return done or 0

    def counted(path: Any, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(Counted(path))

    monkeypatch.setattr(follow, "open", counted, raising=False)
    path, page = tmp_path / "metrics.jsonl", Page(FollowedRun(tmp_path, METRICS))
    with open(path, "wb") as file:
        for step in range(1, 101):
            file.write(learned(step, step))
            file.write(b"x" * 1_000_000 + b"\n")
    page.poll()
    assert count[0] >= 100_000_000 and page.got == [100]
    begun = count[0]
    for step in range(101, 111):
        with open(path, "ab") as file:
            file.write(learned(step, step) + learned(step + 1, step + 1)[:20])
        page.poll()
        os.truncate(path, path.stat().st_size - 20)
    page.poll()
    assert page.got == [100, *[1] * 10, 0] and page.fresh == 1
    # the newest line, to know the file again, at most; files are read in blocks
    assert count[0] - begun < 1_000_000 + 12 * 64_000


def client(*run_dirs: Path, host: str = command.LOOPBACK) -> TestClient:
    return TestClient(command.application([*run_dirs], host), base_url="http://127.0.0.1:80")


def test_two_runs_are_shown_with_what_the_terminal_shows(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", name="first"), make_run(tmp_path / "b", name=EVIL, steps=2)]
    first, second = client(*runs).get("/data").json()
    assert (first["run"], first["kind"], first["step"], first["total"]) == (
        "first",
        "running",
        3,
        10,
    )
    assert (second["run"], second["directory"]) == (EVIL, str(runs[1]))
    assert first["head"].startswith("step 3/10") and first["notes"] == [EVIL]
    assert dict((label, text) for label, text, _ in first["lines"])["queue"] == (
        "staleness mean 0.75"
    )
    shown = re.findall(r'data-metric="(.+?)"', command.PAGE.read_text())
    score, accuracy = shown.index("rollout/score") + 1, shown.index("eval/accuracy_greedy") + 1
    assert [point[score] for point in first["points"]] == ["0.5"] * 3 + ["nan"]
    assert [point[accuracy] for point in second["points"]] == ["nan", "nan", "0.25"]


def test_only_what_is_new_is_sent(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", steps=5)]
    page = client(*runs)
    after = ",".join(run["after"] for run in page.get("/data").json())
    with open(runs[1] / "metrics.jsonl", "ab") as file:
        file.write(learned(6, 99.0, float("nan")))
    first, second = page.get("/data", params={"after": after}).json()
    assert (first["points"], first["fresh"]) == ([], False)
    assert [point[:2] for point in second["points"]] == [[6, "nan"]] and not second["fresh"]
    for wrong in ("", "1-2", "-".join(after), re.sub("-", "-" + "9" * 5000, after), "\x00é"):
        seen = page.get("/data", params={"after": wrong}).json()
        assert [len(run["points"]) for run in seen] == [4, 7] and seen[0]["fresh"]


def test_a_run_that_has_nothing_yet_says_so_until_it_has(tmp_path: Path) -> None:
    """Also where there is no directory of runs yet."""
    runs = tmp_path / "runs"
    page, run = client(runs, tmp_path / "later"), make_run
    for seen in page.get("/data").json():
        assert "has no status.json" in seen["text"] and not seen["points"] and "kind" not in seen
    run(runs / "one", name="one")
    run(tmp_path / "later", name="two")
    seen = page.get("/data").json()
    assert [(one["run"], len(one["points"])) for one in seen] == [("one", 4), ("two", 4)]
    time.sleep(0.01)
    run(runs / "newer", name="newer")
    assert page.get("/data").json()[0]["run"] == "one", "a page does not turn to another run"
    assert client(runs).get("/data").json()[0]["run"] == "newer"


def test_a_status_that_is_half_written_leaves_the_rest(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b")]
    status = runs[0] / STATUS
    whole = status.read_bytes()
    for part in (b"", whole[: len(whole) // 2], b"[]", b"\xff"):
        status.write_bytes(part)
        first, second = client(*runs).get("/data").json()
        assert str(status) in first["text"] and len(first["points"]) == 4
        assert second["kind"] == "running"


def test_a_run_that_is_gone_says_so_and_its_clock_stands_still(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    facts = json.loads((run / STATUS).read_text())
    facts |= {"begun": facts["begun"] + 1, "started": facts["written"] - 60}
    (run / STATUS).write_text(json.dumps(facts | {"written": facts["written"] - 3000}))
    [seen] = client(run).get("/data").json()
    assert seen["kind"] == "killed" and "it was killed about 50 min ago" in seen["text"]
    assert seen["head"].endswith("elapsed 0:00")
    ended = {"exit_code": 6, "message": "not finite", "ended": facts["written"]}
    (run / STATUS).write_text(json.dumps(facts | ended))
    [seen] = client(run).get("/data").json()
    assert (seen["kind"], seen["exit_code"]) == ("ended", 6) and "not finite" in seen["text"]
    assert seen["head"].endswith("elapsed 1:00")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("evil.example", 400),
        ("127.0.0.1.evil.example:8000", 400),
        ("localhost.evil.example", 400),
        ("", 400),
        ("box:8000", 400),
    ],
)
def test_a_name_that_was_made_to_lead_here_is_refused(
    host: str, status: int, tmp_path: Path
) -> None:
    for path in ("/", "/data"):
        answer = client(tmp_path).get(path, headers={"host": host})
        assert answer.status_code == status
        named = client(tmp_path, host="box").get(path, headers={"host": host})
        assert named.status_code == (200 if host == "box:8000" else status)


def test_it_reads_only(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")

    def state() -> dict[Path, tuple[int, int]]:
        found = [tmp_path, *tmp_path.rglob("*")]
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in found}

    before, page = state(), client(run)
    for path in ("/", "/data", "/data?after=1-2&run_dir=/etc", "/nothing"):
        page.get(path)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert page.request(method, "/data").status_code == 405
        assert page.request(method, "/").status_code == 405
    for path in ("/../setup.py", "/data/../../etc/passwd", "//etc/passwd", "/%2e%2e/x", "/docs"):
        assert page.get(path).status_code == 404
    assert state() == before


def test_the_page_asks_nobody_but_its_server() -> None:
    page = command.PAGE.read_text(encoding="utf-8")
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', page, re.DOTALL)
    said = dict(part.split(None, 1) for part in policy.split(";"))
    assert said["default-src"] == "'none'" and said["connect-src"] == "'self'"
    for kind in ("style", "script"):
        [own] = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        hashed = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert said[f"{kind}-src"] == f"'sha256-{hashed}'", "the page has another one by now"
    without_namespace = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]|src=|@import|url\(|<link", without_namespace)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)
    headers = client().get("/").headers
    assert headers["x-frame-options"] == "DENY" and headers["cache-control"] == "no-store"


def test_every_curve_is_one_of_a_real_run() -> None:
    [run] = client(QUICKSTART).get("/data").json()
    metrics = re.findall(r'data-metric="(.+?)"', command.PAGE.read_text())
    drawn = [[value for value in values if value != "nan"] for _, *values in run["points"]]
    assert len(metrics) == len(set(metrics)) == 9 and drawn
    for at, name in enumerate(metrics, 1):
        assert any(point[at] != "nan" for point in run["points"]), name


def test_the_newest_run_is_shown_where_none_is_named() -> None:
    parser = Parser(prog="watch")
    command.arguments(parser)
    given = parser.read([])
    assert (given.run_dirs, given.port, given.host) == ([RUNS], 0, "127.0.0.1")
    assert parser.read(["a", "--port", "8", "b"]).run_dirs == [Path("a"), Path("b")]


@contextmanager
def watching(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The verb, and the address that it says."""
    run = [sys.executable, "-m", "async_grpo", "watch", *words]
    process = subprocess.Popen(
        run,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # of a suite behind &
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.timeout(60)
def test_the_verb_listens_where_it_says_until_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "a")
    with watching(str(run), "--host", "127.0.0.2") as (process, address):
        port = address.removesuffix("/").rpartition(":")[2]
        assert address == f"http://127.0.0.2:{port}/"
        with urllib.request.urlopen(f"{address}data", timeout=20) as answer:
            assert json.load(answer)[0]["run"] == "mine"
        with pytest.raises(urllib.error.URLError, match="refused"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20)
        assert cli.main(["watch", str(run), "--host", "127.0.0.2", "--port", port]) == 2
        said = capsys.readouterr().err
        assert f"--host 127.0.0.2 --port {port} cannot be listened on" in said
        assert "already in use" in said and "Traceback" not in said
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr is not None and process.stderr.read() == ""


@pytest.mark.parametrize("words", [["--port", "99999"], ["--host", "no.such.host.invalid"]])
def test_where_nothing_can_listen_is_said(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["watch", *words]) == 2
    assert "cannot be listened on" in capsys.readouterr().err


BROWSERS = [
    found
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
    if (found := shutil.which(name))
]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(not BROWSERS, reason="no Chromium is installed here")
def test_a_browser_draws_the_curves(tmp_path: Path) -> None:
    """And new points of them, while it looks; text of a run is text."""
    run, other = make_run(tmp_path / "a", name=EVIL), make_run(tmp_path / "b", begin=50.0)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    home = f"--user-data-dir={tmp_path / 'browser'}"
    with watching(str(run), str(other)) as (_, address):
        dump = [BROWSERS[0], *options, home, "--dump-dom", address]
        done = subprocess.run(dump, capture_output=True, text=True, timeout=90)
    page = done.stdout
    drawn = re.findall(r'<figure data-metric="([^"]+)"[^>]*?( hidden="")?>(.*?)</figure>', page)
    curves = {name: text.count('class="curve"') for name, hidden, text in drawn if not hidden}
    assert curves == {"rollout/score": 2, "eval/accuracy_greedy": 2, "train/entropy": 2}
    entropy = next(text for name, _, text in drawn if name == "train/entropy")
    assert [path.count("L") for path in re.findall(r' d="M([^"]+)"', entropy)] == [2, 2]
    assert page.count("<article") == 2 and "<img" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;\\u{1b}[31m\\u{202e}" in page
    assert 'id="told" role="status" hidden=""' in page
