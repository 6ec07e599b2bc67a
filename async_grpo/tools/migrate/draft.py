"""A configuration of ours in the making: what is kept of a file, and what is left with its reason.

Runs in: a terminal. Hides nothing. Invariant: every key of the source is in `kept`, or in `left`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from async_grpo.config.docs import options, settings
from async_grpo.tools.migrate.names import PEERS
from async_grpo.tools.migrate.rules import Peer, Untranslatable, spoken
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
    given = {_always(peer, key) for key, value, _ in draft.left if value is not None}
    draft.left += source.left
    for name, value, why in peer.implied(source):
        if name not in draft.kept and name not in given:  # with a value that nothing here is
            draft.put(name, value, why)
    return draft


def _always(peer: Peer, key: str) -> str:
    """Return the setting that a key is always about, "" where that depends on the rest."""
    rule = peer.rule(key)
    return "" if rule is None else rule.ours


def _place(draft: Draft, key: str, value: Any) -> None:
    if key in draft.source.unresolved:
        reason = "it refers to something that the file does not hold"
        draft.left.append((key, value, reason))
        return
    rule = draft.peer.rule(key)
    if rule is None:
        draft.left.append((key, value, _known_answer(key, value)))
        return
    try:
        found = rule.convert(value, draft.source)
    except Untranslatable as reason:
        draft.left.append((key, value, str(reason)))
        return
    if not found.values:
        draft.left.append((key, value, found.note))
    for name, ours in found.values.items():
        draft.put(name, ours, found.note, key=key)


def _known_answer(key: str, value: Any) -> str:
    """Say of a key without a rule what a start of a run would say of it."""
    path = key.split(".")
    told = spoken(path, value)
    if told:
        return told
    if path[-1] in PEERS:
        return (
            f"its name is that of `{PEERS[path[-1]]}` here; whether its meaning is too is for you"
        )
    return "no counterpart is known"
