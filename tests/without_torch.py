"""The tests on a Python without torch: `-p tests.without_torch` skips what needs torch, or a
package made on it; everything else must pass. `python -m tests.without_torch` imports every module
that needs none.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

import async_grpo

MISSING = ("torch", "vllm", "deepspeed", "peft")
NEEDING = ("rollout/test_early_process.py",)
"""Modules of tests that need one of them in processes of their own."""
_WORDS = tuple(f"No module named '{name}" for name in MISSING)


def _skip(report: pytest.CollectReport | pytest.TestReport, path: object) -> None:
    if report.failed and any(word in str(report.longrepr) for word in _WORDS):
        report.outcome = "skipped"
        report.longrepr = (str(path), 0, "Skipped: it needs torch")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave the modules of `NEEDING` out."""
    return True if collection_path.as_posix().endswith(NEEDING) else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _skip(report, getattr(collector, "path", ""))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _skip(report, item.path)
    return report


def main() -> int:
    """Import every module; 1 if one fails for another reason than a package that is missing."""
    names = [found.name for found in pkgutil.walk_packages(async_grpo.__path__, "async_grpo.")]
    needing, failed = [], []
    for name in names:
        if name.endswith("__main__"):
            continue  # it would run
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            (needing if (error.name or "").split(".")[0] in MISSING else failed).append(name)
    print(
        f"Python {sys.version.split()[0]}: of {len(names)} modules, {len(needing)} need torch"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
