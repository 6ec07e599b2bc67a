"""Every architecture trains as transformers computes it, under the names of its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from async_grpo.learner.forward_choice import choose, rows
from async_grpo.learner.model import load_model, model_class
from async_grpo.learner.packing import PackedRow, pack
from async_grpo.learner.weights import Published
from async_grpo.weights.names import check_names, file_shapes
from tests.support.families import FAMILIES, config_of, write_family

LOGPROBS, GRADIENTS = 2e-5, 2e-4
"""Largest differences that are rounding: in nats, and as a share of the largest gradient."""
KINDS = {
    "bloom",
    "deepseek_v3",
    "falcon_h1",
    "gemma2",
    "gemma3_vision",
    "glm4_moe",
    "gpt2",
    "gpt_oss",
    "llama_tied",
    "mamba2",
    "mistral_window",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
}
"""One family of each kind of layer; the others are slow."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in KINDS else pytest.mark.slow)
        for name in sorted(FAMILIES)
    ],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    directory = tmp_path_factory.mktemp(request.param)
    write_family(request.param, directory)
    return request.param, str(directory)


def weight(row: PackedRow, seed: int) -> Tensor:
    """Weigh every token otherwise, so that no gradient cancels."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=len(row[2]))).float()


def own_logprobs(directory: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs of the rows by transformers alone, and gradients of their weighted sum."""
    config = choose_config(directory)
    try:
        model = model_class(config).from_pretrained(directory, attn_implementation="eager")
        model(input_ids=torch.ones(1, 2, dtype=torch.long))
    except (ValueError, TypeError):  # transformers' own eager attention fails for this one
        model = model_class(config).from_pretrained(directory, attn_implementation="sdpa")
    model.eval()
    values, total = [], torch.zeros(())
    for number, row in enumerate(rows(config)):
        prompt, response, _ = row
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        picked = logits.float().log_softmax(-1).gather(-1, torch.from_numpy(response)[:, None])
        values.append(picked[:, 0].detach())
        total = total + (picked[:, 0] * weight(row, number)).sum()
    total.backward()
    return values, gradients(model)


def choose_config(directory: str):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(directory)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def test_log_probs_and_gradients_are_those_of_the_models_own_forward_pass(family: tuple) -> None:
    name, directory = family
    choice = choose(directory, trust_remote_code=False)
    expected = FAMILIES[name]
    chosen = choice.forward_pass
    assert (chosen.rows, chosen.head, choice.unchecked) == (expected.rows, expected.head, "")
    values, wanted = own_logprobs(directory)
    policy = load_model(
        directory,
        dtype=torch.float32,
        gradient_checkpointing=True,
        trust_remote_code=False,
        float32_head=False,
        forward_pass=chosen,
    ).train()
    tried = rows(policy.hf.config)
    packed = pack(tried, torch.device("cpu"))
    logprobs, _ = policy(packed, 1.0, False)
    apart = (logprobs - torch.cat([values[index] for index in packed.order])).abs().max()
    assert apart < LOGPROBS
    weights = [weight(tried[index], index) for index in packed.order]
    (logprobs * torch.cat(weights)).sum().backward()
    found = gradients(policy.hf)
    assert set(found) <= set(wanted) and all(
        wanted[key].abs().max() == 0 for key in set(wanted) - set(found)
    )
    largest = max(float(one.abs().max()) for one in wanted.values())
    worst = {key: float((found[key] - wanted[key]).abs().max()) / largest for key in found}
    assert max(worst.values()) < GRADIENTS, max(worst, key=worst.get)


def test_weights_are_published_with_the_names_and_bytes_of_the_files(family: tuple) -> None:
    _, directory = family
    hf = model_class(choose_config(directory)).from_pretrained(directory)
    published = Published(hf, files=file_shapes(directory))
    files: dict[str, Tensor] = {}
    for path in Path(directory).glob("*.safetensors"):
        files |= load_file(path)
    tied = hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
    check_names(file_shapes(directory), published.weight_metadata(), tied=tied, where=directory)
    named = list(published.named_weights())
    assert [(name, tuple(one.shape)) for name, one in named] == [
        (name, shape) for name, shape, _ in published.weight_metadata()
    ]
    assert all(torch.equal(one, files[name]) for name, one in named)
    with published.perturbed(scale=0.1, seed=3):
        now = published.named_weights()
        moved = {name for name, one in now if not torch.equal(one, files[name])}
        assert moved == {name for name, one in named if one.is_floating_point()}
    assert all(torch.equal(one, files[name]) for name, one in published.named_weights())


def test_names_are_known_before_a_weight_is_read(family: tuple) -> None:
    _, directory = family
    config, files = choose_config(directory), file_shapes(directory)
    with torch.device("meta"):
        hf = model_class(config).from_config(config)
    read = model_class(config).from_pretrained(directory)
    metadata = [
        [(name, shape) for name, shape, _ in Published(one, files=files).weight_metadata()]
        for one in (hf, read)
    ]
    assert metadata[0] == metadata[1]


def test_files_without_the_decoders_prefix_are_published_as_they_are(tmp_path: Path) -> None:
    write_family("gpt2", tmp_path)
    [path] = tmp_path.glob("*.safetensors")
    old = {name.removeprefix("transformer."): one for name, one in load_file(path).items()}
    assert "h.0.ln_1.weight" in old
    save_file(old, path, metadata={"format": "pt"})
    hf = model_class(choose_config(str(tmp_path))).from_pretrained(tmp_path)
    published = dict(Published(hf, files=file_shapes(str(tmp_path))).named_weights())
    assert published.keys() <= old.keys()
    assert all(torch.equal(one, old[name]) for name, one in published.items())


def test_a_bias_that_is_zero_is_moved_by_a_test_publication_too() -> None:
    config = config_of("qwen2")
    hf = model_class(config).from_config(config)
    zeros = {name for name, one in hf.named_parameters() if name.endswith("bias")}
    assert zeros and all(not hf.get_parameter(name).any() for name in zeros)
    published = Published(hf)
    with published.perturbed(scale=0.1, seed=3):
        assert all(hf.get_parameter(name).any() for name in zeros)
    assert all(not hf.get_parameter(name).any() for name in zeros)


@pytest.mark.parametrize(("words", "positions"), [(14, 512), (128, 12), (5, 8)])
def test_rows_that_are_tried_are_such_that_the_model_has(words: int, positions: int) -> None:
    small = config_of("llama", vocab_size=words, max_position_embeddings=positions)
    made = rows(small)
    assert made and max(len(row[0]) + len(row[1]) for row in made) <= positions
    assert max(int(ids.max()) for row in made for ids in row[:2]) < words
    choice = choose(small, trust_remote_code=False)
    assert choice.forward_pass.rows == "packed" and not choice.unchecked
