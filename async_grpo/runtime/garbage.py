"""What a process has made while it started is not looked through for garbage again.

Runs in: the queue, rollout actors and learner ranks; not in the driver, whose process may be the
user's and outlive the run. Each holds many objects that imports and models have made and that live
as long as the process. Python's collector looks through all of them now and then: half a second of
standing still in a rollout actor, and a quarter of its CPU time where responses are short.
Invariant: at the end of the process they are collected, since libraries look then for what is left,
and print it.
"""

from __future__ import annotations

import atexit
import gc


def keep_startup() -> None:
    """Collect what is garbage by now; what is left is not looked at again until the end."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
