"""What a run goes on from when checkpoints or parts of its journal are damaged or gone: the newest
whole checkpoint, or the journal alone, with a sentence; never the initial model without one. And
which recorded steps a learner alone can repeat, and from where.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_grpo.config.load import dump
from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent, SetupError
from async_grpo.replay.journal import segment_path, segments
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.resume import JournalSettings, last_logged_step, open_queue
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.checkpoint.directory import Origin
from async_grpo.run.checkpoint.resume import (
    as_before,
    changes,
    differences,
    earlier_evaluations,
    find_checkpoint,
    plan_rerun,
)
from async_grpo.run.recovery import LearnerSupervisor
from tests.support.frames import frame_of
from tests.support.listener import RecordingListener
from tests.support.queues import queue_settings

LAST, TOTAL = 8, 99


def config_of(run_dir: Path, *, journal: bool = True, resume: str = "auto") -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": TOTAL, "dir": str(run_dir)},
            "model": {"path": "m"},
            "checkpoint": {"resume": resume},
            "replay": {"journal": {"enable": journal, "fsync": "never"}},
        }
    )


def open_for(config: Config, start: str, origin: Origin = Origin(None, 0)) -> ReplayQueue:  # noqa: B008 - frozen
    """The queue as a start of the run opens it."""
    journal = JournalSettings.of(config, start=start, fingerprint="data")
    return open_queue(
        replace(queue_settings(), total_steps=TOTAL, trained_steps=origin.step),
        journal if config.replay.journal.enable else None,
        snapshot=origin.snapshot(),
    )


def record(run_dir: Path, *, saved: tuple[int, ...], prunes: bool, journal: bool = True) -> Path:
    """A run of `LAST` steps with these checkpoints, killed between two steps."""

    async def live() -> None:
        queue = open_for(config_of(run_dir, journal=journal), "first")
        for step in range(1, LAST + 1):
            tickets = await queue.acquire("a", step - 1, [], 2)
            await queue.put("a", [frame_of(ticket) for ticket in tickets])
            assert await queue.get_batch(step) is not None
            await queue.live(step)
            with open(run_dir / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": step, "train/loss": 1.0}) + "\n")
            if step in saved:
                draft = checkpoint.begin(run_dir, step)
                (draft / "queue.json").write_text(json.dumps(await queue.snapshot()))
                (draft / "learner" / "state.pt").write_text(f"moments of step {step}")
                checkpoint.commit(draft, {"step": step})
        if prunes:
            oldest = checkpoint.path_for(run_dir, saved[0]) / "queue.json"
            segment = json.loads(oldest.read_text())["segment"]
            await queue.forget(segment=segment, step=saved[0])

    run_dir.mkdir(parents=True)
    asyncio.run(live())
    return run_dir


@dataclass
class Started:
    """How a start went: what it took, what it said, and the step at which its queue is."""

    taken: str
    said: str
    step: int


def start(run_dir: Path, *, journal: bool = True, resume: str = "auto") -> Started:
    """What a start does before engines and learner come."""
    config = config_of(run_dir, journal=journal, resume=resume)
    found, notes = find_checkpoint(config, total_steps=TOTAL, data="data", check=checkpoint.verify)
    origin = Origin(found, 0 if found is None else checkpoint.step_of(found))
    queue = open_for(config, "second", origin)
    said = "; ".join([*notes, str(queue.report)])
    return Started("nothing" if found is None else found.name, said, queue.ledger.steps)


def truncate(path: Path) -> None:
    file = path / "learner" / "state.pt"
    file.write_bytes(file.read_bytes()[:-3])


def flip(path: Path) -> None:
    file = path / "learner" / "state.pt"
    file.write_bytes(file.read_bytes().replace(b"moments", b"mOments"))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "learner/state.pt has 14 bytes instead of 17"),
    "flipped": (flip, "the contents of learner/state.pt have changed"),
    "a file is missing": (lambda path: (path / "queue.json").unlink(), "queue.json is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "has no manifest.json"),
    "half a manifest": (
        lambda path: (path / "manifest.json").write_text('{"files": {'),
        "is not readable JSON",
    ),
    "added": (lambda path: (path / "learner" / "x.pt").write_text(""), "x.pt has been added"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Path]:
    home = tmp_path_factory.mktemp("runs")
    return {
        (len(saved), journal): record(
            home / f"{len(saved)}-{journal}",
            saved=saved,
            prunes=journal == "pruned",
            journal=journal != "off",
        )
        for saved in ((3,), (3, 6))
        for journal in ("whole", "pruned", "off")
    }


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("journal", ["whole", "pruned", "off"])
@pytest.mark.parametrize("checkpoints", [1, 2])
def test_the_newest_checkpoint_is_damaged(
    runs: dict, tmp_path: Path, checkpoints: int, journal: str, damage: str
) -> None:
    run_dir = Path(shutil.copytree(runs[checkpoints, journal], tmp_path / "run"))
    newest = checkpoint.path_for(run_dir, 3 * checkpoints)
    spoil, reason = DAMAGE[damage]
    spoil(newest)
    before = sorted(run_dir.rglob("*"))
    if checkpoints == 1 and journal != "whole":
        with pytest.raises(SetupError) as refused:
            start(run_dir, journal=journal != "off")
        said = str(refused.value)
        assert refused.value.exit_code == 2 and sorted(run_dir.rglob("*")) == before
        assert (
            "the run cannot go on from where it was" in said and "checkpoint.resume=never" in said
        )
        why = "begins after learner step 3" if journal == "pruned" else "there is no journal"
        assert reason in said and newest.name in said and why in said
        assert start(run_dir, journal=journal != "off", resume="never").step == 0
        return
    started = start(run_dir, journal=journal != "off")
    assert reason in started.said and newest.name in started.said
    if checkpoints == 1:
        assert (started.taken, started.step) == ("nothing", LAST)
        assert "the run continues from its journal" in started.said
        assert "8 learner steps after the checkpoint (step 0) rolled forward" in started.said
    elif journal == "off":
        assert (started.taken, started.step) == ("step_000003", 3)
    else:
        assert (started.taken, started.step) == ("step_000003", LAST)
        assert "step_000003; 0 completed groups" in started.said
        assert "5 learner steps after the checkpoint (step 3) rolled forward" in started.said


@pytest.mark.parametrize("journal", ["whole", "pruned"])
def test_both_checkpoints_are_damaged(runs: dict, tmp_path: Path, journal: str) -> None:
    run_dir = Path(shutil.copytree(runs[2, journal], tmp_path / "run"))
    flip(checkpoint.path_for(run_dir, 3))
    truncate(checkpoint.path_for(run_dir, 6))
    if journal == "whole":
        started = start(run_dir)
        assert (started.taken, started.step) == ("nothing", LAST)
        assert started.said.count("the run continues from its journal") == 2
        return
    with pytest.raises(SetupError, match=r"000006 is damaged.*000003 is damaged.*begins after"):
        start(run_dir)


def test_sizes_alone_pass_over_what_they_can_show(runs: dict, tmp_path: Path) -> None:
    """Before the directory is taken, nothing is read that takes long."""
    run_dir = Path(shutil.copytree(runs[1, "pruned"], tmp_path / "run"))
    truncate(checkpoint.path_for(run_dir, 3))
    with pytest.raises(SetupError, match="cannot go on from where it was"):
        find_checkpoint(config_of(run_dir), total_steps=TOTAL, data="data")


def test_a_checkpoint_that_is_named_is_refused_with_another_one(runs: dict, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(runs[2, "whole"], tmp_path / "run"))
    newest = checkpoint.path_for(run_dir, 6)
    flip(newest)
    with pytest.raises(SetupError, match=r"state\.pt have changed; .*resume=.*step_000003$"):
        start(run_dir, resume=str(newest))
    truncate(newest)
    with pytest.raises(SetupError, match=r"instead of 17; the newest whole one is .*step_000003$"):
        checkpoint.find(run_dir)  # evaluation, export, serving


def test_other_data_beside_a_damaged_checkpoint(runs: dict, tmp_path: Path) -> None:
    """Without damage the run begins anew, and the queue says so; with it, it is refused."""
    run_dir = Path(shutil.copytree(runs[1, "whole"], tmp_path / "run"))
    truncate(checkpoint.path_for(run_dir, 3))
    with pytest.raises(SetupError, match=r"14 bytes.*; .* of another run, or of other settings"):
        find_checkpoint(config_of(run_dir), total_steps=TOTAL, data="other")
    shutil.rmtree(checkpoint.path_for(run_dir, 3))
    assert find_checkpoint(config_of(run_dir), total_steps=TOTAL, data="other") == (None, [])


@pytest.mark.parametrize("gone", ["first segment", "journal", "journal is off"])
def test_there_never_was_a_checkpoint(runs: dict, tmp_path: Path, gone: str) -> None:
    run_dir = Path(shutil.copytree(runs[1, "whole"], tmp_path / "run"))
    shutil.rmtree(run_dir / "checkpoints")
    if gone == "first segment":
        segment_path(run_dir / "journal", 1).unlink()
        with pytest.raises(SetupError, match=r"where it was: .* begins after learner step 3"):
            start(run_dir)
        return
    if gone == "journal":
        shutil.rmtree(run_dir / "journal")
    started = start(run_dir, journal=gone == "journal")
    assert (
        started.step == 0
        and (
            "has neither checkpoint nor journal: the run begins anew, although it had come to "
            "learner step 8"
        )
        in started.said
    )


# ---- the journal ----


def test_the_segment_of_the_checkpoint_is_missing(runs: dict, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(runs[2, "whole"], tmp_path / "run"))
    path = segment_path(run_dir / "journal", segments(run_dir / "journal")[-1])
    path.unlink()
    started = start(run_dir)
    assert (started.taken, started.step) == ("step_000006", 6)
    assert (
        "2 learner steps after the checkpoint (step 6) discarded and trained anew: they are not in "
        f"the journal; the journal's {path} is missing"
    ) in started.said, started.said


def test_a_later_segment_is_missing(tmp_path: Path) -> None:
    """What is known of the steps in it comes from the metrics."""
    run_dir = record(tmp_path / "run", saved=(3, 6), prunes=False)
    shutil.rmtree(checkpoint.path_for(run_dir, 6))
    numbers = segments(run_dir / "journal")
    segment_path(run_dir / "journal", numbers[-1]).unlink()
    started = start(run_dir)
    assert (
        started.step == 6
        and (
            "3 learner steps after the checkpoint (step 3) rolled forward from the recorded "
            "batches; 2 learner steps after step 6 discarded and trained anew: they are not in "
            "the journal"
        )
        in started.said
    ), started.said


def test_a_segment_in_the_middle_is_missing(tmp_path: Path) -> None:
    run_dir = record(tmp_path / "run", saved=(3, 5, 7), prunes=False)
    for step in (5, 7):
        shutil.rmtree(checkpoint.path_for(run_dir, step))
    middle = segment_path(run_dir / "journal", 3)
    middle.unlink()
    started = start(run_dir)
    assert f"the journal's {middle} is missing" in started.said
    assert "3 learner steps after step 5 discarded" in started.said, started.said


# ---- a learner that dies in a run ----


@pytest.mark.parametrize("journal", ["whole", "pruned"])
async def test_a_learner_is_not_brought_back_to_the_beginning_by_damage(
    runs: dict, tmp_path: Path, journal: str
) -> None:
    run_dir = Path(shutil.copytree(runs[2, "whole"], tmp_path / "run"))
    flip(checkpoint.path_for(run_dir, 6))

    async def obstacle(*, after: int, until: int) -> str:
        return "" if journal == "whole" else f"the journal has no learner step {after + 1}"

    supervisor = object.__new__(LearnerSupervisor)
    supervisor._config, supervisor._origin = config_of(run_dir), Origin(None, 0)
    supervisor._queue = SimpleNamespace(obstacle=obstacle)
    supervisor._listener = listener = RecordingListener()
    older = checkpoint.path_for(run_dir, 3)
    assert await supervisor._newest(LAST) == Origin(older, 3)
    assert "an older checkpoint is used" in listener.notes[-1]
    truncate(older)
    if journal == "whole":
        assert await supervisor._newest(LAST) == Origin(None, 0)
        return
    with pytest.raises(FaultBudgetSpent, match=r"no other checkpoint is whole, and .* step 1$"):
        await supervisor._newest(LAST)


# ---- what else is read of a run ----


def test_it_begins_as_early_as_it_can(tmp_path: Path) -> None:
    run_dir = record(tmp_path / "run", saved=(3, 6), prunes=False)
    assert plan_rerun(run_dir, after=None, until=99) == plan_rerun(run_dir, after=0, until=LAST)
    whole = plan_rerun(run_dir, after=None, until=99)
    assert (whole.first, whole.last, whole.checkpoint) == (1, LAST, None)
    later = plan_rerun(run_dir, after=6, until=7)
    assert (later.first, later.last, later.checkpoint) == (7, 7, checkpoint.path_for(run_dir, 6))
    segment_path(
        run_dir / "journal", segments(run_dir / "journal")[0]
    ).unlink()  # as when the oldest checkpoint is of step 3
    kept = plan_rerun(run_dir, after=None, until=99)
    assert (kept.first, kept.last, kept.checkpoint) == (4, LAST, checkpoint.path_for(run_dir, 3))


@pytest.mark.parametrize("after", [0, 2, LAST, 40])
def test_what_cannot_be_repeated_is_said_with_what_can(tmp_path: Path, after: int) -> None:
    run_dir = record(tmp_path / "run", saved=(3, 6, LAST), prunes=False)
    segment_path(run_dir / "journal", segments(run_dir / "journal")[0]).unlink()
    with pytest.raises(
        SetupError,
        match=f"after step {after}: the journal has steps 4 to 8, .* --after 3, --after 6$",
    ):
        plan_rerun(run_dir, after=after, until=99)


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="has no journal"):
        plan_rerun(tmp_path, after=None, until=9)


def test_settings_that_matter_to_the_learner_are_told_apart(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"total_steps": 9}, "model": {"path": "m"}})
    (tmp_path / "config.yaml").write_text(dump(config))
    assert list(differences(config, tmp_path / "config.yaml")) == []
    other = Config.model_validate(
        {
            "run": {"total_steps": 8},
            "model": {"path": "m"},
            "learner": {"lr": 3e-5},
            "evaluation": {"max_samples": 3},
        }
    )
    assert list(differences(other, tmp_path / "config.yaml")) == ["learner.lr: 1e-06 -> 3e-05"]
    assert list(differences(other, tmp_path / "nothing.yaml")) == []


def saved(run_dir: Path, step: int) -> Path:
    directory = checkpoint.begin(run_dir, step)
    (directory / "queue.json").write_text("[]")
    return checkpoint.commit(directory, {"step": step})


def test_which_checkpoint_a_run_goes_on_from(tmp_path: Path) -> None:

    def find(resume: str, total_steps: int = 9) -> Path | None:
        return find_checkpoint(
            config_of(tmp_path, resume=resume), total_steps=total_steps, data=""
        )[0]

    assert find("auto") is None
    first, second = saved(tmp_path, 3), saved(tmp_path, 6)
    assert (find("never"), find("auto"), find(str(first))) == (None, second, first)
    with pytest.raises(SetupError, match="is of step 6, the run ends at step 5; raise"):
        find("auto", 5)
    for nothing in (tmp_path, first / "queue.json"):
        with pytest.raises(SetupError, match="has no manifest"):
            find(str(nothing))


def test_a_run_without_a_past_has_no_changes(tmp_path: Path) -> None:
    assert changes(config_of(tmp_path), None).refusal(tmp_path) == ""
    assert changes(config_of(tmp_path), saved(tmp_path, 3)).refusal(tmp_path) == ""


CHOSEN = "tokens_per_micro_batch"


def with_learner(config: Config, **learner: object) -> Config:
    return config.unchecked_copy(update={"learner": config.learner.unchecked_copy(update=learner)})


@pytest.mark.parametrize("journal", [True, False])
def test_micro_batches_that_were_chosen_are_kept(tmp_path: Path, journal: bool) -> None:
    """Wherever the run goes on; other numbers would add up in another order. What the newest start
    had counts, of a run with a journal: it has trained the newest steps.
    """
    run_dir = record(tmp_path / "run", saved=(3,), prunes=False, journal=journal)
    config = config_of(run_dir, journal=journal)
    found = checkpoint.path_for(run_dir, 3)
    assert as_before(config, None) == as_before(config, found) == config, "none is known"
    manifest = {**checkpoint.read(found), "config": {"learner": {CHOSEN: 2048}}}
    (found / "manifest.json").write_text(json.dumps(manifest))
    before = with_learner(config, **{CHOSEN: 8192}, gradient_checkpointing=True)
    (run_dir / "config.yaml").write_text(dump(before))
    kept = as_before(config, found)
    assert kept == with_learner(config, **{CHOSEN: 8192 if journal else 2048})
    assert kept.learner.gradient_checkpointing == "auto", "by the memory that there is now"
    given = with_learner(config, **{CHOSEN: 4096})
    assert as_before(given, found) == given
    longer = config.rollout.unchecked_copy(update={"response_length": 9000})
    longer = config.unchecked_copy(update={"rollout": longer})
    assert as_before(longer, found) == longer, "they would hold no sequence"


def test_what_the_metrics_file_tells_of_a_run_that_was_cut_off(tmp_path: Path) -> None:
    assert last_logged_step(tmp_path) == 0 and earlier_evaluations(tmp_path, 9) == []
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "train/lo')
    assert last_logged_step(tmp_path) == 0 and earlier_evaluations(tmp_path, 9) == []
    file.write_text(
        '{"step": 0, "eval/accuracy": 0.5}\n{"step": 1, "train/loss": 1.0}\n'
        '{"step": 1, "eval/accuracy": 0.6}\n{"step": 2, "eval/accuracy": 0.7}\n'
        '{"step": 2, "train/loss": 1.0}\n{"step": 3, "train/lo'
    )
    assert last_logged_step(tmp_path) == 2
    known = [(step, {"step": step, "eval/accuracy": 0.5 + step / 10}) for step in (0, 1)]
    assert earlier_evaluations(tmp_path, 1) == known, "a later one is of what was discarded"
    file.write_text('{"step": 0, "eval/accu')
    assert earlier_evaluations(tmp_path, 9) == []
