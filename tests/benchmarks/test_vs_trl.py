"""The comparison with TRL: both sides get the same work, and its figures add up; that both sides
run is a slow test.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import schema
from async_grpo.tasks.arithmetic import Arithmetic
from async_grpo.tasks.jsonl import Jsonl
from benchmarks.harness import ROOT
from benchmarks.tails import Tails
from benchmarks.vs_trl import __main__ as vs_trl
from benchmarks.vs_trl import environment as vs_trl_environment
from benchmarks.vs_trl import side as vs_trl_side
from benchmarks.vs_trl.__main__ import OURS, THEIRS, our_row, pairs, seconds_to, table, their_row
from benchmarks.vs_trl.workloads import SHORT, WORKLOADS, smoke

# ---- the same work ----


def responses() -> list[str]:
    """Texts as a model of these workloads writes them."""
    draw = random.Random(5)
    pieces = [*"0123456789 ab", "<17>", "<204>", "<eos>", "\n"]
    return [
        "",
        " 59 ",
        "59",
        *("".join(draw.choices(pieces, k=draw.randint(1, 30))) for _ in range(200)),
    ]


@pytest.mark.parametrize(("rule", "task"), [("exact", Arithmetic), ("checksum", Tails)])
def test_both_sides_score_alike(rule: str, task: Any) -> None:
    scores = [
        task(schema.TaskConfig(), 0).score(text, "59").rewards["correct"] for text in responses()
    ]
    assert [vs_trl_side.RULES[rule](text, "59") for text in responses()] == scores
    assert 0 < sum(scores) < len(scores)


def write_rows(directory: Path) -> None:
    """The questions for the pretrained model."""
    script = ROOT / "examples" / "real_model" / "make_rows.py"
    subprocess.run([sys.executable, str(script), str(directory)], check=True, timeout=60)


def test_a_sum_is_scored_alike(tmp_path: Path) -> None:
    write_rows(tmp_path)
    settings = schema.TaskConfig(
        name="jsonl", train=str(tmp_path / "sums.jsonl"), options={"match": "contains"}
    )
    task = Jsonl(settings, 0)
    reference = task.train(0).reference
    right = reference["answer"]
    for text in ("", right, f" it is {right}.", f"{right}0", right[:-1], "about 7"):
        score = task.score(text, reference).rewards["correct"]
        assert vs_trl_side.RULES["contains"](text, reference) == score
        assert score == float(right in text)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_other_side_gets_our_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = smoke(WORKLOADS[name])
    monkeypatch.setattr("benchmarks.vs_trl.workloads.model_of", lambda config: "model")
    write_rows(tmp_path)
    data = [
        f"task.train={tmp_path / 'sums.jsonl'}",
        f"task.eval={tmp_path / 'sums_held_out.jsonl'}",
    ]
    monkeypatch.setattr("benchmarks.vs_trl.workloads.real_model", lambda: data)
    work, config = workload.work(3, tmp_path), workload.load(3, tmp_path)
    assert (work["seed"], work["lr"], work["response_length"]) == (
        3,
        config.learner.lr,
        config.rollout.response_length,
    )
    assert (
        work["samples"] == config.rollout.rollout_batch_size * work["group_size"]
        and work["samples"] % work["micro_batch"] == 0
    )
    clip_high = 0.28 if name == "short" else 0.2
    assert (work["clip_low"], work["clip_high"]) == (0.2, clip_high)
    assert (
        len(work["problems"]) == workload.steps * config.rollout.rollout_batch_size
        and len(work["held_out"]) == workload.problems
    )
    algorithm = config.algorithm
    assert (algorithm.adv_estimator.name, algorithm.policy_loss.name, algorithm.loss_agg_mode) == (
        "grpo",
        "ppo_clip",
        "token-mean",
    )
    assert (
        not algorithm.use_kl_loss
        and config.updates_per_step == 1
        and config.learner.warmup_steps == 0
    )
    json.dumps(work)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_the_last_step_is_evaluated_and_there_is_something_to_measure(
    workload: vs_trl.Workload,
) -> None:
    for one in (workload, smoke(workload)):
        assert (
            one.target is None or one.steps % one.evaluate_every == 0
        ) and one.skip < vs_trl._last(one) < one.steps


# ---- figures ----

SMALL = replace(SHORT, steps=6, skip=2, evaluate_every=2, target=0.9, aim=1.0)


def our_lines() -> list[dict[str, Any]]:
    """Six steps of a second each, the first of five; 16 responses of 5 tokens; as in
    metrics.jsonl.
    """
    lines: list[dict[str, Any]] = [{"step": 0, "time": 100.0, "eval/accuracy_greedy": 0.5}]
    for step in range(1, 7):
        lines.append(
            {
                "step": step,
                "time": 104.0 + step,
                "time/step": 5.0 if step == 1 else 1.0,
                "time/train": 0.5,
                "rollout/response_tokens": 80.0,
                "rollout/response_length": 5.0,
                "rollout/response_length_max": 6.0,
                "train/staleness_mean": 1.0,
                "train/padding": 0.0,
            }
        )
    return lines


def their_lines() -> list[dict[str, Any]]:
    """Six steps of two seconds each."""
    steps = [
        {"step": step, "time": 2.0 * step, "samples": 16, "tokens": 80} for step in range(1, 7)
    ]
    return [
        {"step": 0, "accuracy": 0.5},
        {"began": 107.0},
        *steps[:4],
        {"step": 4, "accuracy": 0.92},
        *steps[4:],
        {"step": 6, "accuracy": 0.85},
    ]


def rows() -> list[vs_trl.Row]:
    mine = our_row(SMALL, 90.0, our_lines(), [(0, 0.5), (2, 0.91), (4, 0.89), (6, 0.95)])
    other = their_row(SMALL, 100.0, their_lines())
    return [
        {"workload": "short", "seed": 0, "side": side} | row
        for side, row in ((OURS, mine), (THEIRS, other))
    ]


def test_rates_are_of_the_same_steps_and_clocks_begin_with_training() -> None:
    mine, other = rows()
    assert (mine["start_s"], mine["seconds"], mine["samples"], mine["tokens"]) == (
        10.0,
        2.0,
        32.0,
        160.0,
    )
    assert (other["start_s"], other["seconds"], other["samples"], other["tokens"]) == (
        7.0,
        4.0,
        32,
        160,
    )
    assert mine["clock"] == [5.0, 6.0, 7.0, 8.0, 9.0, 10.0] and other["clock"] == [
        2.0,
        4.0,
        6.0,
        8.0,
        10.0,
        12.0,
    ]


def test_time_to_an_accuracy_is_that_of_the_first_evaluation_which_has_it() -> None:
    mine, other = rows()
    assert [seconds_to(mine, target) for target in (0.5, 0.9, 0.95, 0.96)] == [0.0, 6.0, 10.0, None]
    assert seconds_to(other, 0.9) == 8.0


def test_sides_are_compared_seed_by_seed() -> None:
    mine, other = rows()
    alone = mine | {"seed": 1}
    longer = other | {"seed": 1, "steps": 7}
    assert pairs([mine, other, alone, longer], SMALL) == [(mine, other)], (
        "no pair across seeds or lengths of runs"
    )
    lines = table([mine, other, alone, longer], SMALL)
    assert "| short: 1 times TRL's samples/s | 2.00 (2.00 to 2.00) | met |" in lines
    assert any("1.33 (1.33 to 1.33)" in line for line in lines), "8 seconds over 6"
    assert any(
        line.endswith("| not met |") for line in table([mine, other], replace(SMALL, aim=2.1))
    )
    assert table([mine], SMALL) == []
    assert not any("%" in line for line in table([mine, other], replace(SMALL, target=None))), (
        "only rates are compared"
    )


# ---- the environment ----


def test_the_environment_has_our_torch_and_is_complete_only_with_its_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = vs_trl_environment.requirements()
    assert needed[0] in Path(
        vs_trl_environment.install.ROOT, "packages.toml"
    ).read_text() and needed[0].startswith("torch==")
    assert all("==" in line for line in needed) and any(line.startswith("trl==") for line in needed)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert not vs_trl_environment.complete(tmp_path)
    (tmp_path / vs_trl_environment.STAMP).write_text(json.dumps(vs_trl_environment.wanted()))
    assert vs_trl_environment.complete(tmp_path)
    monkeypatch.setattr(vs_trl_environment, "requirements", lambda: [*needed, "more==1"])
    assert not vs_trl_environment.complete(tmp_path), "other pins, another environment"


def test_nothing_is_installed_into_a_foreign_place(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="own environment"):
        vs_trl_environment.ensure(Path(sys.prefix))
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SystemExit, match="no Python environment"):
        vs_trl_environment.ensure(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


# ---- both sides run ----


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    not vs_trl_environment.complete(vs_trl_environment.DEFAULT.expanduser()),
    reason="TRL's environment has not been made",
)
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_comparison_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    vs_trl.main(["--smoke", "--workload", name, "--out", str(out)])
    mine, other = json.loads(out.read_text())["rows"]
    assert (mine["side"], other["side"]) == (OURS, THEIRS) and mine["samples"] == pytest.approx(
        other["samples"]
    )
    steps = [0, 3, 6] if name == "short" else []
    assert [step for step, _ in mine["curve"]] == [step for step, _ in other["curve"]] == steps
    if name == "short":
        accuracy = [row["curve"][0][1] for row in (mine, other)]
        assert accuracy[0] == pytest.approx(accuracy[1], abs=1 / 64) and accuracy[0] > 0.2, (
            "the same weights, the same problems, greedily"
        )
    assert "times TRL's samples/s" in capsys.readouterr().out
