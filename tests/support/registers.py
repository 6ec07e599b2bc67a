"""Registers as they were before a test that enters something."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from async_grpo.algo import catalog


@contextmanager
def registers_put_back() -> Iterator[None]:
    """Forget afterwards what was registered meanwhile."""
    for one in catalog.KINDS.values():
        len(one)  # what is built in is there before it is remembered
    saved = [
        (one, {key: copy.copy(value) for key, value in vars(one).items()})
        for one in catalog.KINDS.values()
    ]
    try:
        yield
    finally:
        for one, parts in saved:
            vars(one).update(parts)
