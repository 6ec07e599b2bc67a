"""The screenshots of the pages: panel, report, live page and MLflow's charts, of a run that is
training now.

    async-grpo train quickstart run.dir=runs/shown &
    python docs/generate/screenshots.py runs/shown      # while it trains; needs chromium

Waits for the middle of the run to draw the panel, and for its end to show the rest.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from websockets.sync.client import connect

from async_grpo.observe.console.panel import panel
from async_grpo.observe.console.status_file import condition, read_status

ASSETS = Path(__file__).resolve().parents[1] / "assets"
DEADLINE_S = 1_800.0
PLOTS = "document.querySelectorAll('.js-plotly-plot').length"
ROLLOUTS = """
for (const button of document.querySelectorAll('button'))
    if (/close/i.test(button.getAttribute('aria-label') || '')) button.click();
const style = document.createElement('style');
style.textContent = '.modebar { display: none !important }';
document.head.append(style);
[...document.querySelectorAll('div')].find((one) => one.innerText === 'rollout').scrollIntoView();
"""
"""Closes MLflow's assistant, hides the charts' buttons, and goes to the charts of rollouts."""


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args().run_dir
    facts = wait(run_dir, lambda facts: facts["step"] >= 0.6 * facts["total"] > 0)
    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    console.print(panel(facts, now=facts["written"], width=110, height=24))
    svg = console.export_svg(title=f"async-grpo train {facts['run']}")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # no request to others
    (ASSETS / "panel.svg").write_text(svg.replace("Fira Code, ", ""), encoding="utf-8")
    wait(run_dir, lambda facts: condition(facts, now=time.time()).kind == "ended")
    time.sleep(5)  # the report is written by a process of its own
    with browser(1100, 1250) as page:
        page.open((run_dir / "report" / "report.html").resolve().as_uri())
        page.picture("report.png")
    with watch(run_dir) as site, browser(1300, 1250) as page:
        page.open(site)
        page.wait("document.querySelectorAll('path.curve').length >= 9")
        page.picture("watch.png")
    with mlflow(run_dir / "mlflow.db") as charts, browser(1300, 900) as page:
        page.open(charts)
        page.wait(f"{PLOTS} > 1")
        page.do(ROLLOUTS)
        page.wait(f"{PLOTS} >= 6")
        page.picture("mlflow.png")


def wait(run_dir: Path, enough: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the run's facts once they are enough. Raises TimeoutError."""

    def facts() -> dict[str, Any] | None:
        with suppress(OSError):
            if enough(found := read_status(run_dir)):
                return found
        return None

    return until(facts, f"{run_dir} to come that far", DEADLINE_S)


def until(found: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
    """Return what the function returns once that is true. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.5)
    raise TimeoutError(f"waited {seconds:.0f} s for {what}")


class Page:
    """A page of a browser, by the Chrome DevTools protocol."""

    def __init__(self, address: str) -> None:
        self._socket = connect(address, max_size=2**26)
        self._count = 0

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": params}))
        while (answer := json.loads(self._socket.recv(timeout=60))).get("id") != self._count:
            pass
        return dict(answer["result"])

    def open(self, address: str) -> None:
        """Go to an address and wait until its document is complete."""
        self._ask("Page.navigate", url=address)
        self.wait("location.href != 'about:blank' && document.readyState == 'complete'")

    def do(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        asked = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return asked["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until a JavaScript expression is true, and two seconds more. Raises TimeoutError."""
        until(lambda: self.do(expression), expression)
        time.sleep(2)  # for what moves

    def picture(self, name: str) -> None:
        """Write what the window shows into the assets."""
        image = self._ask("Page.captureScreenshot", format="png")["data"]
        (ASSETS / name).write_bytes(base64.b64decode(image))


@contextmanager
def browser(width: int, height: int) -> Iterator[Page]:
    """Start a browser without a window, and end it."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("chromium is not installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        sized = [f"--window-size={width},{height}", f"--user-data-dir={profile}"]
        with running([program, *options, *sized, "--remote-debugging-port=0", "about:blank"]):
            file = Path(profile, "DevToolsActivePort")
            port = until(lambda: file.exists() and file.read_text().split("\n")[0], "the browser")
            pages = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=30))
            yield Page(next(one["webSocketDebuggerUrl"] for one in pages if one["type"] == "page"))


@contextmanager
def watch(run_dir: Path) -> Iterator[str]:
    """Serve the live page of a run; give its address."""
    words = [sys.executable, "-m", "async_grpo", "watch", str(run_dir)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@contextmanager
def mlflow(database: Path) -> Iterator[str]:
    """Serve the database of a run; give the address of the run's charts."""
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{database.resolve()}"
    client = MlflowClient(uri)
    [run] = client.search_runs([one.experiment_id for one in client.search_experiments()])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running(
        [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri, "--port", str(port)]
    ):
        site = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            with suppress(OSError):
                return bool(urllib.request.urlopen(f"{site}/health", timeout=10).read())
            return False

        until(answers, "MLflow")
        where = f"{run.info.experiment_id}/runs/{run.info.run_id}"
        yield f"{site}/#/experiments/{where}/model-metrics"


@contextmanager
def running(command: list[str]) -> Iterator[None]:
    """Run a program as long as the context lasts."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()


if __name__ == "__main__":
    main()
