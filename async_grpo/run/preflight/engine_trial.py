"""An engine tried on a small copy of a model: what it loads, and what is published to it later.

Runs in: a process of its own, `python -m async_grpo.run.preflight.engine_trial`, which reads what
to try as JSON and answers in JSON. On a GPU the engine is only asked whether it takes the model:
the GPUs may be elsewhere, and a run's self-check compares the same before its first step. On CPU:

    small copy (random weights) -> log-probs by transformers, before the engine changes its classes
                                -> files -> engine -> the same log-probs?
    other weights, published    ->          engine -> the same log-probs?
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from async_grpo.learner import copies
from async_grpo.learner.forward_choice import ALONE, RAISED
from async_grpo.learner.model import model_class, without_dropout
from async_grpo.learner.weights import Published
from async_grpo.rollout.engine.choice import ENGINE
from async_grpo.runtime.text import raised
from async_grpo.weights.names import file_shapes

BOUND = 1e-4
"""Largest difference of log-probs in float32, in nats: that of a run's self-check."""
HALF_BOUND = 0.05
"""Largest mean difference in half precision, where an engine computes a model only in that; new
weights move log-probs by more.
"""
MOVE = 0.1
"""Size of the published change, as a share of each tensor's root mean square."""
_LENGTHS = (13, 14, 6, 12, 39)
_PROCESSORS = {".jinja", ".json", ".model", ".py", ".txt"}


@dataclass
class Trial:
    """A copy in files, rows, their log-probs, and others that are published later."""

    directory: str
    rows: list[list[int]]
    expected: np.ndarray
    published: dict[str, Tensor]
    moved: np.ndarray


def prepare(
    config: PretrainedConfig, directory: str, *, longest_row: int | None, trust_remote_code: bool
) -> list[Trial]:
    """Write copies, the smallest first, into folders of `directory`; none where there is none.
    longest_row: see `copies.candidates`.
    """
    auto, made = model_class(config), []
    for number, small in enumerate(list(copies.candidates(config, longest_row=longest_row))[:-1]):
        for alone in ALONE:
            try:
                hf = copies.build(
                    small,
                    auto,
                    attn_implementation=alone.attention,
                    trust_remote_code=trust_remote_code,
                )
                hf.save_pretrained(f"{directory}/{number}")
                made.append(trial_of(hf, f"{directory}/{number}"))
            except RAISED:
                continue  # the learner's own trial says why
            break
    return made


def trial_of(hf: PreTrainedModel, directory: str) -> Trial:
    """Make a trial of a model and its files. Raises ArithmeticError where it computes nothing."""
    without_dropout(hf.eval())
    expected = own_logprobs(hf)
    if not np.isfinite(expected).all():
        raise ArithmeticError("log-probs are no numbers")
    published = Published(hf, files=file_shapes(directory))
    with published.perturbed(scale=MOVE, seed=7):
        tensors = {name: tensor.clone() for name, tensor in published.named_weights()}
        return Trial(directory, rows(hf.config), expected, tensors, own_logprobs(hf))


def rows(config: PretrainedConfig) -> list[list[int]]:
    """Make the rows that are scored, longer than windows and chunks of copies."""
    random = np.random.default_rng(5)
    ids, longest = copies.limits(config)
    lengths = [length for length in _LENGTHS if length <= longest]
    return [random.integers(ids.start, ids.stop, length).tolist() for length in lengths]


@torch.no_grad()
def own_logprobs(hf: PreTrainedModel) -> np.ndarray:
    """Log-probs of all tokens but the first of every row, by transformers, one row at a time."""
    found = []
    for row in rows(hf.config):
        ids = torch.tensor([row])
        logprobs = hf(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        found.append(logprobs[:-1].gather(-1, ids[0, 1:, None])[:, 0].numpy())
    return np.concatenate(found)


def attempt(trial: Trial, arguments: dict[str, Any], dtype: str) -> str:
    """Return what an engine does wrong with a copy, or ""."""
    engine = ENGINE.tried(arguments, directory=trial.directory, dtype=dtype)
    apart = np.abs(engine.logprobs(trial.rows) - trial.expected)
    if not _small(apart, dtype):
        return f"it computes log-probs that are {apart.max():.2g} nats from those of transformers"
    engine.publish(trial.published)
    apart = np.abs(engine.logprobs(trial.rows) - trial.moved)
    if not _small(apart, dtype):
        return (
            "new weights do not arrive in it, or it leaves out a part that was zero before: log-"
            f"probs are {apart.max():.2g} nats off afterwards"
        )
    return ""


def _small(apart: np.ndarray, dtype: str) -> bool:
    return bool(apart.max() <= BOUND if dtype == "float32" else apart.mean() <= HALF_BOUND)


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Return `refused`: why an engine cannot run the model that was asked for, or ""; and `sure`:
    whether that was found by comparing.
    """
    arguments, device = asked["arguments"], asked["device"]
    trust = arguments["trust_remote_code"]
    with tempfile.TemporaryDirectory() as directory:
        trials = []
        if device == "cpu":
            config = AutoConfig.from_pretrained(arguments["model"], trust_remote_code=trust)
            longest = asked["longest_row"]
            trials = prepare(config, directory, longest_row=longest, trust_remote_code=trust)
            for trial in trials:
                copy_processors(arguments["model"], Path(trial.directory))
        why = ENGINE.refusal(arguments, device=device)
        if why or not trials:
            return {"refused": why, "sure": True}
        return verdict(trials, arguments)


def copy_processors(model: str, target: Path) -> None:
    """Copy what a model has beside weights and configuration: tokenizers, and descriptions and code
    of what prepares its inputs, without which engines of models that also see do not start.
    """
    local = Path(model)
    source = local if local.is_dir() else Path(cached_file(model, "config.json")).parent
    for path in source.iterdir():
        other = path.suffix in _PROCESSORS and not path.name.endswith(".index.json")
        if other and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)


def verdict(trials: list[Trial], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the answer for the first copy that an engine computes, in float32 where it does; else
    for the last, the one that is most like the model.
    """
    found = {"refused": "", "sure": False}
    for trial, dtype in product(trials, dict.fromkeys(("float32", arguments["dtype"]))):
        try:
            found = {"refused": attempt(trial, arguments, dtype), "sure": True}
        # whatever engines raise: a run would end with it
        except Exception as error:  # noqa: BLE001
            found = {"refused": raised(error, ENGINE.in_words(error)), "sure": False}
        if not found["refused"]:
            break
    return found


def main() -> None:
    """Answer on descriptor 1, in a line of its own."""
    asked = json.load(sys.stdin)
    ENGINE.set_environment(asked["device"])
    print(json.dumps(answer(asked)), flush=True)


if __name__ == "__main__":
    main()
