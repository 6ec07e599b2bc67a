"""Small copies of models, by which they are judged before a run, and who is refused by them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig, PretrainedConfig

from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.learner.attention import Heads, heads_of
from async_grpo.learner.copies import CHUNK, EXPERTS, WINDOW, candidates, short_windows
from async_grpo.learner.forward_choice import PASSES, Choice, NoForwardPass, choose, confirm
from async_grpo.run.preflight.memory import shape_of
from tests.support.families import config_of


def test_log_probs_that_are_not_finite_are_named_so() -> None:
    nan = float("nan")
    with pytest.raises(NoForwardPass, match="own forward pass are not finite numbers, so its wei"):
        confirm(
            lambda _, rows: [np.full(len(places), nan) for _, _, places in rows],
            Choice(PASSES[0]),
            config=config_of("qwen2"),
            exact=True,
        )


def read_again(config: PretrainedConfig, directory: Path) -> PretrainedConfig:
    config.save_pretrained(directory)
    return AutoConfig.from_pretrained(directory)


def test_layers_keep_what_they_have_of_their_own(tmp_path: Path) -> None:
    """Also those behind the last layer of the copy must not be left, for it could not be read."""
    config = config_of(
        "gemma4_heads",
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        layer_types=None,
        per_layer_config={
            5: {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 100},
            11: {"head_dim": 64, "num_key_value_heads": 1},
        },
    )
    assert heads_of(config) == Heads(count=8, groups=8, size=64)
    assert short_windows(config, 50) == ["sliding_window"] == short_windows(config, 101)
    small = next(candidates(config, longest_row=50))
    again = read_again(small, tmp_path)
    layers = list(again.per_layer_config)
    assert len(layers) == 6
    assert [one.head_dim for one in layers] == [32] * 5 + [64]
    assert [one.num_key_value_heads for one in layers] == [2] * 6
    assert {one.sliding_window for one in layers} == {WINDOW}
    assert choose(config, trust_remote_code=False).unchecked == ""


def test_a_model_is_estimated_by_its_largest_heads() -> None:
    config = config_of("gemma4_heads")
    shape = shape_of(
        Config.model_validate({"run": {"total_steps": 1}, "model": {"path": "it"}}), config
    )
    assert (shape.kv_heads, shape.head_dim) == (2, 64)


@pytest.mark.parametrize(("family", "heads"), [("gemma4_heads", 4), ("qwen3_next", 0)])
def test_heads_that_ranks_can_share(family: str, heads: int) -> None:
    config = Config.model_validate({"run": {"total_steps": 1}, "model": {"path": "it"}})
    assert shape_of(config, config_of(family)).heads == heads  # 0: a recurrence beside attention


def test_heads_of_a_model_without_attention() -> None:
    assert heads_of(config_of("mamba")).count == 0


def test_numbers_under_other_names_are_lowered() -> None:
    config = config_of("falcon", num_attention_heads=16, num_kv_heads=8)
    assert heads_of(next(candidates(config))).groups == 2
    small = next(candidates(config_of("mixtral", num_local_experts=16, num_experts_per_tok=4)))
    assert (small.num_local_experts, small.num_experts_per_tok) == (EXPERTS, 2)
    small = next(candidates(config_of("mamba2", chunk_size=256)))
    assert small.chunk_size == CHUNK


def test_a_tower_that_no_text_goes_through_keeps_few_layers(tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen2_5_vl", vision_config={"depth": 32, "hidden_size": 1280})
    assert read_again(next(candidates(config)), tmp_path / "qwen").vision_config.depth == 2
    config = AutoConfig.for_model("muse_glimmer")
    tower = read_again(next(candidates(config)), tmp_path / "muse").vision_config
    assert tower.num_hidden_layers == 2 == len(tower.layer_types)
    config = config_of("gemma3_vision")
    assert next(candidates(config)).vision_config.num_hidden_layers == 1


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            "bert",
            r"bert cannot be trained: sequences that are computed together do not get the log-"
            r"probs of the model's own forward pass "
            r"\(packed: \S+ nats from it; padded: \S+ nats from it\)\."
            r" Train another model$",
        ),
        ("blip", "blip cannot be trained: transformers names no embedding, or no head, of its"),
        ("evolla", "evolla cannot be trained: it is no language model that transformers knows"),
    ],
)
def test_what_is_no_causal_language_model_is_refused_in_a_sentence(kind: str, says: str) -> None:
    values = {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 128,
    }
    config = AutoConfig.for_model(kind, **({} if kind == "evolla" else values))
    with pytest.raises(SetupError, match=says):
        choose(config, trust_remote_code=False)


def test_a_configuration_without_layers_makes_copies_all_the_same() -> None:
    config = AutoConfig.for_model("llama")
    del config.num_hidden_layers
    assert len(list(candidates(config))) == 3
