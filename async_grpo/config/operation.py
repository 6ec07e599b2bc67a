"""The settings of how a run is operated: evaluation, checkpoints, tracking, watchdog and cluster.

Runs in: any process. A part of `schema`, and as such a home of defaults.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from async_grpo.config.section import FREE, NonNegative, Positive, Seconds, Section, warn

Layout = Literal["verl", "trl", "roll"]
"""Systems whose rows are read as they are."""


class EvaluationTask(Section):
    """Name another task for evaluations."""

    name: str = "arithmetic"
    """Built-in task or a dotted path `package.module:Class`."""
    eval: str | None = None
    """Held-out data, same forms as `task.eval`."""
    layout: Layout | None = None
    """As `task.layout`."""
    columns: dict[str, str] = Field({})
    """As `task.columns`."""
    options: dict[str, Any] = Field({})
    """The task's own settings, checked by the task."""


class Evaluation(Section):
    """Set when and how held-out problems are answered."""

    on_resume = FREE
    every_steps: NonNegative = 0
    """Learner steps between evaluations, which run during training; 0 means only before and
    after. One that is due while another is under way is left out.
    """
    before: bool = True
    """Evaluate before the first step (the 'before' of the summary)."""
    task: Annotated[
        EvaluationTask | None,
        warn("what held-out accuracy means: it cannot be compared with that before"),
    ] = None
    """Evaluate on the held-out problems of another task; null: of the task that is trained."""
    max_samples: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """Held-out problems per evaluation."""
    n: NonNegative = 1
    """Sampled responses per problem besides the greedy one, for pass@1, 2, 4, ... n; 0: none."""
    temperature: Annotated[float, Field(gt=0, le=2)] | None = None
    """Temperature of the sampled responses; null: that of training, `rollout.temperature`."""
    timeout_s: Seconds = 600.0
    """Longest time one evaluation may take. One before training ends the run then; one during or
    after training is given up with a line.
    """


class Checkpoint(Section):
    """Set when state is saved, and what a start continues from."""

    on_resume = FREE
    every_steps: NonNegative = 0
    """Learner steps between checkpoints; 0 means only at the end."""
    keep: Positive = 2
    """Newest checkpoints that are kept."""
    max_failures: Positive = 3
    """Failed checkpoints in a row that end the run, with exit code 4. The last must succeed."""
    resume: str = "auto"
    """`auto`: the run directory's newest complete checkpoint; `never`: anew; the path of another
    one; or the address of a copy (`mirror`), which a run directory without a past begins with.
    """
    on_lost_steps: Literal["replay", "discard"] = "replay"
    """Learner steps after the checkpoint that the journal recorded: train the same batches again,
    or roll them back and train others. After a checkpoint that `resume` names by its path they are
    always rolled back.
    """
    partial_rollouts: bool = False
    """Keep beginnings of unfinished responses for a resumed run; off: prompts are issued again."""
    mirror: str | None = None
    """Address (`s3://bucket/runs`, `gs://`, `file://`, any of fsspec; extra `storage` for S3) under
    which the run directory is copied after each checkpoint, beside training; null: nowhere.
    """
    push: str | None = None
    """Repository of the Hugging Face hub, `owner/name`, to which `async-grpo train` pushes the
    final model; it is made private, unless it is there. null: none.
    """

    @property
    def resume_path(self) -> str | None:
        """Checkpoint that `resume` names by its path."""
        return None if self.resume in ("auto", "never") or self.resume_address else self.resume

    @property
    def resume_address(self) -> str | None:
        """Address that `resume` names."""
        return self.resume if "://" in self.resume else None


class Tracking(Section):
    """Set what goes to MLflow, to other trackers and into the report."""

    on_resume = FREE
    mlflow: bool = True
    """Track the run in MLflow; off, MLflow is not even imported."""
    also: list[Literal["tensorboard", "wandb"]] = Field([])
    """Other trackers, which get metrics, parameters, tags and samples (extra `trackers`)."""
    uri: str | None = None
    """MLflow tracking URI; null is a SQLite file in the run directory."""
    experiment: str = "async_grpo"
    """MLflow experiment."""
    offline_ok: bool = False
    """Begin although MLflow cannot be reached: its run is created when the server answers, or by
    `async-grpo report --sync`.
    """
    metrics: Literal["main", "all"] = "main"
    """Metrics that trackers get: the main ones, or all of `metrics.jsonl` (some 300 charts)."""
    system_metrics: bool = True
    """Send load, memory, disk, network and GPUs of the driver's machine to MLflow every 10 s."""
    log_model_max_gb: Annotated[float, Field(ge=0)] = 1.0
    """Send the final model to MLflow up to this size in GiB; 0: never. Checkpoints have it too."""
    register_model: Annotated[str, Field(min_length=1)] | None = None
    """Registered model in MLflow that gets the final model as its next version; null: none."""
    report: bool = True
    """Write the report (`report/report.html` of the run directory) when a run ends."""
    sample_rows: NonNegative = 100
    """About how many trained, and how many evaluated, responses of a run the sample table keeps."""


class Watchdog(Section):
    """Limit how long a run waits for its processes."""

    on_resume = FREE
    start_timeout_s: Seconds = 900.0
    """Longest time until every process of the run is ready."""
    step_timeout_s: Seconds = 1800.0
    """Longest time one learner step may take, waiting for its groups included."""
    probe_timeout_s: Seconds = 30.0
    """Longest time a health probe of a rollout actor may take."""


class RolloutActors(Section):
    """Bound the number of rollout actors."""

    min: Positive = 1
    """Actors that must have room at the start, and stay alive; on CPU they may share cores."""
    max: Positive | None = None
    """Most actors, at the start and when nodes come later; null: what the layout has room for."""


class EngineConfig(Section):
    """Set the size of one engine."""

    tensor_parallel_size: Positive = 1
    """GPUs per engine."""
    max_num_seqs: Positive | None = None
    """Responses generated at the same time by one engine; null: 256 on CPU, on a GPU what vLLM
    chooses by its memory (1024 from 70 GiB, else 256).
    """
    kv_cache_gb: Annotated[
        Literal["auto"] | Annotated[float, Field(gt=0)],
        BeforeValidator(lambda given: "auto" if given is None else given),
    ] = "auto"
    """KV cache per engine GPU or process in GiB; `auto`: 0.25 on CPU; on a GPU that the learner
    shares what the estimate leaves, at least 4; else vLLM's own choice.
    """
    sleep: Literal["auto"] | bool = "auto"
    """Take turns on GPUs that the learner shares: engines give their memory back while it computes,
    the learner while they generate. `auto`: where both do not fit together and
    `replay.max_staleness` is 0 or 1. Groups get `watchdog.step_timeout_s` longer.
    """
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that an engine may use. On a GPU that the learner shares it takes
    what it needs: its weights, `kv_cache_gb` and 3 GiB.
    """
    enforce_eager: bool | None = None
    """Run the engine without compilation; null: true on CPU, false on GPU."""
    vllm: Annotated[dict[str, Any], warn("how engines compute, so the rounding of log-probs")] = (
        Field({})
    )
    """Further arguments of vLLM's `AsyncEngineArgs`, such as `{quantization: fp8}`; those that
    this project sets itself are refused.
    """


class Cluster(Section):
    """Set devices, layout and how many faults are repaired."""

    on_resume = FREE
    device: Annotated[
        Literal["auto", "cpu", "cuda"], warn("the rounding of everything computed", trains=True)
    ] = "auto"
    """`auto` is cuda where the cluster has GPUs."""
    cores: Literal["auto", "apart", "shared"] = "auto"
    """On CPU, `apart`: ranks and engines keep to cores of their own; `shared`: while all engines
    wait, ranks compute on theirs too, and the other way round. `auto` shares from 30 million
    parameters on; the changes cost small models more than they bring.
    """
    layout: Literal["auto", "split", "colocated"] = "auto"
    """Engines and learner on their own GPUs, or rank i and engine i sharing one; `auto` shares
    where there are too few GPUs to split.
    """
    rollout_actors: RolloutActors = RolloutActors()
    engine: EngineConfig = EngineConfig()
    restart_budget: NonNegative = 3
    """Faults after which rollout actors are not started again; a node that is lost is one, and
    one of half an hour ago is none. The run ends with exit code 4 below `min`. The queue, the
    learner and each frozen model may die as often as well, each with a separate count.
    """
    resources_timeout_s: Seconds = 120.0
    """Longest wait for the cluster to have what the run needs."""
