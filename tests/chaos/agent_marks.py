"""Programs of chaos runs, found from outside: by their command, and by the run's directory for
temporary files, which they have from it.
"""

from __future__ import annotations

from pathlib import Path

AGENT = Path(__file__).with_name("agent.py")
LEFT_S = "7717"
"""How long what a program leaves would live."""


def programs(temporary: Path, *, left: bool = True) -> list[int]:
    """Living processes of programs of a run. left: those, too, that programs have left."""
    own, found = f"TMPDIR={temporary}".encode(), []
    commands = [str(AGENT).encode(), *([LEFT_S.encode()] if left else [])]
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or own not in (entry / "environ").read_bytes():
                continue
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if any(command in words for command in commands):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended while we looked, or is not ours
    return found
