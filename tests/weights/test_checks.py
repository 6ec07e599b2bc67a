"""How often the check of the load path is wrong, over noise between engine and learner: a table of
false and missed alarms. Log-probs and movements are drawn; what an engine makes of them is exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from async_grpo.config.schema import Config
from async_grpo.weights.checks import (
    SELF_CHECK_SCALES,
    Difference,
    LoadPathCheck,
    SelfCheckFailed,
    Tolerance,
)
from async_grpo.weights.shared_gpu import Apart
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
        gpu=Apart(),
    )
    try:
        await check.load_path([sides])
    except SelfCheckFailed as error:
        return str(error)
    return ""


NOISES = (0.001, 0.01, 0.03, 0.06, 0.1)


@pytest.mark.parametrize("noise", NOISES)
async def test_noise_raises_no_alarm(noise: float) -> None:
    alarms = [await alarm(Sides(noise, None, seed)) for seed in range(DRAWS)]
    assert not any(alarms), f"{sum(map(bool, alarms))} of {DRAWS} with noise {noise}"


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_found_whatever_the_noise(noise: float, fault: str) -> None:
    alarms = [await alarm(Sides(noise, FAULTS[fault], seed)) for seed in range(DRAWS)]
    assert all(alarms), f"{DRAWS - sum(map(bool, alarms))} of {DRAWS} missed with noise {noise}"
    assert all("after a test weight sync of perturbed weights" in text for text in alarms)


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


class Ends(Sides):
    """A model whose responses are its end, one token each: their log-probs are alike, and move
    alike (SmolLM2-135M with questions that no chat template wraps).
    """

    def __init__(self, noise: float, fault: Fault | None, seed: int) -> None:
        super().__init__(noise, fault, seed)
        self._truth = np.full(16, -0.2)
        self._movement = -1 - self._rng.normal(0, 0.05, 16)

    async def score(self, sequences: Any) -> list[tuple[list[str], np.ndarray]]:
        moved = self._at(self._scale) - self._truth
        if self._fault is not None and self._scale:
            moved = self._fault(moved, self._rng)
        return [([], self._truth + moved + self._rng.normal(0, 1.25 * self._noise, 16))]


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.07])
async def test_movements_that_are_all_alike_need_not_correlate(noise: float) -> None:
    assert [text for seed in range(DRAWS) if (text := await alarm(Ends(noise, None, seed)))] == []
    for name in ("nothing arrives", "half of the tensors arrive"):
        assert all([await alarm(Ends(noise, FAULTS[name], seed)) for seed in range(DRAWS)])


TRAINED = {
    0.0125: (0.14, 0.6),
    0.025: (0.29, 0.65),
    0.05: (0.6, 1.0),
    0.07: (0.95, 1.3),
    0.1: (1.84, 1.8),
    0.14: (3.7, 3.0),
    0.2: (19.0, 75.0),
    0.28: (21.0, 90.0),
    0.4: (22.0, 95.0),
    0.56: (22.0, 95.0),
    0.8: (22.0, 95.0),
}
"""By scale, how far log-probs of SmolLM2-135M move, and how many times as large as under its true
weights the noise is (measured in bfloat16; the wreck with prompts of a few words).
"""
SURE = {
    0.0125: (0.001, 1.0),
    0.025: (0.003, 1.2),
    0.05: (0.008, 1.5),
    0.07: (0.012, 1.5),
    0.1: (0.021, 1.5),
    0.14: (0.039, 1.6),
    0.2: (0.077, 2.5),
    0.28: (0.31, 7.8),
    0.4: (0.93, 14.0),
    0.56: (1.4, 20.0),
    0.8: (2.0, 25.0),
}
"""The same of a small model that is sure of what it samples."""


class Trained(Sides):
    """A model that has learned: it moves by leaps, and what wrecks it makes rounding large. Of a
    fault the share of the movement that does not arrive is given.
    """

    def __init__(
        self, curve: dict[float, tuple[float, float]], noise: float, missing: float, seed: int
    ) -> None:
        super().__init__(noise, None, seed)
        self._curve, self._missing = curve, missing
        self.delivered: list[float] = []
        self._unlike = self._rng.normal(0, 1.25, TOKENS)

    def _at(self, scale: float) -> np.ndarray:
        return self._truth + (self._curve[scale][0] if scale else 0.0) * self._movement

    async def score(self, sequences: Any) -> list[tuple[list[str], np.ndarray]]:
        self.delivered.append(self._scale)
        moved, larger = self._curve[self._scale] if self._scale else (0.0, 1.0)
        rounding = self._rng.normal(0, 1.25 * self._noise * larger, TOKENS)
        return [([], self._at(self._scale) + self._missing * moved * self._unlike + rounding)]


CURVES = {"SmolLM2": (TRAINED, 0.034), "sure": (SURE, 7e-4)}


@pytest.mark.parametrize("name", CURVES)
async def test_a_trained_model_raises_no_alarm_and_is_not_wrecked(name: str) -> None:
    curve, noise = CURVES[name]
    for seed in range(DRAWS // 3):
        sides = Trained(curve, noise, 0.0, seed)
        assert await alarm(sides) == ""
        assert max(sides.delivered) < 0.2 or name == "sure"
        assert len(sides.delivered) <= 5  # where a movement shows nothing, no engine is asked


@pytest.mark.parametrize("name", CURVES)
async def test_a_layer_of_thirty_that_a_trained_model_lacks_is_found(name: str) -> None:
    """One of thirty layers makes up an eighth to a fifth of the movement."""
    curve, noise = CURVES[name]
    for seed in range(DRAWS // 3):
        assert await alarm(Trained(curve, noise, 0.15, seed))


async def test_all_perturbations_are_named_with_what_to_do() -> None:
    text = await alarm(Trained(TRAINED, 0.034, 0.3, 0))
    for scale in (0.0125, 0.025):
        assert re.search(rf" {scale:g}: 0\.\d+;", text)
    for scale in (0.05, 0.07, 0.1):
        figures = r"[0-9.]+, a0 [0-9.]+ apart \(allowed 0\.1\d*, correlation 0\.9\d+\)"
        assert re.search(rf" {scale:g}: {figures}", text)
    assert "model.dtype: float32" in text and "weight_sync.self_check: false" in text


async def test_a_model_that_does_not_move_is_told_what_was_tried() -> None:
    still = dict.fromkeys(SELF_CHECK_SCALES, (0.01, 1.0))
    text = await alarm(Trained(still, 0.03, 0.0, 0))
    assert "too little to tell" in text and "0.8: 0.0" in text
    assert "set weight_sync.self_check: false" in text.lower()


@pytest.mark.parametrize(
    ("apart", "says"),
    [
        # a trained model in float32: rounding has a tail, and grows where log-probs are large
        (np.where(np.arange(512) == 7, 1.3e-4, 5e-6), ""),
        (np.where(np.arange(512) < 5, 1.3e-3, 4e-5), ""),
        (np.where(np.arange(512) == 7, 2e-4, 0.0), "differ by 0.0002 at worst, and 0.0001 is"),
        (np.where(np.arange(512) < 4, 0.01, 5e-6), "differ by 0.01 at worst"),
        (np.full(512, 1.1e-4), "differ by 0.00011 on average, and 0.0001 is allowed"),
        (np.full(512, np.nan), "differ by nan on average"),
    ],
)
def test_in_float32_the_mean_is_bounded_and_no_token_stands_out(
    apart: np.ndarray, says: str
) -> None:
    truth = -np.random.default_rng(0).exponential(2.0, 512)
    found = Tolerance(exact=True).objection(Difference.of([truth + apart], [truth]))
    assert found.startswith("log-probs ") and says in found if says else not found
