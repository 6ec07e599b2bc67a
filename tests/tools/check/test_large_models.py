"""The table of docs/how-to/gpus.md: what models of 0.5 to 70 billion parameters take on 1, 8 and
16 GPUs, and which of them are refused.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from async_grpo.cluster.placement import PlacementError, place
from async_grpo.config.load import load_config
from async_grpo.rollout.engine.choice import ENGINE
from async_grpo.run.preflight.fit import needed_bytes, too_large
from async_grpo.run.preflight.memory import engine_memory, learner_memory, shape_of, size_text
from async_grpo.tools.check.dry_run import assumed_nodes
from async_grpo.tools.check.known_models import known_config
from async_grpo.weights.transport import resolve_backend

ROOT = Path(__file__).resolve().parents[3]
CLUSTERS = {
    "1": "nodes=1,gpus=1,memory=80",
    "8": "nodes=1,gpus=8,memory=80",
    "16": "nodes=2,gpus=8,memory=80",
}
ROW = re.compile(
    r"^\| (?P<model>\S+/\S+) \| (?P<gpus>\d+) \| `(?P<recipe>\S+\.yaml)`(?P<settings>.*?) \| "
    r"(?P<rank>[\d.]+ GiB) \| (?P<engine>[\d.]+ GiB) \| (?P<outcome>fits|refused) \|$"
)
ROWS = [
    found.groupdict()
    for line in (ROOT / "docs" / "how-to" / "gpus.md").read_text(encoding="utf-8").splitlines()
    if (found := ROW.match(line))
]


def test_the_table_is_there() -> None:
    assert len(ROWS) >= 12
    assert {row["gpus"] for row in ROWS} == set(CLUSTERS)
    assert {row["outcome"] for row in ROWS} == {"fits", "refused"}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model'].split('/')[1]}-{row['gpus']}")
def test_a_row_is_what_the_arithmetic_says(row: dict[str, Any]) -> None:
    overrides = re.findall(r"`([^`]+)`", row["settings"])
    config = load_config(
        ROOT / "configs" / row["recipe"], [f"model.path={row['model']}", *overrides]
    )
    shape = shape_of(config, known_config(row["model"]))
    nodes = assumed_nodes(CLUSTERS[row["gpus"]])
    placement, refused = None, True
    with suppress(PlacementError):
        placement = place(config, nodes)
    colocated = placement.colocated if placement else row["gpus"] == "1"
    backend = resolve_backend(config, device="cuda", colocated=colocated)
    rank = learner_memory(
        config, shape, device="cuda", stage=config.learner.zero_stage, backend=backend
    )
    cache = ENGINE.kv_cache_gb(config, device="cuda", backend=backend)
    engine = engine_memory(config, shape, device="cuda", kv_cache_gb=cache)
    if placement is not None:
        sizes = {node.node_id: node.gpu_bytes for node in nodes}
        refused = any(too_large(config, shape, placement, backend=backend, gpu_bytes=sizes))
        need, there = needed_bytes(config, shape, placement, backend), min(sizes.values())
        assert refused or need < 0.95 * there, "an estimate this near says nothing"
    found = {
        "rank": size_text(rank.total),
        "engine": size_text(engine.weights + engine.rest + (engine.kv_cache or 0)),
        "outcome": "refused" if refused else "fits",
    }
    assert found == {name: row[name] for name in found}


@pytest.mark.parametrize(
    ("section", "gone"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, {"gradients", "optimizer"}),
        ({"offload_optimizer": {"device": "none"}}, set()),
        (
            {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
            {"weights", "gradients", "optimizer"},
        ),
    ],
)
def test_what_is_offloaded_is_not_on_the_gpu(section: dict[str, Any], gone: set[str]) -> None:
    name = "Qwen/Qwen2.5-7B-Instruct"
    plain = load_config(ROOT / "configs" / "gsm8k_8gpu.yaml", [f"model.path={name}"])
    learner = plain.learner.unchecked_copy(update={"deepspeed": {"zero_optimization": section}})
    moved = plain.unchecked_copy(update={"learner": learner})
    shape = shape_of(plain, known_config(name))
    need = learner_memory(moved, shape, device="cuda", stage=3)
    parts = ("weights", "gradients", "optimizer")
    assert {part for part in parts if not getattr(need, part)} == gone
