"""The load-path check with a real engine and a learner in bfloat16: honest weight syncs pass,
faulty ones do not, also with noise added to what the engine answers; a model that has learned and
one that is random.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_grpo.config.schema import WarmStart
from async_grpo.contrib.warm_start import model as warm_start
from async_grpo.weights.checks import Difference, Tolerance
from async_grpo.weights.transport import TokenSequence
from tests.support.models import write_model
from tests.support.self_check import (
    Fault,
    Learner,
    Serving,
    alarm,
    faults,
    kept,
    random_prompts,
    text_prompts,
)

PROMPTS, LAYERS = 16, 2
FAULTS: dict[str, Fault] = faults(LAYERS) | {"the last norm is kept": kept("model.norm")}
TABLE = faults(LAYERS)
NOISES = {"learned": (0.0, 0.002, 0.005, 0.01), "random": (0.0, 0.02, 0.05, 0.1)}
"""Added to log-probs: the surer a model is, the less rounding makes of them."""
pytestmark = pytest.mark.timeout(550)


def sums(start: int, count: int) -> list[tuple[str, str]]:
    draws = random.Random(start)
    pairs = [(draws.randrange(100), draws.randrange(10)) for _ in range(count)]
    return [(f"{one}+{other}=", str(one + other)[::-1]) for one, other in pairs]


def learned(directory: Path) -> str:
    """A model with tied embeddings that is sure of the tokens that it samples: rounding hardly
    shows under its own weights, and ten times as much where they are perturbed.
    """
    warm_start.train(
        WarmStart(tie_embeddings=True, batch_size=64, max_steps=200, blur_max_steps=0),
        seed=0,
        batch=sums,
        progress=lambda text: None,
        out=directory,
    )
    return str(directory)


@pytest.fixture(scope="module", params=["learned", pytest.param("random", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def serving(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    home = tmp_path_factory.mktemp("model")
    directory = learned(home) if kind == "learned" else write_model(home, ends=False)
    serving = Serving(directory)
    serving.directory = directory
    yield serving
    serving.close()


@pytest.fixture(scope="module")
def sequences(kind: str, serving: Serving) -> list[TokenSequence]:
    prompts = random_prompts(PROMPTS)
    if kind == "learned":
        texts = [prompt for prompt, _ in sums(10**6, PROMPTS)]
        prompts = text_prompts(serving.directory, texts, chat=False)
    return serving.sequences(prompts)


@pytest.mark.parametrize("more", [False, True])
def test_honest_weights_pass(
    kind: str, serving: Serving, sequences: list[TokenSequence], tmp_path: Path, more: bool
) -> None:
    noise = more * NOISES[kind][-1]
    text, _ = alarm(serving, sequences, tmp_path, fault=None, noise=noise, seed=0)
    assert text == ""


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(
    kind: str, serving: Serving, sequences: list[TokenSequence], tmp_path: Path, name: str
) -> None:
    noise = NOISES[kind][1]
    text, _ = alarm(serving, sequences, tmp_path, fault=FAULTS[name], noise=noise, seed=1)
    assert "the learner's log-probs moved by" in text and "correlation" in text


def test_weights_that_changed_behind_the_back_are_found(
    serving: Serving, sequences: list[TokenSequence], tmp_path: Path
) -> None:
    """What a drift probe compares, in bfloat16: an honest engine is within the tolerance, one that
    took other weights than it says is not.
    """
    serving.noise, tolerance = 0.0, Tolerance(exact=False)
    differences = []
    for scale in (0.0, 0.4):
        learner = Learner(serving, tmp_path, None, seed=3)
        try:
            [payload] = learner.sender.connect("127.0.0.1", [1])
            assert not serving.now(serving.engine.connect(payload)).failure
            staged = asyncio.run(
                learner.stage_perturbed("self-check", scale=scale, sequences=sequences)
            )
            receipt = asyncio.run(serving.receive(staged.announcement))
            assert not receipt.failure
            scored = [row for _, row in asyncio.run(serving.score(sequences))]
            differences.append(Difference.of(scored, staged.before))
        finally:
            learner.sender.close()
    honest, changed = differences
    assert tolerance.measure(honest) == "" and tolerance.objection(honest) == ""
    assert "log-probs differ by" in tolerance.objection(changed)


@pytest.mark.slow
@pytest.mark.parametrize("level", range(4))
def test_alarms_by_noise(
    kind: str, serving: Serving, sequences: list[TokenSequence], tmp_path: Path, level: int
) -> None:
    """The table of docs/how-to/gpus.md: false and missed alarms of ten draws each."""
    noise = NOISES[kind][level]
    seeds, measured, false = range(10), [], []
    for seed in seeds:
        text, found = alarm(serving, sequences, tmp_path, fault=None, noise=noise, seed=seed)
        measured.append(found["noise"])
        false += [text] * bool(text)
    missed = {
        name: sum(
            not alarm(serving, sequences, tmp_path, fault=fault, noise=noise, seed=seed)[0]
            for seed in seeds
        )
        for name, fault in TABLE.items()
    }
    mean = sum(measured) / len(measured)
    print(f"noise {noise}, {mean:.4f} measured: {len(false)} of {len(seeds)} false alarms; "
          f"missed {missed}", flush=True)  # fmt: skip
    assert not false and sum(missed.values()) == 0, false
