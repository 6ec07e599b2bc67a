"""Every setting has an effect: a value of it can be seen from outside, and is not when the setting
is disconnected.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.registers import registers_put_back
from tests.support.wiring import Wire, keys, load, see, seen_without
from tests.wiring.table import EQUIVALENT, WIRES


@pytest.fixture(scope="module", autouse=True)
def _registers() -> Iterator[None]:
    """Other modules compare what is registered with what is built in."""
    with registers_put_back():
        yield


@pytest.mark.parametrize("wire", [pytest.param(wire, id=wire.key) for wire in WIRES])
def test_a_setting_has_an_effect(wire: Wire) -> None:
    sight = see(wire)
    assert sight.wanted != sight.without, (
        f"{wire.key} = {wire.value!r} has no effect that {wire.probe.__name__} can see"
    )
    if wire.same:
        assert sight.wanted == wire.value
    assert sight.mutant != sight.wanted, (
        f"{wire.probe.__name__} sees the same of {wire.key} = {wire.value!r} when the product "
        "reads the default: it does not look at what the product does with the setting"
    )


@pytest.mark.parametrize(
    "wire",
    [pytest.param(wire, id=name) for name, wire in {w.probe.__name__: w for w in WIRES}.items()],
)
def test_a_probe_sees_the_same_of_the_same(wire: Wire) -> None:
    assert wire.probe(load(wire.without, switched=wire.key)) == seen_without(wire)


def test_every_setting_is_wired() -> None:
    wired = [wire.key for wire in WIRES]
    lacking = sorted(set(keys()) - set(wired) - set(EQUIVALENT))
    assert not lacking, (
        f"no test fails when {', '.join(lacking)} has no effect: add a wire to a table in "
        "tests/wiring (key, a value that is not the default, a probe that sees what the product "
        "does with it)"
    )
    assert not (set(wired) | set(EQUIVALENT)) - set(keys()), "wires of keys that do not exist"
    assert not set(wired) & set(EQUIVALENT)
    assert len(EQUIVALENT) <= 10
