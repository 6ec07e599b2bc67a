"""How often the check of the load path is wrong, over noise between engine and learner: a table of
false and missed alarms. Log-probs and movements are drawn; what an engine makes of them is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from async_grpo.config.schema import Config
from async_grpo.weights.checks import SELF_CHECK_SCALES, LoadPathCheck, SelfCheckFailed, Tolerance
from async_grpo.weights.transport import Announcement, Staged

TOKENS = 256
DRAWS = 60
Fault = Callable[[np.ndarray, np.random.Generator], np.ndarray]
FAULTS: dict[str, Fault] = {
    "nothing arrives": lambda movement, rng: 0 * movement,
    "half of the tensors arrive": lambda movement, rng: 0.5 * movement,
    "other tensors than were sent": lambda movement, rng: rng.permutation(movement),
    "one tensor of seven is stale": lambda movement, rng: (
        movement * 0.86 + rng.normal(0, 0.38 * np.abs(movement).mean(), len(movement))
    ),
}
"""What an engine makes of a movement of log-probs [L]."""


class Sides:
    """Learner and engine in one. The movement of log-probs grows with the perturbation."""

    actor_id = "a0"

    def __init__(self, noise: float, fault: Fault | None, seed: int, *, bias: float = 0.0) -> None:
        self._rng = np.random.default_rng(seed)
        self._truth = -self._rng.exponential(0.6, TOKENS)
        self._movement = -self._rng.exponential(1.0, TOKENS)
        self._noise, self._fault, self._bias, self._scale = noise, fault, bias, 0.0

    async def stage_perturbed(self, label: str, *, scale: float, sequences: Any) -> Staged:
        self._scale = scale
        announcement = Announcement(label, "shared_memory", {})
        return Staged(announcement, [self._at(scale)], [self._truth])

    def _at(self, scale: float) -> np.ndarray:
        return self._truth + 12 * scale * self._movement

    async def release(self) -> None: ...

    async def deliver(self, engines: Any, announcement: Announcement) -> None: ...

    async def score(self, sequences: Any) -> list[tuple[list[str], np.ndarray]]:
        moved = self._at(self._scale) - self._truth
        if self._fault is not None and self._scale:
            moved = self._fault(moved, self._rng)
        # rounding grows where the weights are perturbed
        sigma = 1.25 * self._noise * (1 + 2 * (self._scale > 0))
        rounding = self._rng.normal(0, sigma, TOKENS)
        return [([], self._truth + moved + rounding + self._bias)]


async def alarm(sides: Sides, *, exact: bool = False) -> str:
    """What the check objects to, or ""."""
    check = LoadPathCheck(
        Config.model_validate({"run": {"total_steps": 1}, "model": {"path": "m"}}),
        learner=sides,
        tolerance=Tolerance(exact),
        backend="shared_memory",
        deliver=sides.deliver,
    )
    try:
        await check.load_path([sides])
    except SelfCheckFailed as error:
        return str(error)
    return ""


NOISES = (0.001, 0.01, 0.03, 0.06, 0.1)


@pytest.mark.asyncio
@pytest.mark.parametrize("noise", NOISES)
async def test_noise_raises_no_alarm(noise: float) -> None:
    alarms = [await alarm(Sides(noise, None, seed)) for seed in range(DRAWS)]
    assert not any(alarms), f"{sum(map(bool, alarms))} of {DRAWS} with noise {noise}"


@pytest.mark.asyncio
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_found_whatever_the_noise(noise: float, fault: str) -> None:
    alarms = [await alarm(Sides(noise, FAULTS[fault], seed)) for seed in range(DRAWS)]
    assert all(alarms), f"{DRAWS - sum(map(bool, alarms))} of {DRAWS} missed with noise {noise}"
    assert all("after a test publication of perturbed weights" in text for text in alarms)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("noise", "bias", "says"),
    [(0.01, 0.05, "all in one direction"), (0.05, -0.1, "all in one dir"), (0.3, 0, "rounding")],
)
async def test_what_is_no_rounding_is_found_before_the_perturbation(
    noise: float, bias: float, says: str
) -> None:
    for seed in range(DRAWS):
        text = await alarm(Sides(noise, None, seed, bias=bias))
        assert says in text and "of the true weights" in text


def test_the_smallest_perturbation_moves_enough_for_common_noise() -> None:
    assert SELF_CHECK_SCALES[0] * 12 > Tolerance(False, noise=0.03).least_movement
    assert Tolerance(True).least_movement == pytest.approx(4e-4)
