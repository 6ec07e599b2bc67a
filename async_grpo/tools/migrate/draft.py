"""A configuration of ours in the making: what is kept of a file, and what is left with its reason.

Runs in: a terminal. Hides nothing. Invariant: every key of the source is in `kept`, or in `left`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from async_grpo.config.docs import options, settings
from async_grpo.tools.migrate.answers import PEERS
from async_grpo.tools.migrate.rule import Peer, Settings, spoken
from async_grpo.tools.migrate.source import Source


@dataclass
class Kept:
    """A setting of ours. keys: where it comes from; note: what changes on the way."""

    value: Any
    keys: list[str] = field(default_factory=list)
    note: str = ""


@dataclass
class Draft:
    """Settings and options by dotted name, and what is not among them: key, value, reason."""

    source: Source
    peer: Peer
    kept: dict[str, Kept] = field(default_factory=dict)
    left: list[tuple[str, Any, str]] = field(default_factory=list)

    def put(self, name: str, value: Any, note: str, *, key: str = "") -> None:
        """Keep a setting; the first key that sets one counts, others are left."""
        known = self.kept.get(name)
        if known is None:
            self.kept[name] = Kept(value, [key] if key else [], note)
        elif known.value == value and key:
            known.keys.append(key)
        elif key:
            first = f"`{known.keys[0]}`" if known.keys else "another key"
            self.left.append((key, self.source.given[key], f"`{name}` is what {first} makes it"))

    def change(self, name: str, value: Any, note: str) -> None:
        """Give a setting another value, and say why."""
        known = self.kept.setdefault(name, Kept(value))
        known.value, known.note = value, f"{known.note}; {note}" if known.note else note

    def value(self, name: str) -> Any:
        """Return what a setting is: its default where it is not kept."""
        return self.kept[name].value if name in self.kept else settings()[name].default

    def leave(self, name: str, reason: str) -> None:
        """Take a setting out again, for this reason."""
        taken = self.kept.pop(name)
        for key in taken.keys or [f"({self.peer.name}'s own default of `{name}`)"]:
            value = self.source.given.get(key, taken.value)
            self.left.append((key, value, reason))

    def tree(self) -> dict[str, Any]:
        """Return the settings as nested sections, in the schema's order."""
        order = {name: place for place, name in enumerate((*settings(), *options()))}
        tree: dict[str, Any] = {}
        for name in sorted(self.kept, key=lambda name: order.get(name, len(order))):
            *sections, leaf = name.split(".")
            if name in options():  # of what is chosen, a setting that comes before it
                chosen, place = sections.pop(), sections[-1]
                parent = tree[sections[0]]
                if not isinstance(parent[place], dict):
                    parent[place] = {"name": chosen}
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[leaf] = self.kept[name].value
        return tree


def walk(source: Source, peer: Peer) -> Draft:
    """Give every key of the file its place."""
    draft = Draft(source, peer)
    for key, value in source.given.items():
        _place(draft, key, value)
    rules = [peer.rule(key) for key, value, _ in draft.left if value is not None]
    about = {rule.ours for rule in rules if rule is not None}
    draft.left += source.left
    for implied, why in peer.implied(source):
        for name, value in implied.items():
            if name not in draft.kept and name not in about:  # with a value that nothing here is
                draft.put(name, value, why)
    return draft


def _place(draft: Draft, key: str, value: Any) -> None:
    rule = draft.peer.rule(key)
    found: Settings = {}
    if key in draft.source.unresolved:
        said = "it refers to something that the file does not hold"
    elif rule is None:
        said = _known_answer(key, value)
    else:
        found, said = rule.outcome(value, draft.source)
    if not found:
        draft.left.append((key, value, said))
    for name, ours in found.items():
        draft.put(name, ours, said, key=key)


def _known_answer(key: str, value: Any) -> str:
    """Say of a key without a rule what a start of a run would say of it."""
    leaf = key.rpartition(".")[2]
    if leaf in PEERS and not spoken(key, value):
        return f"its name is that of `{PEERS[leaf]}` here; whether its meaning is too is for you"
    return spoken(key, value) or "no counterpart is known"
