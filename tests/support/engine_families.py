"""Families of models in vLLM: what is loaded from files, and what is published later, against
transformers.

`python -m tests.support.engine_families llama mamba2 --out found.jsonl` imports vLLM once, forks a
process per family, and prints a JSON line for each: differences of log-probs in nats, or an error,
and what the trial before a run says. transformers' values are computed before the engine exists,
since vLLM changes classes of transformers in its process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from async_grpo.learner.model import model_class, without_dropout
from async_grpo.learner.weights import Published
from async_grpo.rollout.engine.vllm.arguments import set_environment
from async_grpo.rollout.engine.vllm.support import TrialEngine, in_words, refusal
from async_grpo.run.preflight.engine_trial import MOVE, own_logprobs, prepare, trial_of, verdict
from async_grpo.weights.names import file_shapes
from tests.support import unrepaired
from tests.support.families import FAMILIES, write_family

DEADLINE_S = 240.0
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
EXACT = 1e-4
"""Largest difference in nats, in float32."""
PLAIN = 2e-5
"""Largest difference of those that the page only lists."""
HALF = ("qwen3_next",)
"""Families that vLLM computes on CPU in bfloat16 only; their differences are means."""
_UNLIKE = "it computes log-probs that are"
_UNKNOWN = "are not supported for now|has no other way to handle it|is not supported anymore"
_NO_TORCHVISION = "imports torchvision, which is not installed"
REFUSED = {
    "apertus": _UNLIKE,
    "bamba": _UNKNOWN,
    "bloom": _UNLIKE,
    "codegen": _UNKNOWN,
    "cohere2_window": _UNLIKE,
    "deepseek_v2": _UNLIKE,
    "deepseek_v3": _UNLIKE,
    "diffllama": _UNKNOWN,
    "doge": _UNLIKE,
    # the router of vLLM's CPU engine leaves the correction bias out where scores are a softmax
    "ernie4_5_moe": _UNLIKE + "|or it leaves out a part that was zero before",
    "gemma3_vision": _NO_TORCHVISION,
    "gpt_neo": _UNKNOWN,
    "gpt_oss": "new weights do not arrive in it",
    "jamba": "selective_scan_fwd",
    "kimi_k25": _NO_TORCHVISION,
    "lfm2": _UNLIKE,
    "mamba": "selective_scan_fwd",
    "minimax": _UNKNOWN,
    "mpt": _UNKNOWN,
    "nemotron_h": "nats",
    "olmo_hybrid": "triton",
    "phimoe": "too many values to unpack",
    "qianfan_ocr": _NO_TORCHVISION,
    "qwen2_5_vl": _NO_TORCHVISION,
    "qwen2_window": "Sliding window for some but all layers is not supported",
    "qwen3_5": _NO_TORCHVISION,
    "qwen3_vl": _NO_TORCHVISION,
    "recurrent_gemma": _UNKNOWN,
    "xglm": _UNKNOWN,
}
"""Families that this vLLM does not compute on CPU, and what the trial says of them."""
BORDERLINE = ("nemotron_h",)
"""Of these, families whose engine is between half and twice the bound from transformers, so that
weights decide.
"""
ARGUMENTS = {
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "trust_remote_code": False,
    "enable_chunked_prefill": False,
    "block_size": 32,
}
"""Those of a run on CPU that have to do with what is computed."""


def measure(name: str, directory: Path) -> dict[str, Any]:
    """Differences of one family, and what the trial of its copies says."""
    write_family(name, directory)
    config = AutoConfig.from_pretrained(directory)
    dtype = "bfloat16" if name in HALF else "float32"
    arguments = ARGUMENTS | {"model": str(directory), "dtype": dtype}
    with tempfile.TemporaryDirectory() as copies:
        trials = prepare(config, copies, longest_row=512, trust_remote_code=False)
        found: dict[str, Any] = {}
        try:
            found |= differences(name, str(directory), arguments)
        except Exception as error:  # noqa: BLE001 - what the engine raises is what is asked for
            found["error"] = f"{type(error).__name__}: {in_words(error)}"
        why = refusal(arguments, device="cpu")
        found["trial"] = why or verdict(trials, arguments)["refused"]
    return found


def differences(name: str, directory: str, arguments: dict[str, Any]) -> dict[str, float]:
    """Differences in nats: at the first load, after a publication; for experts also after a
    publication that leaves them out, and without the repair of the reload.
    """
    hf = load_own(directory)
    trial = trial_of(hf, directory)
    published = Published(hf, files=file_shapes(directory))
    with published.perturbed(scale=MOVE, seed=8):
        later = {key: tensor.clone() for key, tensor in published.named_weights()}
    experts = {key for key in later if ".experts." in key or "block_sparse_moe" in key}
    others = {key: value for key, value in later.items() if key not in experts}
    if experts:
        partly = own_logprobs(_with(hf, trial.published | others))
    engine = TrialEngine(arguments, directory=directory, dtype=arguments["dtype"])

    def apart(wanted: np.ndarray) -> float:
        found = np.abs(engine.logprobs(trial.rows) - wanted)
        return float(found.mean() if name in HALF else found.max())

    found = {"first": apart(trial.expected), "moved": apart(trial.moved)}
    engine.publish(trial.published)
    found["published"] = apart(trial.moved)
    if experts:
        engine.publish(others)
        found["experts left out"] = apart(partly)
        with unrepaired.in_process(engine.model):
            engine.publish(trial.published)
        found["without repair"] = apart(trial.moved)
    return found


def load_own(directory: str) -> Any:
    """The model in transformers, with its plain attention where that works."""
    auto = model_class(AutoConfig.from_pretrained(directory))
    try:
        hf = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        own_logprobs(hf)
    except (ValueError, TypeError, RuntimeError):
        hf = auto.from_pretrained(directory, dtype=torch.float32)
    without_dropout(hf.eval())
    return hf


def _with(hf: Any, tensors: dict[str, Tensor]) -> Any:
    """A fresh model with these tensors of files."""
    directory = tempfile.mkdtemp()
    whole = {key: value.contiguous() for key, value in tensors.items()}
    save_file(whole, f"{directory}/model.safetensors", metadata={"format": "pt"})
    hf.config.save_pretrained(directory)
    return load_own(directory)


def in_child(name: str) -> dict[str, Any]:
    """Measure a family in a forked process, within the deadline."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        torch.set_num_threads(1)
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            try:
                found = measure(name, Path(directory))
            except Exception as error:  # noqa: BLE001 - it ends this family, not the others
                found = {"failed": f"{type(error).__name__}: {in_words(error)}"}
        found["seconds"] = round(time.monotonic() - started, 1)
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end and not os.waitpid(child, os.WNOHANG)[0]:
        time.sleep(0.2)
    if time.monotonic() >= end:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    text = os.read(reader, 1 << 16)
    os.close(reader)
    return {"family": name} | (json.loads(text) if text else {"failed": "the process died"})


def table(lines: list[dict[str, Any]]) -> list[str]:
    """The list and the table of docs/reference/models.md."""
    plain, written = [], ["| family | learner | first load | weight sync | engine on CPU |"]
    written.append("|---|---|---|---|---|")
    for line in sorted(lines, key=lambda line: str(line["family"])):
        family = FAMILIES[line["family"]]
        exact = max(line.get(key, 1.0) for key in ("first", "published")) <= PLAIN
        if exact and not line["trial"] and family.rows == "packed":
            plain.append(f"`{line['family']}`")
            continue
        head = ", own head" if family.head == "own" else ""
        first, published = (
            f"{line[key]:.1g}" if key in line else "" for key in ("first", "published")
        )
        said = line["trial"].replace("|", "/") or "computes it"
        half = " (bfloat16, means)" if line["family"] in HALF else ""
        written.append(
            f"| `{line['family']}` | {family.rows}{head} | {first} | {published} | {said}{half} |"
        )
    said = (
        f"{len(plain)} families have packed rows in the learner, and the engine is within "
        f"{PLAIN:.0e} nats before and after a weight sync: {', '.join(plain)}."
    ).replace("e-0", "e-")
    return [*textwrap.wrap(said, 120), "", "The others:", "", *written]


def write_table(path: Path, lines: list[dict[str, Any]]) -> None:
    """Replace what stands between the markers."""
    before, rest = path.read_text().split(BEGIN)
    path.write_text("\n".join([before + BEGIN, *table(lines), END + rest.split(END)[1]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", type=Path, help="docs/reference/models.md")
    arguments = parser.parse_args()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    set_environment("cpu")
    import vllm.v1.worker.cpu_worker  # noqa: F401 - once, for all children

    found = []
    for name in arguments.names or FAMILIES:
        found.append(in_child(name))
        line = json.dumps(found[-1])
        print(line, flush=True)
        if arguments.out:
            with open(arguments.out, "a") as file:
                file.write(line + "\n")
    if arguments.docs:
        write_table(arguments.docs, found)


if __name__ == "__main__":
    main()
