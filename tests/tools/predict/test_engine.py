"""Engines whose responses share their speed, against a clock that goes on in small steps."""

from __future__ import annotations

import math
import random

import pytest

from async_grpo.tools.predict.engine import Response, SharedEngine, Speed

CURVE = Speed(((1, 100.0), (4, 240.0), (8, 320.0)), prompt=1000.0)


def test_speed_is_a_line_between_what_was_measured() -> None:
    assert [CURVE.total(n) for n in (0.5, 1, 2.5, 4, 6, 8, 80)] == [
        50.0, 100.0, 170.0, 240.0, 280.0, 320.0, 320.0
    ]  # fmt: skip
    assert CURVE.each(8) == 40.0 and CURVE.each(32) == 10.0
    assert {Speed.alone(7.0).each(n) for n in (1, 3, 400)} == {7.0}


def ends(engine: SharedEngine, until: float = math.inf) -> dict[object, float]:
    """Run an engine alone: when each response ends."""
    found = {}
    while (at := engine.next_end()) < until:
        engine.advance(at)
        found |= {one.key: at for one in engine.ended()}
    return found


def slowly(engine: SharedEngine, lengths: dict[str, float], *, dt: float) -> dict[str, float]:
    """The same with a clock in small steps, and without a heap."""
    waiting, running = list(lengths), {}
    found, now = {}, 0.0
    while waiting or running:
        while waiting and len(running) < engine.places:
            name = waiting.pop(0)
            running[name] = lengths[name]
        rate = engine.speed.each(len(running))
        now += dt
        for name in list(running):
            running[name] -= rate * dt
            if running[name] <= 0:
                del running[name]
                found[name] = now
    return found


@pytest.mark.parametrize("seed", range(5))
def test_responses_end_when_they_have_their_share(seed: int) -> None:
    chance = random.Random(seed)
    lengths = {f"r{index}": 5 + 60 * chance.random() for index in range(20)}
    engine = SharedEngine(CURVE, places=6)
    engine.begin([Response(name, tokens) for name, tokens in lengths.items()])
    found = ends(engine)
    assert found == pytest.approx(slowly(engine, lengths, dt=1e-4), abs=5e-3)
    assert engine.sampled == pytest.approx(sum(lengths.values()))


def test_the_last_ones_have_the_engine_to_themselves() -> None:
    engine = SharedEngine(CURVE, places=8)
    engine.begin([Response("short", 40.0) for _ in range(1)] + [Response("long", 240.0)])
    found = ends(engine)
    each = CURVE.each(2)
    assert found == pytest.approx({"short": 40 / each, "long": 40 / each + 200 / 100})


def test_prompts_and_contexts_stop_everything() -> None:
    engine = SharedEngine(CURVE, places=2)
    engine.begin([Response("a", 100.0, context=500.0)])
    assert engine.next_end() == pytest.approx(0.5 + 1.0)
    engine.advance(1.0)
    assert engine.done("a") == pytest.approx(50.0)
    engine.recompute(500.0)  # with the 50 that it has
    engine.stop(0.2)
    assert engine.next_end() == pytest.approx(1.0 + 0.55 + 0.2 + 0.5)
    engine.advance(1.5)
    assert engine.done("a") == pytest.approx(50.0)
