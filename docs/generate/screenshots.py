"""The screenshots of the pages: the panel and the report, of a run that is training now.

    async-grpo train quickstart run.dir=runs/shown &
    python docs/generate/screenshots.py runs/shown      # while it trains; needs chromium

Waits for the middle of the run to draw the panel, and for its end to show the rest.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from async_grpo.observe.console.panel import panel
from async_grpo.observe.console.status_file import condition, read_status

ASSETS = Path(__file__).resolve().parents[1] / "assets"
DEADLINE_S = 1_800.0


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
    screenshot((run_dir / "report" / "report.html").resolve().as_uri(), "report.png", 1100, 1250)


def wait(run_dir: Path, enough: Any) -> dict[str, Any]:
    """Return the run's facts once they are enough. Raises TimeoutError."""
    begin = time.monotonic()
    while time.monotonic() - begin < DEADLINE_S:
        try:
            facts = read_status(run_dir)
        except OSError:
            facts = {}
        if facts and enough(facts):
            return facts
        time.sleep(0.5)
    raise TimeoutError(f"{run_dir} did not come that far in {DEADLINE_S:.0f} s")


def screenshot(address: str, name: str, width: int, height: int) -> None:
    """Take a picture of a page, small enough for a repository."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("chromium is not installed")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--user-data-dir={profile}", f"--window-size={width},{height}",
                "--virtual-time-budget=20000", f"--screenshot={ASSETS / name}", address,
            ],
            check=True, timeout=180, capture_output=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
