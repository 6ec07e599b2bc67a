"""examples/kuberay/rayjob.yaml: its fields are documented ones, its command is one of ours, and the
run's directory lies where every pod has the shared volume.
"""

from __future__ import annotations

import copy
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from tests.support import commands
from tests.support.dockerfile import instructions
from tests.support.kuberay_fields import KINDS, Pod, RayJob, VolumeClaim
from tests.support.snippets import ROOT

MANIFEST = ROOT / "examples" / "kuberay" / "rayjob.yaml"
DOCUMENTS = list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def job() -> RayJob:
    [one] = [RayJob.model_validate(part) for part in DOCUMENTS if part["kind"] == "RayJob"]
    return one


@pytest.fixture(scope="module")
def claim() -> VolumeClaim:
    [one] = [VolumeClaim.model_validate(part) for part in DOCUMENTS if part["kind"] != "RayJob"]
    return one


@pytest.fixture
def config(job: RayJob) -> Config:
    _, _, module, name, *settings = shlex.split(job.spec.entrypoint)
    assert module == "async_grpo.run"
    return load_config(name, settings)


def pods(job: RayJob) -> list[Pod]:
    cluster = job.spec.rayClusterSpec
    return [group.template.spec for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs)]


def test_every_document_has_documented_fields_only() -> None:
    for part in DOCUMENTS:
        KINDS[part["kind"]].model_validate(part)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "runtimeEnv"), "{}"),
        (("spec", "backoffLimit"), "3"),
        (("spec", "shutdownAfterJobFinished"), True),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams"), {"num-gpus": 0}),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "minReplica"), 1),
        (("metadata", "name"), "Gsm8k"),
    ],
)
def test_a_wrong_field_is_found(path: tuple[Any, ...], value: object) -> None:
    wrong = copy.deepcopy(next(part for part in DOCUMENTS if part["kind"] == "RayJob"))
    inner = wrong
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ValidationError):
        RayJob.model_validate(wrong)


def test_its_command_is_one_of_ours(job: RayJob, tmp_path: Path) -> None:
    commands.check(job.spec.entrypoint, tmp_path)


def test_a_stopped_run_has_the_time_to_save(job: RayJob) -> None:
    given = yaml.safe_load(job.spec.runtimeEnvYAML)
    assert set(given) == {"env_vars"}
    wait = given["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]
    assert wait == "600", "environment variables are text"
    assert all(pod.terminationGracePeriodSeconds >= int(wait) for pod in pods(job))


def test_every_pod_has_the_storage_of_the_run(
    job: RayJob, claim: VolumeClaim, config: Config
) -> None:
    assert claim.spec.accessModes == ["ReadWriteMany"]
    caches = yaml.safe_load(job.spec.runtimeEnvYAML)["env_vars"]["HF_HOME"]
    for pod in pods(job):
        sources = {volume.name: volume for volume in pod.volumes}
        for container in pod.containers:
            assert {mount.name for mount in container.volumeMounts} == set(sources)
            [shared] = [
                mount.mountPath
                for mount in container.volumeMounts
                if sources[mount.name].persistentVolumeClaim
            ]
            for place in (config.run.dir, caches):
                assert Path(place).is_relative_to(shared)
            assert "/dev/shm" in {mount.mountPath for mount in container.volumeMounts}
        claimed = [one.persistentVolumeClaim for one in pod.volumes if one.persistentVolumeClaim]
        assert [one.claimName for one in claimed] == [claim.metadata.name]


def test_the_images_user_may_write_to_the_storage(job: RayJob) -> None:
    image = instructions(ROOT / "Dockerfile")
    [user] = [one.rest.partition(":")[0] for one in image if one.word == "USER"]
    for pod in pods(job):
        assert pod.securityContext and pod.securityContext.fsGroup == int(user)
        assert pod.securityContext.runAsNonRoot
    [name] = {container.image for pod in pods(job) for container in pod.containers}
    assert name.partition(":")[0].endswith("/async_grpo")


def test_a_retry_continues_the_run(job: RayJob, config: Config) -> None:
    assert job.spec.backoffLimit and job.spec.shutdownAfterJobFinishes
    assert re.search(r"run\.dir=/[\w/]+(?= )", job.spec.entrypoint), "no {time} in it"
    assert config.checkpoint.resume == "auto" and config.checkpoint.every_steps


def test_ray_is_the_one_of_the_package_and_there_are_gpus(job: RayJob, config: Config) -> None:
    pins = tomllib.loads((ROOT / "packages.toml").read_text(encoding="utf-8"))["base"]
    cluster = job.spec.rayClusterSpec
    assert f"ray[default]=={cluster.rayVersion}" in pins
    gpus = 0
    for group in cluster.workerGroupSpecs:
        assert group.minReplicas <= group.replicas <= group.maxReplicas
        for container in group.template.spec.containers:
            gpus += group.replicas * int(container.resources.limits["nvidia.com/gpu"])
            assert container.resources.limits == container.resources.requests
    assert gpus >= config.learner.ranks + config.cluster.rollout_actors.max
