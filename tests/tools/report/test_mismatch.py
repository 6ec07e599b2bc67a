"""The table of learner against engines: each cause with its weight in every step, and what was not
measured left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_grpo.tools.report.data import RunData, read_run
from async_grpo.tools.report.mismatch import COLUMNS, NOTHING, mismatch
from async_grpo.tools.report.page import page

CONFIG = """
replay: {max_staleness: 4}
rollout: {top_k: 40, top_p: 0.9}
model: {dtype: bfloat16, lm_head_fp32: true}
algorithm: {anchor: recomputed, importance: {level: token}, clip_schedule: {name: harmonic}}
weight_sync: {kv_cache: keep}
"""


def step(number: int, **causes: tuple[float, float, float]) -> dict[str, Any]:
    """A learner step's line: mean, largest and share of each cause."""
    line: dict[str, Any] = {"step": number, "time": float(number), "time/step": 1.0}
    for cause, (mean, largest, share) in causes.items():
        name = f"weights/{cause}_error"
        line[f"{name}_share"] = share
        line |= {name: mean, f"{name}_max": largest} if share else {}
    return line


def run_of(directory: Path, *lines: dict[str, Any]) -> RunData:
    (directory / "config.yaml").write_text(CONFIG)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(directory)


def test_a_step_has_the_weight_that_the_cause_has_in_it(tmp_path: Path) -> None:
    none = 0.0, 0.0, 0.0
    data = run_of(
        tmp_path,
        step(1, sampler=(0.01, 0.5, 1.0), kv_cache=none, version=none),
        step(2, sampler=(0.04, 0.25, 0.5), kv_cache=none, version=(0.3, 2.0, 0.5)),
    )
    [equal, older] = mismatch(data)
    assert equal == (
        "equal weights: dtype, kernels",
        "75.0% of tokens",
        "0.02",
        "0.5",
        "model.dtype is bfloat16, model.lm_head_fp32 is True, algorithm.importance.level is token",
    )
    assert older[:4] == ("older weights: version", "25.0% of tokens", "0.3", "2")
    assert "replay.max_staleness is 4, algorithm.anchor is recomputed" in older[4]
    assert older[4].endswith("algorithm.clip_schedule is harmonic")


def test_caches_and_routes_have_rows_where_they_were_measured(tmp_path: Path) -> None:
    line = step(1, kv_cache=(0.02, 0.1, 0.25)) | {"train/routes_changed": 0.03}
    [caches, routes] = mismatch(run_of(tmp_path, line))
    assert caches[1:4] == ("25.0% of tokens", "0.02", "0.1")
    assert caches[4].startswith("weight_sync.kv_cache is keep")
    assert routes[:2] == ("other experts: routing", "3.00% of picks")
    assert len(routes) == len(caches) == len(COLUMNS)


def test_groups_whose_sampled_tokens_were_in_no_known_set_have_a_row(tmp_path: Path) -> None:
    """The metric counts from the run's start."""
    known = [step(1) | {"rollout/kept_overflows": 2.0}, step(2) | {"rollout/kept_overflows": 3.0}]
    [sets] = mismatch(run_of(tmp_path, *known))
    assert sets[:4] == ("sampled from unknown sets: support", "3 groups again", "", "")
    assert sets[4] == "rollout.top_k is 40, rollout.top_p is 0.9, model.lm_head_fp32 is True"


def test_what_was_not_measured_has_no_row(tmp_path: Path) -> None:
    """A run of before, which knew the mean alone; and a mean that was no number."""
    before = step(1) | {"weights/sampler_error": 0.01}
    broken = step(2, version=(0.1, 0.2, 0.5)) | {"weights/version_error": None}
    assert mismatch(run_of(tmp_path, before, broken)) == []


def test_the_page_has_the_table_or_says_that_there_is_none(tmp_path: Path) -> None:
    for line, said in ((step(1, version=(0.1, 0.2, 1.0)), "older weights"), (step(1), NOTHING)):
        text = page(run_of(tmp_path, line), pictures=[], notes={}, config_text="")
        assert said in text.partition('<section id="mismatch">')[2].partition("</section>")[0]
