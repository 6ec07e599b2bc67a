"""What a process has made while it started."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref

class Ring:
    def __init__(self): self.me = self
    def __del__(self): print("gone", self.name)

from async_grpo.runtime.garbage import keep_startup

early = Ring()
early.name = "before"
seen = weakref.ref(early)
del early
keep_startup()
assert seen() is None, "what was garbage is collected"
kept = Ring()
kept.name = "kept"
keep_startup()
del kept
late = Ring()
late.name = "late"
del late
gc.collect()
print("end")
"""


def test_what_has_started_is_looked_at_again_only_at_the_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split("\n")[:-1] == ["gone before", "gone late", "end", "gone kept"]
