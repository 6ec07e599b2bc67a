"""Whether what a configuration names is there: models, here or on the hub, files, trackers.

Runs in: the process of `async-grpo doctor`. The checks are those of a run. Hides the hub's client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from async_grpo.config.load import preflight_files
from async_grpo.observe.tracking.kinds import check_trackers
from async_grpo.run.checkpoint.mirror import check_addresses
from async_grpo.run.command import read_config
from async_grpo.run.preflight.devices import check_device
from async_grpo.run.preflight.model import TOKENIZERS
from async_grpo.runtime.text import one_line
from async_grpo.tools.doctor.machine import Finding, disk, each, row
from async_grpo.tools.hub import check_target

HUB_S = 5.0
WEIGHTS = ("*.safetensors", "*.bin")


def services(file: str, settings: list[str]) -> Iterator[Finding]:
    """Look for what a run of this configuration reads and writes. Raises ConfigError."""
    config = read_config(file, settings)
    saved = config.checkpoint
    folders = (Path(config.run.dir), *Path(config.run.dir).parents)
    looks: dict[str, Callable[[], Iterable[Finding] | None]] = {
        "disk": partial(disk, next(filter(Path.is_dir, folders))),
        "files": partial(preflight_files, config),
        "trackers": partial(check_trackers, config),
        "devices": partial(check_device, config),
        "copies": partial(check_addresses, saved.mirror, saved.resume_address),
    }
    if saved.push is not None:
        looks["hub"] = partial(check_target, saved.push)
    named = {"model.path": config.model.path, "model.reference": config.model.reference}
    named |= {f"frozen.{name}.path": one.path for name, one in config.frozen_here.items()}
    models = {key: partial(_model, key, path) for key, path in named.items() if path is not None}
    return each(looks | models)


def _model(key: str, path: str) -> Iterator[Finding]:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HTTPError

    folder = Path(path).expanduser()
    here = folder.is_dir()
    if not here and isinstance(cached := try_to_load_from_cache(path, "config.json"), str):
        folder = Path(cached).parent
    wanted = {"weights": WEIGHTS, "tokenizer": TOKENIZERS}
    lacks = [what for what, names in wanted.items() if not any(map(list, map(folder.glob, names)))]
    fault = f"`{key}` is {path}, which has no {' and no '.join(lacks)}: fetch it again"
    if lacks and not here:
        try:
            folder, lacks = Path(HfApi().model_info(path, timeout=HUB_S).id), []
        except (HTTPError, OSError) as error:
            how = "name a directory, or see to HF_TOKEN, HF_HUB_OFFLINE and the network"
            fault = (
                f"`{key}` is {path}, not in the cache nor from the hub ({one_line(error)}): {how}"
            )
    yield row(key, str(folder), lacks, fault, warns=False)
