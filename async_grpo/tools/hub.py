"""Models on the Hugging Face hub: what a push needs, the card of the model, and the push.

Runs in: the driver, before and after training, and the process of `export --push`, which alone asks
the hub. Hides its client. Invariant: no secret, address or absolute path of this machine is in an
error, in the card or in the settings beside it.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, constants, get_token
from huggingface_hub.utils import validate_repo_id

from async_grpo.config import yaml12
from async_grpo.config.stored import renewed
from async_grpo.errors import SetupError
from async_grpo.observe.tracking.outbox import METRICS
from async_grpo.runtime.provenance import package_versions
from async_grpo.runtime.text import one_line, without_password
from async_grpo.runtime.variables import hide, keep_secret
from async_grpo.tasks.sources import ENDINGS, quiet_hub
from async_grpo.tools.report.data import RunData, read_run

START_S, SLOWEST = 300.0, 2 * 2**20
"""Seconds that a push at the end of a run may take, and bytes per second of it besides."""
_OTHERS = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]
"""Of a push before; they would be loaded in place of this one's files."""
_MACHINES = ("dir", "tracking", "checkpoint", "watchdog", "endpoint", "cluster", "wire")
_SECRET = re.compile(r"(keys?|tokens?|secret|password|credentials?|auth\w*|ur[il]|address)$", re.I)
_FOLDERS = re.compile(r"""(?<![\w:/.<])(?:file://)?~?/(?:[^\s/:'",<>]+/)+(?=\S)""")
_GREEDY = "eval/accuracy_greedy"
_CURVE = {"rollout/score": "reward", _GREEDY: "held-out accuracy", "eval/problems": "of problems"}


def check_target(name: str) -> None:
    """Check what a push needs and is known without network. Raises SetupError."""
    try:
        validate_repo_id(name if "/" in name else f"/{name}")  # which has no owner
    except ValueError as error:
        raise SetupError(f"{name!r} is no repository of the hub, owner/name: {error}") from error
    if (token := get_token()) is None:
        raise SetupError(f"no token to push to {name}: set HF_TOKEN, or run `hf auth login`")
    if constants.is_offline_mode():
        raise SetupError(f"HF_HUB_OFFLINE forbids the push to {name}: unset it")
    keep_secret([token])


def push(folder: Path, name: str, *, private: bool, **model: Any) -> str:
    """Make the repository, unless it is there, and upload the folder with a card in one commit; its
    address. model: as `_describe` takes it. Raises SetupError.
    """
    try:
        with quiet_hub():
            url = HfApi().create_repo(name, private=private or None, exist_ok=True)
            _describe(folder, name, **model)
            HfApi().upload_folder(repo_id=name, folder_path=folder, delete_patterns=_OTHERS)
            return str(url)
    # errors of the client, of its HTTP client and of its uploader: no ancestor in common
    except Exception as error:
        inner = error if hasattr(error, "response") else error.__cause__ or error
        said = getattr(inner, "server_message", None) or one_line(inner).partition("?")[0]
        status = getattr(getattr(inner, "response", None), "status_code", 0)
        hint = " (may the token of HF_TOKEN write there?)" if status in (401, 403, 404) else ""
        said = hide(" ".join(said.split()))
        raise SetupError(f"the push to {name} failed: {said}{hint}") from error


def push_at_end(run_dir: Path, name: str) -> tuple[str, str]:
    """Push the newest checkpoint of a run that is over, by a process that says what comes of it; a
    row of the run's table.
    """
    words = ["export", str(run_dir), "--push", name, "--private"]
    try:
        size = sum(one.stat().st_size for one in run_dir.glob("checkpoints/*/hf/**/*"))
        command, limit = [sys.executable, "-m", "async_grpo", *words], START_S + size / SLOWEST
        done = subprocess.run(command, check=False, timeout=limit, stdin=subprocess.DEVNULL)
        why = "see above" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        why = one_line(error)
    again = f"{why}; to try again: async-grpo {shlex.join(words)}"
    return ("not on the hub", again) if why else ("on the hub", name)


def _describe(folder: Path, name: str, *, path: Path, manifest: dict[str, Any], load: str) -> None:
    """Write the card of a checkpoint's model, and its settings beside it. load: how to."""
    from async_grpo.tools.report.facts import settings

    config, step = renewed(manifest.get("config") or {}), manifest["step"]
    data, run_dir = RunData(path, public(config)), path.absolute().parents[1]
    if (run_dir / METRICS).exists():  # it is not apart from its run
        run = read_run(run_dir)
        data.rows, data.evaluations = (
            [row for row in rows if row.step <= step] for rows in (run.rows, run.evaluations)
        )
    tasks = config.get("tasks") or {str(data.setting("task.name")): config.get("task") or {}}
    task, sets = ", ".join(tasks), [one.get("train") for one in tasks.values()]
    given, base = (config.get("model") or {}).get("path"), data.setting("model.path")
    if (adapters := folder / "adapter_config.json").exists():
        facts = json.loads(adapters.read_text(encoding="utf-8"))
        adapters.unlink()  # it may be a link to the checkpoint
        adapters.write_text(json.dumps(facts | {"base_model_name_or_path": base}))
    evaluated = [
        EvalResult("text-generation", task, task, "accuracy", row.values[_GREEDY])
        for row in data.evaluations[-1:]
        if _GREEDY in row.values
    ]
    card = ModelCardData(
        base_model=base if _on_hub(given) else None,
        library_name="peft" if adapters.exists() else "transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "grpo", "async_grpo"],
        datasets=[re.split("[:@]", one)[0] for one in sets if _on_hub(one)] or None,
        model_name=name,
        eval_results=evaluated or None,
        **(licence := _licence(given)),
    )
    curve: dict[int, dict[str, float]] = {}
    for rows in (data.rows, data.evaluations):
        for row in rows[:: -(-len(rows) // 6) or 1] + rows[-1:]:
            curve.setdefault(row.step, {}).update(row.values)
    table = [["step", *_CURVE.values()], ["---"] * 4]
    for at, found in sorted(curve.items()):
        table.append([str(at), *(f"{round(found[k], 3):g}" if k in found else "" for k in _CURVE)])
    text = f"""# {name.partition("/")[2]}

{base or "A small model"} after {step} of {manifest.get("total_steps", step)} steps of reinforcement
learning on task {task} with async_grpo. License of the base: {
        ", ".join(licence.values()) or "not known, look it up before you use this model"
    }.

Load it with `{load}`. Use the chat template of its tokenizer, where there is one, and the
temperature of training, {data.setting("rollout.temperature")}.

{chr(10).join(f"| {' | '.join(line)} |" for line in table)}

{chr(10).join(f"- `{key}`: {value}" for key, value in settings(data))}

`training_config.yaml` has all settings but those of machines. Code: {
        " ".join(f"{key} {value}" for key, value in (manifest.get("code") or {}).items())
    }. Packages: {", ".join(f"{one} {at}" for one, at in package_versions().items())}.
"""
    ModelCard(hide(f"---\n{card}\n---\n\n{text}")).save(folder / "README.md")
    (folder / "training_config.yaml").write_text(hide(yaml12.write(data.config)), encoding="utf-8")


def public(value: Any) -> Any:
    """Return settings without what is of machines: secrets, addresses, directories."""
    if isinstance(value, dict):
        return {
            key: "***" if isinstance(one, str | list) and _SECRET.search(key) else public(one)
            for key, one in value.items()
            if key not in _MACHINES
        }
    if isinstance(value, list):
        return [public(one) for one in value]
    return _FOLDERS.sub("", without_password(value)) if isinstance(value, str) else value


def _on_hub(source: str | None) -> bool:
    name = re.split("[:@]", source or "")[0]
    here = Path(name).exists() or Path(name).suffix[1:] in ENDINGS
    return not here and re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None


def _licence(base: str | None) -> dict[str, Any]:
    """Read the licence in the card of the base, as metadata; the card says if there is none."""
    terms = ("license", "license_name", "license_link")
    try:
        there = str(base) if _on_hub(base) else Path(str(base)).expanduser() / "README.md"
        found = ModelCard.load(there).data
    except Exception:  # noqa: BLE001 - of the hub's client, of files, of their form
        return {}
    return {key: str(found.get(key)) for key in terms if found.get(key)}
