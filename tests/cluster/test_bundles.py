"""A run in the placement group of its caller: what it asks for, and who goes where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from async_grpo.cluster import session
from async_grpo.cluster.placement import (
    Bundle,
    Placement,
    PlacementError,
    another,
    bundles,
    place_given,
)
from async_grpo.cluster.session import RaySession
from async_grpo.config.schema import Config


def settings(**values: Any) -> Config:
    return Config.model_validate(
        {"run": {"total_steps": 1}, "model": {"path": "m"}, "rollout": {"rollout_batch_size": 4}}
        | values
    )


def placed(config: Config, asked: list[dict[str, float]]) -> Placement:
    """Place a run in what it has asked for, a node per two bundles."""
    given = [Bundle(f"n{at // 2}", one["CPU"], one.get("GPU", 0.0)) for at, one in enumerate(asked)]
    return place_given(config, given)


def test_what_is_asked_for_is_what_is_needed_on_cpu() -> None:
    config = settings(
        learner={"ranks": 2}, cluster={"device": "cpu", "rollout_actors": {"min": 1, "max": 3}}
    )
    asked = bundles(config, gpus=0.0)
    assert asked == [{"CPU": 1.0}] * 6
    found = placed(config, asked)
    assert (found.device, found.colocated, found.given) == ("cpu", False, True)
    assert [slot.bundle for slot in (*found.learners, *found.engines)] == [1, 2, 3, 4, 5]
    assert [slot.node_id for slot in found.engines] == ["n1", "n2", "n2"]
    assert all(not slot.cores for slot in (*found.learners, *found.engines))
    assert another(config, found, [], found.engines) is None


def test_what_is_asked_for_is_what_is_needed_on_gpus() -> None:
    config = settings(
        learner={"ranks": 2},
        cluster={"engine": {"tensor_parallel_size": 4}, "rollout_actors": {"min": 2}},
    )
    asked = bundles(config, gpus=1.0)
    rank, engine = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 4.0}
    assert asked == [{"CPU": 1.0}, rank, rank, engine, engine]
    found = placed(config, asked)
    assert (found.device, found.colocated) == ("cuda", False)
    assert [slot.gpus for slot in (*found.learners, *found.engines)] == [1.0, 1.0, 4.0, 4.0]


def test_colocated_ranks_and_engines_share_bundles() -> None:
    config = settings(learner={"ranks": 2}, cluster={"device": "cuda", "layout": "colocated"})
    asked = bundles(config, gpus=1.0)
    assert asked == [{"CPU": 1.0}, *[{"CPU": 1.0, "GPU": 1.0}] * 2]
    found = placed(config, asked)
    assert found.colocated and found.learners == found.engines
    assert [(slot.bundle, slot.gpus, slot.cpus) for slot in found.engines] == [
        (1, 0.5, 0.5),
        (2, 0.5, 0.5),
    ]


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ([{"CPU": 1.0}] * 2, {}),
        ([{"CPU": 1.0}, {"CPU": 0.5}, {"CPU": 1.0}], {}),
        ([{"CPU": 1.0}] * 3, {"cluster": {"device": "cuda"}}),
        ([{"CPU": 1.0}] * 3, {"cluster": {"rollout_actors": {"min": 2}}}),
        (
            [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}],
            {"cluster": {"engine": {"tensor_parallel_size": 2}}},
        ),
    ],
)
def test_a_group_that_does_not_fit_is_refused(
    given: list[dict[str, float]], values: dict[str, Any]
) -> None:
    with pytest.raises(PlacementError, match=r"it needs \{'CPU': 1.0\}, .*notebook.md"):
        placed(settings(**values), given)


@pytest.mark.parametrize(
    ("captures", "bundle_count", "lives_in_it"),
    [(True, 3, True), (False, 3, False), (True, 1, False)],
)
def test_a_run_lives_in_a_group_that_captures_children_and_has_bundles_for_them(
    captures: bool, bundle_count: int, lives_in_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = SimpleNamespace(bundle_count=bundle_count)
    context = SimpleNamespace(should_capture_child_tasks_in_placement_group=captures)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(session, "get_current_placement_group", lambda: group)
    joined = RaySession.open(processes=2)
    assert joined.lent and joined.given is (group if lives_in_it else None)
