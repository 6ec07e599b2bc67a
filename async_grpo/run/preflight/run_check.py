"""Whether a run can begin as it is configured, found out from files and settings alone.

Runs in: the driver, before any process starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from async_grpo.cluster.addresses import addresses
from async_grpo.config.load import preflight_files
from async_grpo.config.resume import Changes
from async_grpo.config.schema import Config
from async_grpo.config.stored import read_settings
from async_grpo.errors import JournalError, SetupError
from async_grpo.replay.history import Past, lineage, read
from async_grpo.replay.resume import identity
from async_grpo.run.checkpoint.mirror import check_addresses
from async_grpo.run.checkpoint.resume import as_before, changes, find_checkpoint, has_past
from async_grpo.run.preflight.model import check_journal, check_metric, look
from async_grpo.runtime.storage import check_known
from async_grpo.runtime.text import first_line, listed
from async_grpo.runtime.variables import variables
from async_grpo.tasks.base import Problems, TaskError, task_weights
from async_grpo.tasks.mixture import ProblemOrder, load_tasks, naming, parts_of, reward_weights
from async_grpo.tasks.registry import check_concurrency, held_out

TEACHER_ROWS = 1_000
"""Most rows of a task that streams them that are asked for their teacher, spread evenly."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found. config: what was checked, with what a run keeps that goes on. weights: of
    the reward components. problems, order, fingerprint: of the training data; held_out: problems to
    evaluate on. checkpoint: where the run goes on. notes: on the model; None where it is to be made
    first. pass_rates: of problems, by an earlier run.
    """

    config: Config
    weights: dict[str, float]
    problems: int
    order: ProblemOrder
    held_out: int
    fingerprint: str
    total_steps: int
    checkpoint: Path | None
    changes: Changes
    notes: list[str] | None
    pass_rates: dict[int, float]


def check_run(config: Config, *, notes: list[str] | None) -> Checked:
    """Check configuration, files and task. notes: of an earlier check. Raises SetupError."""
    try:
        preflight_files(config)
        addresses(config)
        check_addresses(config.checkpoint.mirror, config.checkpoint.resume_address)
        if config.weight_sync.files is not None:
            check_known(config.weight_sync.files)
        variables(config.env_vars, "task.env_vars")
        task = load_tasks(config)
        check_concurrency(config, [one for _, one in parts_of(config, task)])
        awaited = {name for one in config.tasks.values() for name in one.after}
        for own, one in parts_of(config, task):
            with naming(own):
                check_metric(own, list(task_weights(own.task, one)))
                if own.posed in awaited and not one.evaluation(1):
                    raise TaskError("`after` waits for its accuracy: it needs held-out problems")
        check_journal(config)
        weights, order = reward_weights(config, task), ProblemOrder.of(config, task)
        evaluated = held_out(config, task)
        if notes is None:  # once: a trainer is checked more than once
            notes = look(config, task)
        data = _data(config, task)
    except (TaskError, ValueError) as error:
        raise SetupError(str(error)) from error
    except OSError as error:  # a name that no file can have, a disk that does not answer
        raise SetupError(f"{error.filename} cannot be read: {error.strerror}") from error
    total_steps = _total_steps(config, len(task))
    found, _ = find_checkpoint(config, total_steps=total_steps, data=data)
    rates = {} if found is not None or has_past(config) else _pass_rates(config, task)
    config = as_before(config, found)
    return Checked(
        config,
        weights,
        problems=len(task),
        order=order,
        held_out=evaluated,
        fingerprint=data,
        total_steps=total_steps,
        checkpoint=found,
        changes=changes(config, found),
        notes=notes,
        pass_rates=rates,
    )


def _pass_rates(config: Config, task: Problems) -> dict[int, float]:
    """Read what `replay.difficulty.rates_from` found. Raises SetupError."""
    source = config.replay.difficulty.rates_from
    if source is None:
        return {}
    run, key = Path(source).expanduser(), f"`replay.difficulty.rates_from` is {source}"
    if not (settings := read_settings(run / "config.yaml")):
        raise SetupError(f"{key}, which is no directory of a run")
    try:
        other = Config.model_validate(settings)
        [*_, last] = lineage(run / "journal")[0]
    except (ValueError, JournalError) as error:
        raise SetupError(f"{key}, of which no journal can be read: {first_line(error)}") from error
    if other.replay.difficulty.choose == "all":
        raise SetupError(f"{key}, which kept no pass rates: its `replay.difficulty.choose` is all")
    if last.segment.snapshot["identity"] != identity(other, _data(other, task)):
        raise SetupError(f"{key}, a run on other data (or whose data have changed)")
    past = Past(last.segment.snapshot)
    read([last], past, damage="end")
    return past.ledger.rates


def _data(config: Config, task: Problems) -> str:
    """Identify the problems, and of several teachers the one of each. Raises TaskError for rows
    that name none of them.
    """
    teachers = config.algorithm.distill.teachers
    if len(teachers) < 2:
        return task.fingerprint
    rows, begin = list[int](), 0
    for own, one in parts_of(config, task):
        step = -(-len(one) // TEACHER_ROWS) if own.task.streaming else 1
        rows += range(begin, begin + len(one), step)
        begin += len(one)
    named = [task.train(row).teacher for row in rows]
    if others := sorted({*named} - {None, *teachers}, key=str):
        raise TaskError(
            f"rows name the teacher {listed([str(one) for one in others], 3)}, and "
            f"`algorithm.distill.teacher` has {listed(teachers, 3)}: add it, or mend the rows"
        )
    return blake2b(repr((task.fingerprint, named)).encode(), digest_size=16).hexdigest()


def _total_steps(config: Config, problems: int) -> int:
    """`run.total_steps`, or the steps of `run.epochs`. Raises SetupError for none."""
    run, batch = config.run, config.rollout.rollout_batch_size
    epochs = run.epochs or 0
    steps = run.total_steps if run.total_steps is not None else epochs * problems // batch
    if steps < 1:
        raise SetupError(
            f"{run.epochs} epochs of {problems} problems are less than one batch of "
            f"{batch} groups; raise run.epochs"
        )
    return steps
