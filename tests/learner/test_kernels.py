"""Fused kernels of layers, in Triton's interpreter: the numbers of the layers that they replace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from async_grpo.learner import kernels

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def compare(kind: str) -> tuple[list[str], float, float]:
    """Layers that a model of this kind has afterwards, and the largest differences of its logits
    and, relative to the largest of each tensor, of its gradients.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    def run(hf: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits = hf(torch.arange(3, 9)[None]).logits
        logits.sin().sum().backward()
        found = {name: parameter.grad for name, parameter in hf.named_parameters()}
        hf.zero_grad()
        return logits.detach(), found

    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES)).float()
    plain, wanted = run(hf)
    kernels.replace_layers(hf)
    used = {
        method.__func__.__module__
        for module in hf.modules()
        if hasattr(method := module.forward, "__func__")
    }
    fused, found = run(hf)
    apart = [float((found[k] - wanted[k]).abs().max() / wanted[k].abs().max()) for k in wanted]
    return sorted(used), float((fused - plain).abs().max()), max(apart)


def main() -> None:
    """Compare every family, one line of JSON each."""
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter

    whole = interpreter._implicit_cvt

    def with_floats(argument: object) -> object:
        if isinstance(argument, float):
            held = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
            return tl.tensor(held, tl.float32)
        return whole(argument)

    # what the interpreter lacks: floats as arguments, and the functions of CUDA's library
    interpreter._implicit_cvt = with_floats
    rms_norm.rsqrt = lambda x: tl.rsqrt(x)
    for kind in sorted(kernels.FAMILIES):
        print(json.dumps([kind, *compare(kind)]), flush=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_family_computes_what_its_own_layers_do() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.learner.test_kernels"],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert {kind for kind, *_ in found} == kernels.FAMILIES
    for kind, used, logits, gradients in found:
        assert any("liger" in name for name in used), kind
        assert logits < 1e-5 and gradients < 1e-4, (kind, logits, gradients)


@pytest.mark.parametrize(("device", "fused"), [("cuda", ["qwen2"]), ("cpu", [])])
def test_only_known_families_on_gpus(
    monkeypatch: pytest.MonkeyPatch, device: str, fused: list[str]
) -> None:
    models = [
        SimpleNamespace(config=SimpleNamespace(model_type=kind)) for kind in ("qwen2", "other")
    ]
    seen: list[str] = []
    monkeypatch.setattr(kernels, "replace_layers", lambda hf: seen.append(hf.config.model_type))
    kernels.fuse(models, torch.device(device))
    assert seen == fused


if __name__ == "__main__":
    main()
