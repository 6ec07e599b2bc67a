"""The command line: `python -m async_grpo.run configs/quickstart.yaml [section.key=value ...]`.

Runs in: the driver. Exit codes: see `async_grpo.errors`; the last line of the output names the code
and its meaning, because `ray job` reports only success or failure. Before it, a finished run prints
a table: what was learnt, what it cost, and where to go on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from async_grpo.algo.accuracy import powers_of_two
from async_grpo.config.load import ConfigError, load_config
from async_grpo.config.recipes import ListRecipes
from async_grpo.errors import (
    EXIT_MEANING,
    FaultBudgetSpent,
    NonFinite,
    NoSignal,
    RunError,
    Stalled,
    StopRequested,
)
from async_grpo.observe.console.console import Console
from async_grpo.plan.forecast import compared
from async_grpo.replay.token_ledger import PLACES
from async_grpo.run.run_log import nothing_to_learn
from async_grpo.runtime.stopping import STOPPED_EARLY, Signals, grace_period
from async_grpo.runtime.text import counted, duration, without_colours
from async_grpo.runtime.time_ledger import LearnerTime

if TYPE_CHECKING:
    from async_grpo.run.loop import Loop
    from async_grpo.run.system import System
    from async_grpo.run.trainer import Trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Train what the YAML file says; return the exit code."""
    parser = _Parser(
        prog="python -m async_grpo.run",
        description="Asynchronous GRPO training from one YAML file.",
        epilog="For a run directory: python -m async_grpo.status (how it is doing), "
        "async_grpo.report (its report as a page), async_grpo.replay (what became of its groups), "
        "async_grpo.export (its model), async_grpo.evaluate (its accuracy). For a file of verl, "
        "ROLL, AReaL, TRL, OpenRLHF or prime-rl: python -m async_grpo.migrate.",
    )
    parser.add_argument("config", help="YAML file, or the name of a recipe: quickstart")
    parser.add_argument("--version", nargs=0, action=_Version, help="print the version, and exit")
    parser.add_argument("--recipes", nargs=0, action=ListRecipes, help="list the recipes, and exit")
    overrides = "settings that replace those of the file"
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=overrides)
    dry_run = "print what the run would be and need, and start nothing"
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    assume = "with --dry-run: a cluster that is not here, for example nodes=2,gpus=8,memory=80"
    parser.add_argument("--assume", metavar="NODES", help=assume)
    replay = "train the learner alone on the batches that this run recorded"
    parser.add_argument("--replay", metavar="RUN_DIR", help=replay)
    after = "with --replay: begin at the run's checkpoint of this step"
    parser.add_argument("--after", metavar="STEP", type=int, help=after)
    parser.given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_intermixed_args(argv)  # settings may follow --replay
    if not {"", os.getcwd()} & set(sys.path):  # as `python -m` does; `async-grpo` does not
        sys.path.insert(0, os.getcwd())
    console = Console()
    with Signals(console.info) as signals:
        return _run(arguments, console, signals)


class _Version(argparse.Action):
    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        try:
            version = metadata.version("async_grpo")
        except metadata.PackageNotFoundError:  # on PYTHONPATH, as on the nodes of a cluster
            version = "(not installed)"
        print(f"async_grpo {version}")
        sys.exit(0)


class _Parser(argparse.ArgumentParser):
    """Answers a wrong command line with what to write in its place."""

    given: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and a sentence."""
        if (unknown := re.match(r"unrecognized arguments: --([\w.-]+)", message)) is not None:
            message = self._as_setting(unknown[1])
        elif "arguments are required" in message:
            message = (
                "name a YAML file or a recipe, such as quickstart (--recipes lists them); settings "
                "may follow: learner.lr=5e-7"
            )
        self.exit(2, f"error: {message}\nerror: exit code 2: {EXIT_MEANING[2]}\n")

    def _as_setting(self, option: str) -> str:
        """Say which settings an option may have meant, with the value that it was given."""
        from async_grpo.config.docs import settings

        name = option.replace("-", "_")
        keys = [key for key in settings() if key == name or key.endswith(f".{name}")]
        at = next(i for i, word in enumerate(self.given) if word.startswith(f"--{option}"))
        _, separate, value = self.given[at].partition("=")
        following = "".join(self.given[at + 1 : at + 2])
        value = value if separate else following if following[:2] != "--" else "..."
        keys.sort(key=lambda key: key.count("."))
        meant = " or ".join(f"{key}={value}" for key in keys)
        said = f"--{option} is no option; settings are written section.key=value"
        return f"{said}: {meant}" if meant else f"{said}, and --help lists the options"


def _run(arguments: argparse.Namespace, console: Console, signals: Signals) -> int:
    from async_grpo.run.trainer import Trainer

    try:
        config = load_config(arguments.config, arguments.overrides)
        if arguments.after is not None and arguments.replay is None:
            raise ConfigError(
                "--after needs --replay RUN_DIR; a run continues from its newest "
                "checkpoint by itself, or from checkpoint.resume=PATH"
            )
        if arguments.assume is not None and not arguments.dry_run:
            raise ConfigError("--assume goes with --dry-run: a run uses the machines that are here")
        trainer = Trainer(config, console=console)
        if not arguments.dry_run:
            trainer.check()
    except ConfigError as error:
        from async_grpo.migrate.peers import of_another

        return _end(console, 2, f"{error}{of_another(Path(arguments.config))}")
    except RunError as error:
        return _end(console, 2, str(error))
    signals.attach(trainer)
    if trainer.stop_requested:
        console.info(STOPPED_EARLY)
        return _end(console, 0, "")
    work: Callable[[Trainer, Console], None] = _train
    if arguments.dry_run:
        work = partial(_dry_run, assume=arguments.assume)
    elif arguments.replay is not None:
        work = partial(_replay, source=arguments.replay, after=arguments.after)
    return _guarded(trainer, console, lambda: work(trainer, console))


def _dry_run(trainer: Trainer, console: Console, *, assume: str | None) -> None:
    from async_grpo.tools.check.dry_run import assumed_nodes, dry_run

    dry_run(trainer, console, assumed=None if assume is None else assumed_nodes(assume))


def _train(trainer, console: Console) -> None:
    from async_grpo.cluster.watchdog import watched

    if (line := grace_period()) is not None:
        console.info(line)
    trainer.start()
    limit = trainer.config.watchdog.step_timeout_s
    with watched(
        trainer.system.event_loop, seconds=limit, stuck=lambda: _stuck(trainer, console, limit)
    ):
        _train_on(trainer, console)


def _train_on(trainer, console: Console) -> None:
    from async_grpo.observe.tracking.tracker import log_model

    if trainer.config.evaluation.before and trainer.steps_done == 0 and not trainer.stop_requested:
        trainer.evaluate()
    try:
        trainer.train()
    except Exception as error:
        if _coded(error)[0] == NoSignal.exit_code:  # nothing is broken, so what was learnt is kept
            try:
                trainer.save(keep_groups=True)
            except Exception as second:  # noqa: BLE001 - shown; the run ends for the first reason
                console.error("and what was learnt could not be saved: " + _coded(second)[1])
        raise
    final = trainer.save()  # first: what goes wrong in the evaluation must not cost the training
    if not trainer.stop_requested:
        _evaluate_last(trainer, console)
        log_model(trainer.config, console, trainer.tracker, final / "hf")
    rows, loop = summarise(trainer, final), trainer.system.loop
    trainer.tracker.tag("mlflow.note.content", described(rows))
    trainer.stop("FINISHED", ending=(0, ""))
    # nothing is under way any more
    final_account = dict(goodput(loop.latest, scope=_scope(trainer, "whole run")))
    rows = [(label, final_account.get(label, text)) for label, text in rows]
    console.summary("stopped early, resumable" if trainer.stop_requested else "finished", rows)


def described(rows: list[tuple[str, str]]) -> str:
    """Write the closing table as Markdown, for the page of the run in MLflow, but for the account
    of tokens, which ends with the run and is a metric there.
    """
    kept = (row for row in rows if not row[0].startswith("goodput"))
    return "\n".join(f"- **{label}**: {text}" for label, text in kept)


def _evaluate_last(trainer, console: Console) -> None:
    """Evaluate after training is saved: a death or a deadline costs the evaluation, not the run."""
    try:
        trainer.evaluate()
    except Exception as error:
        code, reason = _coded(error)
        if code not in (FaultBudgetSpent.exit_code, Stalled.exit_code):
            raise
        console.error(
            f"the final evaluation is missing, but training is complete and saved: {reason}"
        )


def _replay(trainer, console: Console, *, source: str, after: int | None) -> None:
    with console.phase(f"repeating {source} with the learner alone"):
        compared = trainer.replay(source, after=after)
    trainer.stop()
    same, different = len(compared.same), compared.different
    count = same + len(different)
    weights = f"bit-equal at all {count} publications"
    if not count:
        weights = "not compared: the run recorded no digests"
    elif different:
        weights = f"different from version {different[0]} on ({same} of {count} publications "
        weights += "are bit-equal)"
    metrics = str(trainer.run_dir / "metrics.jsonl")
    console.summary("repeated", [("weights", weights), ("metrics", metrics)])


def _guarded(trainer, console: Console, work: Callable[[], None]) -> int:
    """Do the work and say how it ended; whatever goes wrong, nothing of the run is left behind."""
    done, code, message = False, 1, ""
    try:
        try:
            work()
        except StopRequested:  # during the start
            trainer.stop("KILLED")
            console.info(STOPPED_EARLY)
        done, code = True, 0
    except Exception as error:  # noqa: BLE001 - every error ends the run, explained
        code, message = _explained(error)
        _keep_group_ids(trainer, console, error, message)
    finally:
        if not done:
            try:
                _post_mortem(trainer, console, code, message)
            finally:
                _stop_after_error(trainer, console, code, message)
    return _end(console, code, message)


def _post_mortem(trainer, console: Console, code: int, message: str) -> None:
    """Write down what the run's processes were doing, before they are taken down."""
    from async_grpo.run.post_mortem import REASONS, Scene, write

    if code not in REASONS or not message:
        return
    try:
        scene = trainer.system.scene()
    except RunError:  # it did not come so far
        scene = Scene()
    report = write(trainer.run_dir, scene, code=code, meaning=EXIT_MEANING[code], message=message)
    console.error(report.where)
    if report.path is not None:
        console.info(f"post-mortem: {report.path}")


def _stuck(trainer, console: Console, limit_s: float) -> None:
    """End a driver whose event loop does not turn: with the driver, Ray ends its processes."""
    message = (
        f"the driver's own event loop has not turned for watchdog.step_timeout_s = {limit_s:g} "
        "s; the stacks of the driver say where it is"
    )
    try:
        _post_mortem(trainer, console, Stalled.exit_code, message)
        trainer.abandon()
    finally:  # whatever goes wrong there
        _end(console, Stalled.exit_code, message)
        sys.stdout.flush()
        os._exit(Stalled.exit_code)


def _stop_after_error(trainer, console: Console, code: int, first: str) -> None:
    """Take the run down; a second error is shown and does not replace the `first`."""
    try:
        trainer.stop("FAILED", ending=(code, first))
    except Exception as error:  # noqa: BLE001 - shown; the exit code is the first error's
        if (second := _coded(error)[1]) != first:
            console.error("and the clean-up was not complete: " + second.splitlines()[0])


def _explained(error: BaseException) -> tuple[int, str]:
    """Find the exit code and the message of an error; a bug comes with its traceback."""
    code, message = _coded(error)
    if code == 1:
        print(without_colours("".join(traceback.format_exception(error))), file=sys.stderr, end="")
    return code, message


def _innermost(error: BaseException) -> list[BaseException]:
    """Find the errors inside remote calls and task groups, without remote tracebacks."""
    layers, innermost = [error], []
    for current in layers:  # grows while it is read
        below: Sequence[Any] = (getattr(current, "cause", None),)
        if isinstance(current, BaseExceptionGroup):
            below = current.exceptions
        inside = [
            layer
            for layer in below
            if isinstance(layer, BaseException) and all(layer is not known for known in layers)
        ]
        layers.extend(inside)
        if not inside:
            innermost.append(current)
    return innermost


def _coded(error: BaseException) -> tuple[int, str]:
    """Find the exit code and the message of an error, whatever is around it."""
    from async_grpo.cluster.deaths import is_death, told

    causes = []
    for current in _innermost(error):
        if isinstance(current, RunError):
            return current.exit_code, without_colours(str(current))
        if isinstance(current, TimeoutError) and str(current):
            return Stalled.exit_code, without_colours(str(current))
        if is_death(current):
            return FaultBudgetSpent.exit_code, f"a process of the run died: {told(current)}"
        causes.append(current)
    return 1, without_colours(f"{type(causes[0]).__name__}: {causes[0]}").splitlines()[0]


def _keep_group_ids(trainer, console: Console, error: BaseException, message: str) -> None:
    """Write down the groups that an error names, to be looked at."""
    causes = [one for one in _innermost(error) if isinstance(one, NonFinite)]
    ids = sorted({group_id for cause in causes for group_id in cause.group_ids})
    if not ids:
        return
    path = trainer.run_dir / "non_finite.json"
    facts = {"step": trainer.step_under_way, "group_ids": ids, "reason": message}
    try:
        path.write_text(json.dumps(facts), encoding="utf-8")
    except OSError as failure:
        console.error(
            f"the ids of their groups could not be written to {path} ({failure.strerror}): {ids}"
        )
        return
    console.info(
        f"their ids are in {path}; look at one with: python -m async_grpo.replay "
        f"{shlex.quote(str(trainer.run_dir))} --group ID --text"
    )


def _end(console: Console, code: int, message: str) -> int:
    if message:
        console.error(message)
    say = console.error if code else console.info
    say(f"exit code {code}: {EXIT_MEANING.get(code, EXIT_MEANING[1])}")
    console.end(code, message)
    return code


def summarise(trainer: Trainer, checkpoint: Path) -> list[tuple[str, str]]:
    """Write the rows (label, text) of the closing table, while the trainer still runs."""
    rows = [*_accuracy(trainer), *_training(trainer)]
    rows += goodput(trainer.system.loop.latest, scope=_scope(trainer, "whole run"))
    if trainer.verdict is not None:
        rows.append(("verdict", trainer.verdict.text))
    if errors := trainer.forecast.errors():
        rows.append(("predicted", compared(errors, trainer.forecast.source)))
    return [*rows, *_checks_and_faults(trainer.system), *_next_steps(trainer, checkpoint)]


def _training(trainer: Trainer) -> list[tuple[str, str]]:
    """Say what was trained, how old it was, and what took the learner's time."""
    loop, times = trainer.system.loop, trainer.system.coordinator.times
    steps, spent = len(loop.durations), LearnerTime.between({}, loop.latest, tokens=loop.tokens)
    seconds = max(spent.total, 1e-9)
    rows = [
        ("score", _scores(loop)),
        (
            "learner steps",
            f"{steps} in {duration(seconds)} ({seconds / max(steps, 1):.2f} s each); "
            f"{trainer.steps_done} of {trainer.total_steps} in all",
        ),
        (
            "tokens trained",
            f"{loop.tokens:,} response tokens, {spent.tokens_per_s:,.0f} per second, evaluations "
            "included",
        ),
        (
            "staleness",
            f"mean {loop.lag_sum / max(steps, 1):.2f}, largest "
            f"{counted(loop.lag_max, 'learner step')} "
            f"(bound {trainer.config.replay.max_staleness})",
        ),
        (
            "publications",
            f"{times.count}; the learner waited {times.learner_waited / seconds:.1%} of "
            "its time for them",
        ),
        ("learner time", _learner_time(spent)),
    ]
    return [(label + _scope(trainer, "this start"), text) for label, text in rows]


def _scores(loop: Loop) -> str:
    """Say how the reward went, from the first tenth of the steps to the last."""
    if not loop.scores:
        return "no step was trained"
    part = max(1, len(loop.scores) // 10)
    first, last = (sum(some) / part for some in (loop.scores[:part], loop.scores[-part:]))
    flat = "; the last step had nothing to learn from: no response better than its group's others"
    return f"{first:.2f} -> {last:.2f}" + flat * nothing_to_learn(loop.latest)


def _learner_time(spent: LearnerTime) -> str:
    """Write the shares of the learner's time, which add up to 100 % but for rounding."""
    named = {
        "training": spent.share("working"),
        "waiting for groups": spent.idle,
        "evaluating": spent.share("evaluating"),
    }
    shown = [f"{share:.0%} {what}" for what, share in named.items() if share or what == "training"]
    other = 1 - sum(named.values())
    return ", ".join(shown + [f"{other:.0%} other"] * (other >= 0.005))


def _scope(trainer: Trainer, scope: str) -> str:
    """Say what a number is of, where a run was resumed and there are two answers."""
    return f", {scope}" if trainer.resumed_at else ""


def _checks_and_faults(system: System) -> list[tuple[str, str]]:
    """Write a row for every kind of check that was made, and of fault that was survived."""
    checks, times = system.coordinator.weight_metrics(), system.coordinator.times
    errors = [
        f"{system.loop.latest.get(f'rollout/verifier_errors_{kind}', 1.0):.0f} x {text}"
        for kind, text in system.verifier_errors.told.items()
    ]
    rows = [
        (errors, "verifier errors", "; ".join(errors)),
        (
            checks["weights/probes"],
            "weights checked",
            f"{counted(checks['weights/probes'], 'time')} while training; engines and learner "
            f"differ by {checks['weights/drift']:.1e} at most",
        ),
        (
            times.repeated or times.dropped,
            "publication faults",
            f"{times.repeated} transfers repeated, {times.dropped} engines dropped",
        ),
        (system.actors.restarts, "restarts", f"{system.actors.restarts} rollout actors replaced"),
        (
            system.queue_restarts,
            "queue restarts",
            f"{system.queue_restarts}; the replay queue's process went on from its journal",
        ),
        (
            learner := system.supervisor.restarts,
            "learner restarts",
            f"{learner}; its ranks repeated the recorded steps after a checkpoint",
        ),
    ]
    return [(label, text) for happened, label, text in rows if happened]


def _next_steps(trainer: Trainer, checkpoint: Path) -> list[tuple[str, str]]:
    """Say where the results are, and with which commands to go on."""
    config, tracker, command = trainer.config, trainer.tracker, "python -m async_grpo"
    run_dir = str(trainer.run_dir)
    rows = [("checkpoint", f"{checkpoint} (Hugging Face format in hf/)")]
    if tracker is not None and tracker.summary is not None:
        rows.append(("MLflow", tracker.summary))
    if config.replay.journal.enable:
        shows = "shows what was generated and trained"
        rows.append(("groups", f"{command}.replay {shlex.quote(run_dir)} {shows}"))
    again = shlex.quote(f"{run_dir}/config.yaml") + _longer(trainer)
    rows.append(("next", f"{command}.run {again} continues this run"))
    return rows


def _longer(trainer: Trainer) -> str:
    """Write the override with which a finished run goes on; none for one stopped early."""
    run = trainer.config.run
    if trainer.steps_done < trainer.total_steps:
        return ""
    if run.total_steps is not None:
        return f" run.total_steps={2 * run.total_steps}"
    return f" run.epochs={2 * (run.epochs or 1)}"


def _accuracy(trainer: Trainer) -> list[tuple[str, str]]:
    if not trainer.evaluations:
        return []
    (first, before), (last, after) = trainer.evaluations[0], trainer.evaluations[-1]
    rows = []
    n, other = trainer.config.evaluation.n, trainer.config.evaluation.task
    keys = [
        ("eval/accuracy_greedy", "held-out accuracy, greedy"),
        ("eval/pass_at_1", "held-out accuracy, sampled"),
    ]
    keys += [(f"eval/pass_at_{k}", f"held-out pass@{k}") for k in list(powers_of_two(n))[1:][-1:]]
    for key, label in keys:
        if key in after:
            change = f"{before[key]:.1%} -> " if last != first and key in before else ""
            rows.append((label, f"{change}{after[key]:.1%} after step {last}"))
    whose = "none of them in training" if other is None else f"of task {other.name}"
    return [*rows, ("held-out problems", f"{after['eval/problems']:.0f}, {whose}")]


def goodput(metrics: Mapping[str, float], *, scope: str = "") -> list[tuple[str, str]]:
    """Say what became of the tokens, largest parts first: a row, or none where none is known."""
    if "goodput/generated" not in metrics:
        return []
    generated = max(metrics["goodput/generated"], 1.0)
    shares = [(metrics[f"goodput/{place}"] / generated, place) for place in PLACES]
    largest = sorted(((share, place) for share, place in shares if share >= 0.001), reverse=True)
    text = ", ".join(f"{share:.1%} {place}" for share, place in largest)
    return [(f"goodput{scope}", f"{generated:,.0f} tokens generated: {text}")]
