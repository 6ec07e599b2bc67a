"""Families of models in vLLM: what is loaded from files, and what is published later, against
transformers.

`python -m tests.support.engine_families llama mamba2 --out found.jsonl` imports vLLM once, forks a
process per family, and prints a JSON line for each: differences of log-probs in nats, or an error.
transformers' values are computed before the engine exists, since vLLM changes classes of
transformers in its process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_MLA_DISABLE="1",
    OMP_NUM_THREADS="1",
)

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from vllm import LLM, SamplingParams, TokensPrompt

from async_grpo.learner.model import model_class
from async_grpo.learner.weights import Published
from async_grpo.weights import worker
from async_grpo.weights.names import file_shapes
from tests.support.families import FAMILIES, write_family

LENGTHS = (13, 14, 6, 12, 9)
"""Tokens of the rows that are scored: longer than the windows of the families."""
DEADLINE_S = 240.0
SCALE = 0.1
"""Size of the perturbation, as a share of every tensor's root mean square."""


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in LENGTHS]


@torch.no_grad()
def own_logprobs(hf: nn.Module) -> Tensor:
    """Log-probs of all tokens but the first of every row, by transformers."""
    found = []
    for row in rows():
        ids = torch.tensor([row])
        logprobs = hf(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        found.append(logprobs[:-1].gather(-1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)


def engine_logprobs(llm: LLM) -> Tensor:
    """The same by the engine."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    prompts = [TokensPrompt(prompt_token_ids=row) for row in rows()]
    return torch.tensor(
        [
            found[token].logprob
            for output, row in zip(
                llm.generate(prompts, params, use_tqdm=False), rows(), strict=True
            )
            for found, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)
        ]
    )


def load_own(directory: str) -> nn.Module:
    """The model in transformers, with its plain attention where that works."""
    auto = model_class(AutoConfig.from_pretrained(directory))
    try:
        hf = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        own_logprobs(hf)
    except (ValueError, TypeError, RuntimeError):
        hf = auto.from_pretrained(directory, dtype=torch.float32)
    return hf.eval()


def publish(llm: LLM, tensors: dict[str, Tensor]) -> None:
    """Load tensors as a worker of a run loads a publication."""

    def load(model: nn.Module) -> None:
        reload = worker._Reload()
        reload.model, reload.device = model, torch.device("cpu")
        reload.model_config = llm.llm_engine.model_config
        reload.vllm_config = SimpleNamespace(model_config=llm.llm_engine.model_config)
        reload.start_weight_update()
        reload._load([(name, tensor.clone()) for name, tensor in tensors.items()])
        reload.finish_weight_update()

    llm.apply_model(load)


def measure(name: str, directory: Path) -> dict[str, Any]:
    """Differences of one family: at its first load, after a publication; for experts also without
    the repair, and after a publication that leaves them out.
    """
    found: dict[str, Any] = {}
    write_family(name, directory)
    hf = load_own(str(directory))
    base = own_logprobs(hf)
    published = Published(hf, keeps=True, files=file_shapes(str(directory)))
    with published.perturbed(scale=SCALE, seed=7):
        wanted = own_logprobs(hf)
        tensors = {key: tensor.clone() for key, tensor in published.named()}
    found["moved"] = apart(wanted, base)
    with published.perturbed(scale=SCALE, seed=8):
        later = {key: tensor.clone() for key, tensor in published.named()}
    experts = {key for key in tensors if ".experts." in key or "block_sparse_moe" in key}
    moe = bool(experts) and name not in NOT_MIXED
    if moe:
        mixed = tensors | {key: value for key, value in later.items() if key not in experts}
        partly = own_logprobs(_with(hf, published, mixed))
    llm = LLM(
        model=str(directory),
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=8,
        disable_log_stats=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    found["first"] = apart(engine_logprobs(llm), base)
    publish(llm, tensors)
    found["published"] = apart(engine_logprobs(llm), wanted)
    if moe:
        without = {key: value for key, value in later.items() if key not in experts}
        publish(llm, without)
        found["experts left out"] = apart(engine_logprobs(llm), partly)
        llm.apply_model(_unrepaired)
        kept, worker.pack_reloaded_experts = worker.pack_reloaded_experts, lambda model: None
        publish(llm, tensors)
        worker.pack_reloaded_experts = kept
        found["without repair"] = apart(engine_logprobs(llm), wanted)
    return found


NOT_MIXED = ("jamba",)
"""Families that may have experts and have none here."""


def _with(hf: nn.Module, published: Published, tensors: dict[str, Tensor]) -> nn.Module:
    """A fresh model with these tensors of files."""
    directory = tempfile.mkdtemp()
    from safetensors.torch import save_file

    save_file(
        {key: value.contiguous() for key, value in tensors.items()},
        f"{directory}/model.safetensors",
        metadata={"format": "pt"},
    )
    hf.config.save_pretrained(directory)
    return load_own(directory)


def _unrepaired(model: nn.Module) -> None:
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None:
            vars(method).pop("process_weights_after_loading", None)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def in_child(name: str, out: Callable[[dict[str, Any]], None]) -> None:
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
            except Exception as error:  # noqa: BLE001 - what the engine raises is what is asked for
                found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
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
    out({"family": name} | (json.loads(text) if text else {"error": "the process died"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    def out(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if arguments.out:
            with open(arguments.out, "a") as file:
                file.write(json.dumps(line) + "\n")

    for name in arguments.names or FAMILIES:
        in_child(name, out)


if __name__ == "__main__":
    main()
