"""The systems whose files are read, and which of them a file is of.

Runs in: a terminal. Hides by which keys a system is known. Invariant: a file is of one system, or
refused in one sentence.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from async_grpo.config.docs import settings
from async_grpo.errors import SetupError
from async_grpo.tools.migrate.areal import AREAL
from async_grpo.tools.migrate.openrlhf import OPENRLHF
from async_grpo.tools.migrate.prime_rl import PRIME_RL
from async_grpo.tools.migrate.roll import ROLL
from async_grpo.tools.migrate.rule import Peer
from async_grpo.tools.migrate.source import Source, read_source
from async_grpo.tools.migrate.trl import TRL
from async_grpo.tools.migrate.verl import VERL

PEER_TABLES = {one.option: one for one in (VERL, ROLL, AREAL, TRL, OPENRLHF, PRIME_RL)}
"""Word of `--from` -> the system."""
_SIGNS = 2
"""Keys of a system that make a file one of its."""


def recognise(source: Source, option: str = "") -> Peer:
    """Return the system that a file is of; `option` names it. Raises SetupError."""
    if option:
        return PEER_TABLES[option]
    ours = {name for name in settings() if "." not in name}
    if {key.partition(".")[0] for key in source.given} <= ours:
        raise SetupError(f"{source.name} has sections of async_grpo: run it as it is.")
    marks = {name: peer.marks(source) for name, peer in PEER_TABLES.items()}
    best = max(marks.values())
    found = [name for name, count in marks.items() if count == best]
    if best >= _SIGNS and len(found) == 1:
        return PEER_TABLES[found[0]]
    known = ", ".join(peer.name for peer in PEER_TABLES.values())
    raise SetupError(
        f"{source.name} is not recognised as a configuration of {known}; say which with --from."
    )


def of_another(path: Path) -> str:
    """Say how a file of another system becomes one of ours; "" for any other file."""
    try:
        peer = recognise(read_source(path))
    except SetupError:
        return ""
    command = f"async-grpo migrate {shlex.quote(str(path))}"
    return f" (The file is of {peer.name}: {command} writes it as one of ours.)"
