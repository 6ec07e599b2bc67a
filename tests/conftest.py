"""What several modules share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.background import Company, place


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=place)


@pytest.fixture(scope="session")
def company(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Company]:
    company = Company(request.session.items, tmp_path_factory.mktemp("beside"))
    yield company
    company.end()


@pytest.fixture(scope="module", autouse=True)
def _company_begins(request: pytest.FixtureRequest, company: Company) -> None:
    if request.node.get_closest_marker("alone") is None:
        company.begin()


@pytest.fixture(scope="module", autouse=True)
def _environment_of_its_own() -> Iterator[None]:
    """What a module leaves in the environment (ranks and ports of learners, the stacks of a run) is
    nothing for the next one.
    """
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def told_beside(request: pytest.FixtureRequest, company: Company) -> Any:
    """What the module's `story` returned (`tests.support.background`)."""
    return company.wait(request.module.__name__)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The models are so small that a second thread costs more than it does, and where others use
    the cores it spins while it waits for them.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """Begins to import at once, where a module that was collected may start children."""
    if "tests.support.forkserver" in sys.modules:
        sys.modules["tests.support.forkserver"].begin()


@pytest.fixture(scope="session")
def counted_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of `tests.support.recorded_run`."""
    from tests.support import (
        recorded_run,
    )  # here, since it imports half of the product, which most tests do without

    return recorded_run.tell(tmp_path_factory.mktemp("counted"))
