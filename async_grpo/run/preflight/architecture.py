"""Whether learner and engine can compute a model, tried before anything starts.

Runs in: the driver. The learner's forward pass is chosen on a small copy, the names of its weights
are compared with those of the files, and the engine is asked in a process of its own; its answer is
kept for later starts of models of the same kind under the same versions:

    config.json -> small copy -> forward pass    (a note where it costs more than packed rows)
                -> meta tensors -> names of the files
                -> arguments of the engine -> it -> can run, or why not
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.config.schema import Config, WarmStart
from async_grpo.errors import SetupError
from async_grpo.rollout.engine.choice import ENGINE
from async_grpo.runtime.text import raised, shortened

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from async_grpo.learner.forward_choice import Choice

ENGINE_ANSWER_S = 600.0
ANSWERS = f"{WarmStart().cache_dir}/engines"
"""Where answers are kept."""
_ROWS = (
    "is computed by its own forward pass in padded sequences, so that a prompt is computed once "
    "for every response: with these lengths up to {:.2g} times the tokens"
)
_LOGITS = (
    "has attention that no kernel computes: memory grows with the square of the sequence length"
)
_SIZES = re.compile(
    r"^(_.*|dtype|torch_dtype|transformers_version|use_cache|layer_types|vocab_size|hidden_size"
    r"|intermediate_size|max_position_embeddings|max_window_layers|num_attention_heads"
    r"|num_hidden_layers|num_key_value_heads|sliding_window|.*_(token_id|range|dropout|eps))$"
)
"""Keys of a configuration that do not tell one kind of model from another."""
_PACKAGES = ("torch", "transformers")
"""Packages on whose versions the answer depends, beside the engine's."""
_SOURCES = ("run/preflight/engine_trial.py", "learner/copies.py")
"""Files of this package on which it depends, beside those of the engine's folder."""


def check_architecture(config: Config, model: str, *, learner: bool = True) -> Iterator[str]:
    """Check that learner and engine can compute `model`; lines for the user. Raises SetupError.
    learner: whether anything is trained.
    """
    _check_known(config, model)
    found = _read(config, model)
    if learner:
        _check_whole(model, found)
        from async_grpo.learner.forward_choice import check_shared, choose

        choice = choose(found, trust_remote_code=config.model.trust_remote_code)
        check_shared(choice, found, size=config.learner.sequence_parallel)
        yield from _costs(config, choice, found)
        _check_names(config, model, found)
    _check_engine(config, model, found)


def _check_known(config: Config, model: str) -> None:
    """Check that transformers knows the architecture, or may read the code that makes it. Raises
    SetupError.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    values, _ = PretrainedConfig.get_config_dict(model)
    kind, code = values.get("model_type"), values.get("auto_map", {}).get("AutoConfig")
    if kind is None or kind in CONFIG_MAPPING or (code and config.model.trust_remote_code):
        return
    if code:
        raise SetupError(
            f"`model.path` is {model}, whose config.json names custom Python code ({code}): "
            "read it, and if you trust it set `model.trust_remote_code` to true"
        )
    raise SetupError(
        f"`model.path` is {model}, of model_type {kind}, which transformers "
        f"{_version('transformers')} does not know: install one that does, or train another model"
    )


def _read(config: Config, model: str) -> PretrainedConfig:
    """Read the configuration. Raises SetupError."""
    from transformers import AutoConfig

    from async_grpo.learner.forward_choice import RAISED

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=config.model.trust_remote_code)
    except RAISED as error:
        raise SetupError(
            f"`model.path` is {model}, whose config.json transformers does not take: "
            f"{raised(error)}"
        ) from error


def _check_whole(model: str, found: PretrainedConfig) -> None:
    """Check that weights are no quantized ones. Raises SetupError."""
    how = getattr(found, "quantization_config", None)
    if how:
        method = how.get("quant_method") if isinstance(how, dict) else how
        raise SetupError(
            f"`model.path` is {model}, whose weights are quantized ({method}), and training "
            "changes whole ones: name the model from which it was made"
        )


def _costs(config: Config, choice: Choice, found: PretrainedConfig) -> Iterator[str]:
    kind = found.model_type
    if choice.unchecked:
        yield (
            f"note: {kind} could not be tried on a small copy ({choice.unchecked}); the learner "
            "compares its forward passes once it is loaded"
        )
    if choice.forward_pass.rows == "rows":
        group, prompt = config.rollout.group_size, config.rollout.prompt_length
        response = config.rollout.longest_row - prompt
        times = group * (prompt + response) / (prompt + group * response)
        yield f"note: {kind} {_ROWS.format(times)} (docs/reference/models.md)"
    if choice.needs_logits:
        yield f"note: {kind} {_LOGITS} (docs/reference/models.md)"
    if getattr(found.get_text_config(), "output_router_logits", False):
        yield (
            f"note: {kind} asks for a loss that balances its experts (output_router_logits in its "
            "config.json); it is not trained, the policy's loss alone is"
        )


def _check_names(config: Config, model: str, found: PretrainedConfig) -> None:
    """Compare the names and shapes that the learner will publish with those of the files, where
    these are here; and what the model does not support. Raises NamesDiffer, SetupError.
    """
    import torch
    from transformers.utils import cached_file

    from async_grpo.learner.backend.base import WholeModel
    from async_grpo.learner.model import PolicyModel, model_class
    from async_grpo.learner.routing import RoutingReplay
    from async_grpo.learner.weights import Published
    from async_grpo.weights.names import check_names, file_shapes

    directory = (
        Path(model) if Path(model).is_dir() else Path(cached_file(model, "config.json")).parent
    )
    with torch.device("meta"):
        trust = {"trust_remote_code": config.model.trust_remote_code}
        hf = model_class(found).from_config(found, **trust)
    if config.learner.recomputes and not hf.supports_gradient_checkpointing:
        chosen = config.learner.gradient_checkpointing == "auto"
        raise SetupError(
            f"`learner.{'activation_offload' if chosen else 'gradient_checkpointing'}` is true, "
            f"and transformers cannot do it with "
            f"{found.model_type}: set it to false"
        )
    policy = PolicyModel(hf, float32_head=False)
    if config.learner.routing_replay != "off":
        RoutingReplay(WholeModel(policy))  # refuses a model without experts
    if not any(directory.glob("*.safetensors")) and not any(directory.glob("*.bin")):
        return
    files = file_shapes(str(directory))
    published = Published(hf, files=files)
    check_names(files, published.weight_metadata(), tied=policy.tied, where=model)


def _check_engine(config: Config, model: str, found: PretrainedConfig) -> None:
    """Ask the engine, or an earlier answer. Raises SetupError."""
    device = _device(config)
    if device is None:
        return
    asked = _question(config, model, device)
    kept = _kept(asked, found)
    if kept.exists():
        answer = json.loads(kept.read_text(encoding="utf-8"))
    else:
        answer = _ask(asked)
        if answer["sure"]:
            _keep(kept, answer)
    if why := answer["refused"]:
        raise SetupError(
            f"`model.path` is {model} ({found.model_type}), which the engine cannot run: {why}. "
            "Train another model"
        )


def _keep(path: Path, answer: dict[str, Any]) -> None:
    with suppress(OSError):  # where nothing can be kept, it is asked again
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(answer), encoding="utf-8")
        draft.replace(path)


def _device(config: Config) -> str | None:
    """Return where engines will compute; None where this machine cannot tell."""
    import torch

    if torch.cuda.is_available():
        return "cpu" if config.cluster.device == "cpu" else "cuda"
    elsewhere = config.cluster.device == "cuda" or bool(os.environ.get("RAY_ADDRESS"))
    return None if elsewhere and config.cluster.device != "cpu" else "cpu"


def _question(config: Config, model: str, device: str) -> dict[str, Any]:
    """Build what the engine is asked: arguments that do not depend on the machine."""
    return {
        "arguments": ENGINE.trial_arguments(config, model=model, device=device),
        "device": device,
        "longest_row": config.rollout.longest_row,
    }


def _kept(asked: dict[str, Any], found: PretrainedConfig) -> Path:
    """Return the file with the answer for models of this kind."""
    import torch

    from async_grpo.learner.attention import heads_of
    from async_grpo.learner.copies import short_windows

    values = found.to_dict()
    kind = {key: value for key, value in values.items() if not _SIZES.match(key)}
    layers = sorted(set(values.get("layer_types") or []))
    arguments = {key: value for key, value in asked["arguments"].items() if key != "model"}
    where = [asked["device"], torch.backends.cpu.get_cpu_capability()]
    windows = short_windows(found, asked["longest_row"])
    package, engine = Path(__file__).parents[2], Path(inspect.getfile(type(ENGINE))).parent
    sources = [*(package / name for name in _SOURCES), *sorted(engine.glob("*.py"))]
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sources]
    versions = [*map(_version, (*_PACKAGES, *ENGINE.packages)), *digests]
    key = [kind, heads_of(found).size, layers, windows, arguments, where, versions]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    return Path(ANSWERS).expanduser().absolute() / f"{digest[:20]}.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _ask(asked: dict[str, Any]) -> dict[str, Any]:
    """Ask a process with the engine. Raises SetupError where it gives no answer."""
    command = [sys.executable, "-m", "async_grpo.run.preflight.engine_trial"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=ENGINE_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(
            f"{ENGINE.name} did not say within {ENGINE_ANSWER_S:g} s whether it can run the model: "
            "is this machine overloaded?"
        ) from error
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"refused"')]
    if done.returncode or not lines:
        last = shortened(" ".join(done.stderr.split())[-300:], 300)
        raise SetupError(f"{ENGINE.name} could not be asked whether it can run the model: {last}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer
