"""The documented fields of a RayJob (ray.io/v1) and of what Kubernetes has in it, as far as our
manifest may use them. A field that is not here is refused, as is a value of another type.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=47)]
Quantity = Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)?(m|[KMGT]i?)?$")]
Absolute = Annotated[str, StringConstraints(pattern=r"^/\S+$")]
Whole = Annotated[int, Field(ge=0)]
RESOURCES = Literal["cpu", "memory", "nvidia.com/gpu"]


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Fields):
    name: Name
    namespace: Name | None = None
    labels: dict[str, str] = {}


class Resources(Fields):
    requests: dict[RESOURCES, Quantity] = {}
    limits: dict[RESOURCES, Quantity] = {}


class Mount(Fields):
    name: Name
    mountPath: Absolute


class Variable(Fields):
    name: str
    value: str


class Container(Fields):
    name: Name
    image: str
    resources: Resources
    volumeMounts: list[Mount] = []
    env: list[Variable] = []


class Claim(Fields):
    claimName: Name


class EmptyDir(Fields):
    medium: Literal["", "Memory"] = ""
    sizeLimit: Quantity | None = None


class Volume(Fields):
    name: Name
    persistentVolumeClaim: Claim | None = None
    emptyDir: EmptyDir | None = None


class Security(Fields):
    runAsNonRoot: bool
    fsGroup: Whole


class Pod(Fields):
    containers: list[Container] = Field(min_length=1)
    volumes: list[Volume] = []
    nodeSelector: dict[str, str] = {}
    securityContext: Security | None = None
    terminationGracePeriodSeconds: Whole | None = None


class Template(Fields):
    metadata: Metadata | None = None
    spec: Pod


class HeadGroup(Fields):
    rayStartParams: dict[str, str]
    template: Template
    serviceType: str | None = None


class WorkerGroup(HeadGroup):
    groupName: str
    replicas: Whole
    minReplicas: Whole
    maxReplicas: Whole


class Cluster(Fields):
    rayVersion: str
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup] = []
    enableInTreeAutoscaling: bool = False


class JobSpec(Fields):
    entrypoint: str
    runtimeEnvYAML: str
    shutdownAfterJobFinishes: bool = False
    ttlSecondsAfterFinished: Whole = 0
    activeDeadlineSeconds: Annotated[int, Field(ge=1)] | None = None
    backoffLimit: Whole = 0
    submissionMode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode"] = "K8sJobMode"
    suspend: bool = False
    rayClusterSpec: Cluster


class RayJob(Fields):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: JobSpec


class ClaimSpec(Fields):
    accessModes: list[Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"]]
    storageClassName: Name | None = None
    resources: dict[Literal["requests"], dict[Literal["storage"], Quantity]]


class VolumeClaim(Fields):
    apiVersion: Literal["v1"]
    kind: Literal["PersistentVolumeClaim"]
    metadata: Metadata
    spec: ClaimSpec


KINDS: dict[str, type[RayJob | VolumeClaim]] = {
    "RayJob": RayJob,
    "PersistentVolumeClaim": VolumeClaim,
}
