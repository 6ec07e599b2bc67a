"""What a run of before has written is read under the names of now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_grpo.observe.console.status_file import read_status
from async_grpo.observe.tracking.delivery import Delivery
from async_grpo.old_names import metric
from async_grpo.tools.report.data import read_run
from async_grpo.tools.report.facts import bottleneck, tiles
from async_grpo.tools.report.plots import times_by_cause
from tests.support import verbs
from tests.support.metric_page import documented
from tests.support.snippets import ROOT

ENDED = ROOT / "tests" / "data" / "recorded" / "ended"
OLD = {
    "train/lag_mean": "train/staleness_mean",
    "train/lag_max": "train/staleness_max",
    "train/lag_span": "train/staleness_span",
    "train/lag_17-32/lag_span": "train/staleness_17-32/staleness_span",
    "train/lag_131073+/token_share": "train/staleness_131073+/token_share",
    "train/lag_3-4/row_length": "train/staleness_3-4/sequence_length",
    "train/row_length": "train/sequence_length",
    "train/rejected_rows": "train/rejected_sequences",
    "rollout/masked_rows": "rollout/masked_responses",
    "rollout/mixed_version_rows": "rollout/mixed_version_responses",
    "rollout/versions_per_row": "rollout/versions_per_response",
    "replay/lag_mean": "replay/staleness_mean",
    "replay/starved_s": "replay/learner_idle_s",
    "time/learner/starved": "time/learner/idle",
    "time/learner/publishing": "time/learner/weight_sync",
    "time/publish": "time/weight_sync",
    "time/learner_anchor": "time/learner_proximal",
    "weights/publications": "weights/syncs",
    "plan/lag_mean": "plan/staleness_mean",
    "plan/error_lag": "plan/error_staleness",
    "train/lag_of_mine": "train/lag_of_mine",
    "mine/row_length": "mine/row_length",
    "train/loss/row_length": "train/loss/row_length",
    "train/loss/my_rejected_rows": "train/loss/my_rejected_rows",
}


def lines() -> list[dict[str, float]]:
    """The recorded ones."""
    return [json.loads(line) for line in (ENDED / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", OLD)
def test_a_name_of_before_has_one_of_now(name: str) -> None:
    assert metric(name) == OLD[name] == metric(OLD[name])


def test_every_recorded_name_of_before_becomes_one_of_the_page() -> None:
    names = {name for line in lines() for name in line}
    renamed = {metric(name) for name in names if metric(name) != name}
    assert len(renamed) > 40 and {name for name in renamed if not documented(name)} == set()
    assert not any("/lag_" in name for name in map(metric, names))


def test_the_report_reads_a_run_of_before() -> None:
    data, steps = read_run(ENDED), [line for line in lines() if "time/step" in line]
    assert data.series("train/staleness_mean")[1] == [line["train/lag_mean"] for line in steps]
    assert data.lag_max == max(line["train/lag_max"] for line in steps) == 1
    assert data.buckets("sequence_length") == ["0", "1"]
    idle, sync = (steps[-1][f"time/learner/{name}"] for name in ("starved", "publishing"))
    learner = dict(times_by_cause(data))["learner time"]
    assert (learner["idle"], learner["weight_sync"]) == (idle, sync) and idle > 0 < sync
    assert not learner.keys() & {"starved", "publishing"}
    assert data.totals["weights/syncs"] == 3


def test_a_tracker_gets_the_names_of_now() -> None:
    points = Delivery._points(Delivery, json.dumps(lines()[0]).encode(), every=True)
    sent = {point.name: point.value for point in points}
    assert sent["train/staleness_mean"] == 0 and "time/weight_sync" in sent
    assert not any("/lag_" in name or name.endswith("_rows") for name in sent)


def test_a_status_of_nothing_is_none(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("")
    (tmp_path / "metrics.jsonl").write_text("")
    data = read_run(tmp_path)
    assert not data.status and tiles(data)[0] == "How the run ended is not known."


def test_a_status_of_before_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads((ENDED / "status.json").read_text())
    facts["verdict"] = {"kind": "engines", "text": "the engines limit"}
    (tmp_path / "status.json").write_text(json.dumps(facts))
    (tmp_path / "metrics.jsonl").write_text("")
    read = read_status(tmp_path)
    assert "verdict" not in read and read["metrics"]["train/staleness_mean"] == 1
    assert bottleneck(read_run(tmp_path)) == "What limits it: the engines limit."
    assert verbs.status([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "bottleneck  the engines limit" in shown and "staleness mean 1.00   max 1" in shown
