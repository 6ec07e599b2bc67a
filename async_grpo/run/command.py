"""`async-grpo train CONFIG [section.key=value ...]`, also `python -m async_grpo.run CONFIG ...`.

Runs in: the driver. A finished run prints a table (`summary`): what was learnt, what it cost, and
where to go on; how a run ends otherwise is `ending`'s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.config.command_line import Parser

if TYPE_CHECKING:
    from async_grpo.config.schema import Config
    from async_grpo.observe.console.console import Console
    from async_grpo.run.trainer import Trainer

DESCRIPTION = "Train what one YAML file says. Called again, it resumes from its newest checkpoint."


def arguments(parser: Parser) -> None:
    """Take a configuration."""
    parser.config()


def run(options: argparse.Namespace) -> int:
    """Train; the exit code."""
    from async_grpo.cluster.watchdog import watched
    from async_grpo.run.ending import stuck
    from async_grpo.runtime.parts import needed
    from async_grpo.runtime.stopping import grace_period

    def config() -> Config:
        read = read_config(options.config, options.settings)
        if (target := read.checkpoint.push) is not None:
            needed("hub", "`checkpoint.push`").check_target(target)
        return read

    with command(config) as this:
        if (trainer := this.trainer) is not None:
            if (line := grace_period()) is not None:
                this.console.info(line)
            trainer.start()
            with watched(
                trainer.system.event_loop,
                seconds=trainer.config.watchdog.step_timeout_s,
                stuck=lambda: stuck(trainer, this.console),
            ):
                first = trainer.steps_done == 0 and not trainer.stop_requested
                if first and trainer.config.evaluation.before:
                    trainer.evaluate()
                with _keeping_what_was_learnt(trainer, this.console):
                    for _ in trainer.steps():
                        pass  # callbacks, console and tracker have what there is to say
                rows = _finish(trainer, this.console)
            stopped, name = trainer.stop_requested, trainer.config.checkpoint.push
            if name is not None and not stopped:  # devices and directory are free by now
                this.console.info(f"pushing the final model to {name}")
                rows.append(needed("hub", "`checkpoint.push`").push_at_end(trainer.run_dir, name))
            this.console.summary("stopped early, resumable" if stopped else "finished", rows)
    return this.code


def read_config(file: str, settings: list[str]) -> Config:
    """Read a configuration. Raises ConfigError, which says of a peer's file how it becomes ours."""
    from async_grpo.config.load import ConfigError, load_config
    from async_grpo.runtime.parts import part

    try:
        return load_config(file, settings)
    except ConfigError as error:
        of_another = part("peers")
        hint = "" if of_another is None else of_another(Path(file))
        raise ConfigError(f"{error}{hint}") from error


@dataclass
class Command:
    """What a command works with. `trainer`: None where there is nothing to do. `code`: exit code,
    behind the block.
    """

    console: Console
    trainer: Trainer | None = None
    code: int = 0


@contextmanager
def command(config: Callable[[], Config], *, checked: bool = True) -> Iterator[Command]:
    """Make a trainer for the block, let signals end it, and say how it ended. checked: whether
    everything is checked before.
    """
    from async_grpo.errors import RunError
    from async_grpo.observe.console.console import Console
    from async_grpo.run.ending import end, guarded
    from async_grpo.run.trainer import Trainer
    from async_grpo.runtime.stopping import STOPPED_EARLY, Signals

    this = Command(console := Console())
    with Signals(console.info) as signals:
        try:
            trainer = Trainer(config(), console=console)
            if checked:
                trainer.check()
        except RunError as error:
            this.code = end(console, 2, str(error))
        else:
            signals.attach(trainer)
            if trainer.stop_requested:
                console.info(STOPPED_EARLY)
                this.code = end(console, 0, "")
            else:
                this.trainer = trainer
        if this.trainer is None:
            yield this
            return
        with guarded(this.trainer, console) as ending:
            yield this
        this.code = ending.code


@contextmanager
def _keeping_what_was_learnt(trainer: Trainer, console: Console) -> Iterator[None]:
    """Save where training ends since there is no signal: nothing is broken then."""
    from async_grpo.errors import NoSignal
    from async_grpo.run.ending import coded

    try:
        yield
    except Exception as error:
        if coded(error)[0] == NoSignal.exit_code:
            try:
                trainer.save(keep_groups=True)
            except Exception as second:  # noqa: BLE001 - shown; the run ends for the first reason
                console.error("and what was learnt could not be saved: " + coded(second)[1])
        raise


def _finish(trainer: Trainer, console: Console) -> list[tuple[str, str]]:
    """Save and evaluate what was learnt, and end the run; the rows that say what came out."""
    from async_grpo.observe.tracking.tracker import log_model
    from async_grpo.run.summary import described, goodput, scope, summarise

    tracker = trainer.tracker
    assert tracker is not None, "a run that trains is tracked"
    final = trainer.save()  # first: what goes wrong in the evaluation must not cost the training
    if not trainer.stop_requested:
        _evaluate_last(trainer, console)
        log_model(trainer.config, console, tracker, final / "hf")
    rows, loop = summarise(trainer, final), trainer.system.loop
    tracker.tag("mlflow.note.content", described(rows))
    trainer.stop("FINISHED", ending=(0, ""))
    # nothing is under way any more
    final_account = dict(goodput(loop.latest, scope=scope(trainer, "whole run")))
    return [(label, final_account.get(label, text)) for label, text in rows]


def _evaluate_last(trainer: Trainer, console: Console) -> None:
    """Evaluate after training is saved: a death or a deadline costs the evaluation, not the run."""
    from async_grpo.errors import FaultBudgetSpent, Stalled
    from async_grpo.run.ending import coded

    try:
        trainer.evaluate()
    except Exception as error:
        code, reason = coded(error)
        if code not in (FaultBudgetSpent.exit_code, Stalled.exit_code):
            raise
        console.error(
            f"the final evaluation is missing, but training is complete and saved: {reason}"
        )
