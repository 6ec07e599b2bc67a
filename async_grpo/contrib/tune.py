"""Ray Tune: a whole run as a trial, with its learner ranks and engines (extra `tune`).

Runs in: the process that makes a Tuner (`trainable`), and the trial's own, which is the driver of
its run. Hides how a trial becomes a run:

    from ray import tune
    from async_grpo.contrib.tune import trainable

    tuner = tune.Tuner(
        trainable("quickstart"),
        param_space={"learner.lr": tune.loguniform(1e-5, 1e-3)},
        tune_config=tune.TuneConfig(metric="rollout/score", mode="max", num_samples=4),
    )
    best = tuner.fit().get_best_result()

    placement group of the trial: [driver] [rank 0] ... [engine 0] ...    (`cluster.placement`)
    parameters of the trial:      settings, `section.key` -> value
    a result:                     the metrics of a learner step, and of the newest evaluation
    a checkpoint of the trial:    one of the run, when Tune asks for it

Invariants: a trial has a directory, ports and an MLflow run of its own; one that begins from
another's checkpoint goes on from its weights, optimizer and step, with its own parameters; whatever
ends a trial (its last step, a scheduler, an error) ends its run in order.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import tune

from async_grpo.cluster.placement import bundles, room_for
from async_grpo.cluster.session import survey
from async_grpo.config.load import load_config, load_settings, resolve
from async_grpo.config.schema import Config
from async_grpo.run.callbacks.base import Callback
from async_grpo.run.trainer import Trainer


def resources(config: Config) -> tune.PlacementGroupFactory:
    """Return what a trial of this configuration asks for: a bundle for its driver, one per learner
    rank, and one per engine; with GPUs, for `cluster.device: auto` where the nodes have any.
    """
    device, processes = config.cluster.device, room_for(config)
    gpus = device == "cuda" or (
        device == "auto" and any(node.gpus for node in survey(processes=processes).nodes)
    )
    return tune.PlacementGroupFactory(bundles(config, gpus=float(gpus)))


def trainable(config: Config | str | Path, overrides: Sequence[str] = ()) -> type[tune.Trainable]:
    """Make a run a trainable of Ray Tune, with the resources that it needs.

    config: or a YAML file or recipe, to which the `section.key=value` overrides apply. Parameters
    of a trial are settings: {"learner.lr": 1e-6}; of `cluster` and `learner.ranks` only what asks
    for no other resources. A trial's run is in `run.dir`, below the trial's id. Relative paths
    begin at the present working directory. Raises ConfigError.
    """
    config = resolve(config) if isinstance(config, Config) else load_config(config, overrides)
    kept, here = config.model_dump(mode="json"), str(Path.cwd())

    class AsyncGRPO(RunTrial):
        """The trial of one configuration."""

        settings, cwd = kept, here

    return tune.with_resources(AsyncGRPO, resources(config))


class _Newest(Callback):
    """Keeps the metrics of the newest evaluation."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def on_evaluation(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        """Keep them."""
        self.metrics = metrics


class RunTrial(tune.Trainable):
    """A run as Ray Tune drives it: a learner step at a time. settings: of the configuration. cwd:
    where its relative paths begin, since Tune gives each trial a separate working directory.
    """

    settings: Mapping[str, Any]
    cwd: str

    def __init__(self, *given: Any, **more: Any) -> None:
        """Take what Tune gives. The run starts with its first step, or from a checkpoint."""
        self._evaluation = _Newest()
        self._trainer: Trainer | None = None
        self._steps: Iterator[dict[str, Any]] = iter(())
        self._done = False
        super().__init__(*given, **more)

    def step(self) -> dict[str, Any]:
        """Train a learner step; its result. The last one is saved and evaluated first."""
        try:
            trainer = self._trainer or self._start(None)
            result = next(self._steps, None)
            if result is None:  # asked to end, or nothing was left to train
                result = {"training_iteration": trainer.steps_done, "done": True}
            self._done = bool(result["done"])
            if self._done:
                trainer.save()
                trainer.evaluate()
        except BaseException:
            self._stop("FAILED")
            raise
        return {**result, **self._evaluation.metrics}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save the run, and copy its checkpoint into Tune's directory."""
        assert self._trainer is not None, "Tune saves a trial after a step"
        shutil.copytree(self._trainer.save(), checkpoint_dir, dirs_exist_ok=True)

    def load_checkpoint(self, checkpoint: str) -> None:
        """Begin from this checkpoint, of this trial or of another."""
        self._stop("KILLED")
        self._start(checkpoint)

    def cleanup(self) -> None:
        """End the run in order, as Tune ends the trial."""
        self._stop("FINISHED" if self._done else "KILLED")

    def _start(self, checkpoint: str | None) -> Trainer:
        trial, run = self.trial_id, self.settings["run"]
        chosen = {
            "run.dir": str(Path(run["dir"]) / trial),
            "run.name": f"{run['name']}-{trial}",
            **self.config,
        }
        if checkpoint is not None:
            chosen["checkpoint.resume"] = checkpoint
        overrides = [f"{name}={json.dumps(value)}" for name, value in chosen.items()]
        config = load_settings(self.settings, overrides, source=f"trial {trial}", cwd=self.cwd)
        trainer = self._trainer = Trainer(config, callbacks=[self._evaluation])
        trainer.start()
        if config.evaluation.before and not trainer.steps_done:
            trainer.evaluate()
        self._steps = trainer.steps()
        return trainer

    def _stop(self, status: Any) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.stop(status)
