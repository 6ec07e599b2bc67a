"""examples/skypilot/train.yaml: its fields are documented ones, its commands are ours, and the
machine that takes over continues the run.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from async_grpo.config.load import load_config
from async_grpo.errors import FaultBudgetSpent
from tests.support import commands
from tests.support.snippets import ROOT

TASK = yaml.safe_load((ROOT / "examples/skypilot/train.yaml").read_text(encoding="utf-8"))


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Recovery(Fields):
    recover_on_exit_codes: list[Annotated[int, Field(ge=0, le=255)]]


class Resources(Fields):
    accelerators: Annotated[str, StringConstraints(pattern=r"^[A-Z]+\d+[\w-]*:\d+$")]
    cpus: Annotated[str, StringConstraints(pattern=r"^\d+\+?$")]
    memory: Annotated[str, StringConstraints(pattern=r"^\d+\+?$")]
    disk_size: int
    use_spot: bool
    job_recovery: Recovery


class Bucket(Fields):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")]
    mode: Literal["MOUNT", "COPY", "MOUNT_CACHED"]


class Task(Fields):
    """The documented fields of a SkyPilot task, as far as ours may use them."""

    name: str
    workdir: str
    resources: Resources
    envs: dict[str, str]
    file_mounts: dict[str, Bucket]
    setup: str
    run: str


def run_line() -> str:
    [line] = [one for one in TASK["run"].splitlines() if "async_grpo.run" in one]
    return re.sub(r"\$(\w+)", lambda name: TASK["envs"][name[1]], line)


def test_it_has_documented_fields_only() -> None:
    Task.model_validate(TASK)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("resources", "accelerator"), "H100:8"),
        (("resources", "use_spot"), "yes"),
        (("resources", "job_recovery", "recover_on_exit_codes"), 4),
        (("file_mounts", "/shared", "mode"), "CACHED"),
        (("setups",), "true"),
    ],
)
def test_a_wrong_field_is_found(path: tuple[str, ...], value: object) -> None:
    wrong: Any = copy.deepcopy(TASK)
    inner = wrong
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ValidationError):
        Task.model_validate(wrong)


def test_its_commands_are_ours(tmp_path: Path) -> None:
    [install] = [line for line in TASK["setup"].splitlines() if line.startswith("make")]
    commands.check(install, tmp_path)
    commands.check(run_line(), tmp_path)


def test_the_next_machine_continues_the_run() -> None:
    [(place, bucket)] = TASK["file_mounts"].items()
    name, *settings = run_line().split()[3:]
    config = load_config(name, settings)
    assert Path(config.run.dir).is_relative_to(place) and f"={place}/runs/{name} " in run_line()
    assert f"HF_HOME={place}/" in TASK["run"] and bucket["mode"] == "MOUNT_CACHED"
    assert config.checkpoint.resume == "auto" and config.checkpoint.every_steps
    again = TASK["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert again == [FaultBudgetSpent.exit_code]


def test_there_are_gpus_for_it() -> None:
    config = load_config(TASK["envs"]["CONFIG"])
    gpus = int(TASK["resources"]["accelerators"].partition(":")[2])
    assert gpus >= config.learner.ranks + config.cluster.rollout_actors.max
