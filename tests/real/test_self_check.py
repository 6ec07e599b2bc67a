"""The load-path check with a pretrained model: every start with the right weights passes, and what
does not arrive is found, in bfloat16 and in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from async_grpo.weights.transport import TokenSequence
from tests.support.real_model import LAYERS, real_model
from tests.support.self_check import Serving, alarm, faults, kept, swapped, text_prompts, times

SEEDS = range(10)
FAULTS = faults(LAYERS) | {
    "the first layer is kept": kept("layers.0."),
    "a layer in the middle is kept": kept("layers.15."),
    "the last norm is kept": kept("model.norm"),
    "values are kept": kept("v_proj"),
    "two layers are swapped": swapped("layers.14.", "layers.15."),
    "weights are 3 % too large": times(1.03),
}
"""More than the eight: what a deep model with a tied head may lack."""
TEXTS = [
    "What is 17 + 25? Answer with the number only.",
    "What is 63 - 38? Answer with the number only.",
    "Name three animals that live in the sea.",
    "Write one sentence about the moon.",
    "Sort these numbers: 7, 3, 9.",
    "Is 91 larger than 19? Answer yes or no.",
    "What is the capital of France?",
    "How many letters has the word 'house'?",
]
KINDS = ("chat", "plain")
"""Asked without its chat template, the model ends at once."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def serving(request: pytest.FixtureRequest) -> Iterator[Serving]:
    serving = Serving(real_model(), request.param)
    for kind in KINDS:  # of the true weights, before a test changes them
        prompts = text_prompts(real_model(), TEXTS, chat=kind == "chat")
        serving.sampled[kind] = serving.sequences(prompts)
    yield serving
    serving.close()


@pytest.fixture(params=KINDS)
def sequences(request: pytest.FixtureRequest, serving: Serving) -> list[TokenSequence]:
    return serving.takes(request.param)


def test_ten_starts_and_what_does_not_arrive(
    serving: Serving, sequences: list[TokenSequence], tmp_path: Path
) -> None:
    """The table of docs/how-to/gpus.md."""
    seeds = SEEDS if serving.dtype == "bfloat16" else SEEDS[:4]
    false, missed = [], []
    for seed in seeds:
        text, found = alarm(serving, sequences, tmp_path, fault=None, noise=0.0, seed=seed)
        print(f"{serving.dtype}, seed {seed}: {text or found}", flush=True)
        false += [text] * bool(text)
    for number, (name, fault) in enumerate(FAULTS.items()):
        seed = seeds[number % len(seeds)]
        text, _ = alarm(serving, sequences, tmp_path, fault=fault, noise=0.0, seed=seed)
        print(f"{serving.dtype}, {name}: {text}", flush=True)
        missed += [name] * (not text)
    assert not false and not missed, (false, missed)
