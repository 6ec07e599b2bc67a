"""Write a model with random weights: `python -m benchmarks.gpu_check.models SHAPE DIRECTORY`.

Its tokenizer has a text for every token, so that responses of the model differ as text too, and
encodes the problems of `arithmetic`. A GPU fills the weights of a large model in seconds, and is
free again when this process ends. SHAPE: a model that `async-grpo check` knows, or `tiny`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen2Tokenizer

from async_grpo.contrib.warm_start.model import build_tokenizer
from async_grpo.tools.check.known_models import known_config

TINY = "tiny"


def shape(name: str) -> PretrainedConfig:
    """The configuration of a shape by its name."""
    if name != TINY:
        found = known_config(name)
        assert found is not None, name
        return found
    return Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )


def write(name: str, directory: Path, *, device: str) -> None:
    """Write the model and its tokenizer, in bfloat16 where it was made on a GPU."""
    config, small = shape(name), build_tokenizer()
    others = {f"<{token}>": token for token in range(len(small), config.vocab_size)}
    tokenizer = Qwen2Tokenizer(
        vocab=small.get_vocab() | others,
        merges=[],
        unk_token=small.unk_token,
        eos_token=small.eos_token,
        pad_token=small.pad_token,
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check.models")
    parser.add_argument("shape")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args(argv)
    write(options.shape, options.directory, device=options.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
