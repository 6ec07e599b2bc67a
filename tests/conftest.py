"""What several modules share."""

from __future__ import annotations

import sys
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The models are so small that a second thread costs more than it does, and where others use the cores it spins while it waits for them."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Begins to import at once, where a module that was collected may start children."""
    if "tests.children" in sys.modules:
        sys.modules["tests.children"].begin()


@pytest.fixture(scope="session")
def counted_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of `tests.counted_run`."""
    from tests import counted_run  # here, since it imports half of the product, which most tests do without

    return counted_run.tell(tmp_path_factory.mktemp("counted"))
