"""A child of a pool that does what it is told, also before it is ready."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from async_grpo.runtime.lifetime import die_with_parent
from async_grpo.tasks.child import Parent

WATCH = """
import os, pathlib, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.01)
pathlib.Path(sys.argv[2]).touch()
"""
"""A program that goes on until what has started it is gone, and says so."""


def main() -> None:
    """Note this process in the log; then do what `start` says, and what messages say."""
    die_with_parent(int(sys.argv[1]))
    protocol = os.dup(1)
    parent = Parent("told")
    told = parent.receive()
    with Path(told["log"]).open("a") as log:
        log.write(f"{os.getpid()}\n")
    verb, _, argument = told["start"].partition(" ")
    if verb == "first" and not is_first(told["log"]):
        verb, argument = "ready", ""
    do(verb, argument, parent, protocol)
    while (message := parent.receive()) is not None:
        do(*message, parent, protocol)
    Path(f"{told['log']}.{os.getpid()}").touch()


def is_first(log: str) -> bool:
    """Whether no other child of the pool has asked this."""
    try:
        Path(f"{log}.first").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def do(verb: str, argument: str, parent: Parent, protocol: int) -> None:
    """Do one thing."""
    match verb:
        case "ready":
            time.sleep(float(argument or 0))
            parent.send(["ready", ["value"]])
        case "failed" | "first":
            parent.send(["failed", argument])
        case "say":
            parent.send(["said", argument])
        case "write":
            os.write(protocol, bytes.fromhex(argument))
        case "sleep":
            time.sleep(float(argument))
        case "exit":
            os._exit(int(argument))
        case "signal":
            os.kill(os.getpid(), int(argument))
        case "hang up":
            os.dup2(2, protocol)
            os.closerange(protocol + 1, 64)
            time.sleep(600)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            parent.send(["said", ""])
        case "fork":
            process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            parent.send(["said", str(process.pid)])
        case "watched":
            command = [sys.executable, "-c", WATCH, str(os.getpid()), argument]
            parent.send(["said", str(subprocess.Popen(command).pid)])
        case _:
            raise ValueError(verb)


if __name__ == "__main__":
    main()
