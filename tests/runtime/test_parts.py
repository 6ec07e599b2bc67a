"""Parts that the core finds by name: all are there, and a missing folder is told from a bug."""

from __future__ import annotations

import pytest

from async_grpo.errors import SetupError
from async_grpo.runtime import parts
from async_grpo.runtime.parts import PARTS, needed, part


@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_there(name: str) -> None:
    assert part(name) is not None


def test_a_folder_that_is_not_installed_is_none_or_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(parts.PARTS, "report", "async_grpo.gone.report:report_on")
    assert part("report") is None
    with pytest.raises(SetupError, match=r"`tracking.report` needs async_grpo.gone.report, which"):
        needed("report", "`tracking.report`")


def test_a_part_that_lacks_a_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts.PARTS, "report", "tests.support.lacks_a_library:x")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        part("report")
