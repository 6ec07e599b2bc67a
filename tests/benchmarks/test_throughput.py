"""The throughput benchmarks run, compare like with like, and add up right; their figures are their
own business.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import startup
from benchmarks.learner import __main__ as learner
from benchmarks.learner.arm import Batch, Work, padding_of
from benchmarks.rollout import __main__ as rollout
from benchmarks.startup import BEFORE, FIRST
from benchmarks.tails import MODELS, TailModel
from benchmarks.throughput import __main__ as throughput
from benchmarks.throughput.__main__ import Table, net_tokens_per_s
from benchmarks.throughput.run import summed

CONFIG = "benchmarks/tails.yaml"


# ---- they run ----


@pytest.mark.slow  # packed rows against rows alone: tests/learner/test_learner.py
def test_the_learner_benchmark_runs_and_a_packed_row_is_the_row_alone(tmp_path: Path) -> None:
    learner.main(["--smoke", "--out", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())["smoke"]
    [arm] = found["arms"]
    assert arm["stage"] == 1 and arm["micro_batches"] > 1 and len(arm["turns"]) == 2
    assert 0 < arm["apart"] <= 1e-5, "log-probs of packed rows against the same rows alone"
    assert arm["padding"] == 0


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_rollout_benchmark_runs_and_both_sides_generate_the_same(tmp_path: Path) -> None:
    rollout.main(["--smoke", "--out", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())["smoke"]
    assert found["same"] == found["compared"] == 2 * rollout.SMOKE_LOAD.groups
    assert [one["tokens"] for one in found["actor"]] == [one["tokens"] for one in found["bare"]]
    assert 1 < found["mean_tokens"] < found["longest_tokens"] <= rollout.SMOKE_LOAD.longest


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_the_throughput_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    throughput.main([CONFIG, "--smoke", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["part"] for row in rows] == ["generation", "system 1", "learner"]
    throughput.main([CONFIG, "--smoke", "--out", str(out)])
    assert json.loads(out.read_text())["rows"] == rows, "what is there is not measured again"
    assert "max_staleness 1" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_startup_benchmark_runs(tmp_path: Path) -> None:
    startup.main(["--smoke", "--out", str(tmp_path / "out.json")])
    [start] = json.loads((tmp_path / "out.json").read_text())["starts"]
    assert (
        sum(start["phases"].values()) == pytest.approx(start["to_first_step"])
        and start["total"] > start["to_first_step"]
    )


# ---- they add up ----


def test_the_phases_of_a_start_add_up_to_its_first_step() -> None:
    lines = [
        (2.0, "run smoke: 1 learner step; everything it writes is in /tmp/run"),
        (6.0, "starting Ray ... 3.5 s"),
        (6.1, "a note"),
        (16.4, "starting engines and learner ... 10 s so far"),
        (16.5, "starting engines and learner ... 10.0 s"),
        (18.0, "step 1/1  score 0.50"),
        (20.0, "finished"),
    ]
    found = startup.read(lines, 21.0)
    assert found.phases == {
        BEFORE: 2.0,
        "between phases": 1.0,
        "starting Ray": 3.5,
        "starting engines and learner": 10.0,
        FIRST: 1.5,
    }
    assert (found.to_first_step, found.total) == (18.0, 21.0)
    with pytest.raises(RuntimeError, match="no first step"):
        startup.read(lines[:5], 21.0)


def step(number: int, at: float) -> dict[str, float]:
    """A line of metrics.jsonl."""
    return {
        "step": number,
        "time": at,
        "time/train": 1.0,
        "time/wait": 0.5,
        "rollout/response_tokens": 100.0 * number,
        "rollout/response_length": 50.0,
        "rollout/response_length_max": 60.0 + number,
        "train/staleness_mean": 1.0,
        "time/learner/idle": 0.3 * number,
        "time/engine/blocked": 0.4 * number,
    }


def test_a_run_is_summed_up_between_two_steps() -> None:
    found = summed({number: step(number, 2.0 * number) for number in range(1, 6)}, skip=2, last=4)
    assert (found["seconds"], found["steps"], found["tokens"], found["samples"]) == (
        4.0,
        2,
        700.0,
        14.0,
    )
    assert found["longest"] == 64.0 and found["train_s"] == 1.0
    assert found["shares"] == pytest.approx(
        {"train": 0.5, "wait": 0.25, "learner/idle": 0.15, "engine/blocked": 0.2}
    )


def test_overlap_is_measured_against_the_slower_bare_part_of_its_round() -> None:
    shares = {"wait": 0.0}
    rows = [
        {
            "part": part,
            "round": number,
            "tokens": tokens,
            "samples": 1,
            "seconds": 10.0,
            "steps": 5,
            "train_s": 2.0,
            "lag_mean": 1.0,
            "shares": shares,
            "cpu": {"learner": 0.9, "engine": 0.8, "ray": 0.1, "driver": 0.1},
            "foreign": 0.0,
            "until_live_s": 0.1,
            "lengths": [[10] * 7 + [20], [30] * 8],
        }
        for number, scale in ((0, 1), (1, 2))
        for part, tokens in (
            ("generation", 2_000 * scale),
            ("learner", 1_000 * scale),
            ("system 0", 500 * scale),
            ("system 1", 900 * scale),
        )
    ]
    table = Table(rows, 2)
    assert table._efficiency("system 1", net=False) == pytest.approx([0.9, 0.9])
    assert table._efficiency("system 1", net=True) == pytest.approx([1.0, 1.0]), (
        "the others took 0.2 CPUs, 0.1 of each core"
    )
    assert net_tokens_per_s(rows[0], 2) == pytest.approx(200 / 0.9)
    [line] = [
        line for line in table.lines() if line.startswith("| max_staleness 1 |") and "1.80" in line
    ]
    assert "0.900 (0.900 to 0.900)" in line
    assert [line.endswith("| met |") for line in table.aims()[-2:]] == [True, True]


def test_the_padding_that_is_reported_is_that_of_the_packs() -> None:
    batch = Batch(Work(groups=2, group_size=3, mean=8.0, longest=32, budget=64, vocabulary=50))
    assert batch.tokens == sum(
        len(group.prompts[0]) + len(row.response_ids)
        for group in batch.groups.values()
        for row in group.rows
    )
    packed, attention = padding_of(batch.plan, batch)
    assert packed == 0 and 0 <= attention < 0.5
    lengths = sorted(
        (row.prompt_length + row.length - 1 for row in batch.plan.rows.values()), reverse=True
    )
    padding = sum(sum(max(part) - length for length in part) for part in in_buckets(lengths))
    whole = Batch(Work(groups=2, group_size=3, mean=8.0, longest=32, budget=10_000, vocabulary=50))
    assert padding_of(whole.plan, whole)[1] == pytest.approx(padding / (padding + sum(lengths)))


def in_buckets(lengths: list[int]) -> list[list[int]]:
    """Descending lengths, cut as soon as a row is half as long as the longest or the padding
    exceeds 64.
    """
    parts = [[lengths[0]]]
    for length in lengths[1:]:
        part = parts[-1]
        if 2 * length <= part[0] or sum(part[0] - other for other in [*part, length]) > 64:
            parts.append([])
        parts[-1].append(length)
    return parts


# ---- the workload ----


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_size_in_its_name(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name].build()
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(
        float(name.removesuffix("M")), rel=0.2
    )


def test_every_token_ends_a_response_with_about_the_same_probability() -> None:
    torch.manual_seed(0)
    shape = TailModel("small", 128, 2, 512)
    model = shape.build()
    with torch.no_grad():
        chances = (
            model(torch.randint(3, 512, (8, 64))).logits.softmax(-1)[..., shape.end_tokens].sum(-1)
        )
    assert len(shape.end_tokens) == 7 and float(chances.mean()) == pytest.approx(1 / 70, rel=0.15)
    assert float(chances.std()) < 0.25 * float(chances.mean())
