"""Ray Tune: a whole run as a trial, with its learner ranks and engines (extra `tune`).

Runs in: the process that makes a Tuner (`trainable`), and the trial's own, which is the driver of
its run. Hides how a trial becomes a run:

    from ray import tune
    from async_grpo.tune import trainable

    tuner = tune.Tuner(
        trainable("quickstart"),
        param_space={"learner.lr": tune.loguniform(1e-5, 1e-3)},
        tune_config=tune.TuneConfig(metric="rollout/score", mode="max", num_samples=4),
    )
    best = tuner.fit().get_best_result()

    placement group of the trial: [driver] [rank 0] ... [engine 0] ...    (`cluster.bundles`)
    parameters of the trial:      settings, `section.key` -> value
    a report:                     the metrics of a learner step, and of the newest evaluation
    a checkpoint of the trial:    one of the run (`checkpoint.every_steps`, and the last), with the
                                  report of its step

Invariant: a trial has a directory, ports and an MLflow run of its own; one that begins from
another's checkpoint goes on from its weights, optimizer and step, with its own parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ray import tune

from async_grpo.callbacks.base import Callback
from async_grpo.cluster.bundles import bundles
from async_grpo.cluster.placement import room_for
from async_grpo.cluster.session import survey
from async_grpo.config.load import load_config, load_settings
from async_grpo.config.schema import Config
from async_grpo.trainer import Trainer


def resources(config: Config) -> tune.PlacementGroupFactory:
    """Return what a trial of this configuration asks for: a bundle for its driver, one per learner
    rank, and one per engine; with GPUs, for `cluster.device: auto` where the nodes have any.
    """
    device, processes = config.cluster.device, room_for(config)
    gpus = device == "cuda" or (
        device == "auto" and any(node.gpus for node in survey(processes=processes).nodes)
    )
    return tune.PlacementGroupFactory(bundles(config, gpus=float(gpus)))


def trainable(
    config: Config | str | Path, overrides: Sequence[str] = ()
) -> Callable[[dict[str, Any]], None]:
    """Make a run a trainable of Ray Tune, with the resources that it needs.

    config: or a YAML file or recipe, to which the `section.key=value` overrides apply. Parameters
    of a trial are settings: {"learner.lr": 1e-6}; of `cluster` and `learner.ranks` only what asks
    for no other resources. A trial's run is in `run.dir`, below the trial's id. Raises ConfigError.
    """
    if not isinstance(config, Config):
        config = load_config(config, overrides)
    settings = config.model_dump(mode="json")

    def trial(parameters: dict[str, Any]) -> None:
        _train(settings, parameters)

    return tune.with_resources(trial, resources(config))


class _Reports(Callback):
    """What the next report of a trial has besides its step: evaluation and checkpoint."""

    def __init__(self) -> None:
        self.evaluation: dict[str, float] = {}
        self.checkpoint: Path | None = None

    def on_evaluation(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        """Keep the newest."""
        self.evaluation = metrics

    def on_checkpoint(self, trainer: Trainer, step: int, path: Path) -> None:
        """Keep the newest."""
        self.checkpoint = path

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Report a step, and what there is."""
        path, self.checkpoint = self.checkpoint, None
        tune.report(
            {**metrics, **self.evaluation},
            checkpoint=None if path is None else tune.Checkpoint.from_directory(path),
        )


def _train(settings: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """Play the run of a trial; runs in the trial's process."""
    trial, run = tune.get_context().get_trial_id(), settings["run"]
    chosen = {
        "run.dir": str(Path(run["dir"]) / trial),
        "run.name": f"{run['name']}-{trial}",
        **parameters,
    }
    with ExitStack() as stack:
        if (begin := tune.get_checkpoint()) is not None:
            chosen["checkpoint.resume"] = str(stack.enter_context(begin.as_directory()))
        overrides = [f"{name}={json.dumps(value)}" for name, value in chosen.items()]
        config = load_settings(settings, overrides, source=f"trial {trial}")
        reports = _Reports()
        trainer = stack.enter_context(Trainer(config, callbacks=[reports]))
        trainer.start()
        if config.evaluation.before and not trainer.steps_done:
            trainer.evaluate()
        every, result = config.checkpoint.every_steps, {"training_iteration": trainer.steps_done}
        for result in trainer:
            if result.pop("done"):
                break
            if every and result["training_iteration"] % every == 0:
                trainer.save()  # complete, since Tune may end the trial at its report
            if trainer.finished is not None:  # by a callback, while it was saved
                break
            reports.report(result)
        if "train/loss" not in result and not reports.evaluation:
            return  # it began from a checkpoint of its last step
        trainer.save()
        trainer.evaluate()
        reports.report(result)
