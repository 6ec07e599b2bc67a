"""The examples of docs/how-to/extend.md as a user would take them: written to files, named in a
configuration, and run.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_grpo.algo import catalog
from async_grpo.algo import metrics as algo_metrics
from async_grpo.algo.filters import FilterRule
from async_grpo.algo.importance import importance_weights
from async_grpo.algo.losses import Clip, policy_loss
from async_grpo.algo.metrics import MetricSums
from async_grpo.algo.rewards import Shaping
from async_grpo.config import yaml12
from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.learner.learner import Learner
from async_grpo.observe.tracking import shown
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.rules import QueueSettings
from async_grpo.run import planning
from async_grpo.run.planning import RowMath, shaping
from async_grpo.wire import codec
from tests.support.algo_case import tokens
from tests.support.frames import frame_of
from tests.support.learners import set_rank
from tests.support.models import write_model
from tests.support.processes import free_port
from tests.support.registers import registers_put_back

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "extend.md"
LOSSES = ["soft_clip", "clipped"]
OTHERS = ["median", "fading", "brevity", "rambling"]
WEIGHTS = {"correct": 1.0}
TIMES = {"queued": 0.0, "first_token": 0.5, "done": 1.0, "scored": 1.5}


def examples() -> dict[str, tuple[str, str]]:
    """Module name -> (its code, the settings that use it)."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"```python\n# (\w+)\.py\n([^`]*)```\n+```yaml\n(.*?)```", text, re.DOTALL)
    return {name: (code, settings) for name, code, settings in found}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with the examples' modules, from which Python imports; registers are put back."""
    directory = tmp_path_factory.mktemp("extending")
    for name, (code, _) in examples().items():
        (directory / f"{name}.py").write_text(code, encoding="utf-8")
    with registers_put_back():
        sys.path.insert(0, str(directory))
        yield directory
        sys.path.remove(str(directory))
    for name in examples():
        sys.modules.pop(name, None)


def test_the_test_of_the_page_passes(home: Path) -> None:
    [code] = re.findall(r"```python\n# clipped_test\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    known: dict[str, Any] = {}
    exec(code, known)
    known["test_an_old_token_is_clipped_earlier"]()


def configured(home: Path, *names: str, model: str = "m", **sections: Any) -> Config:
    """The settings of these examples together, through a file."""
    merged: dict[str, Any] = {
        "run": {"total_steps": 2, "dir": str(home / "run")},
        "model": {"path": model},
        "rollout": {"rollout_batch_size": 2, "group_size": 2},
        **sections,
    }
    for name in names:
        for section, values in yaml12.read(examples()[name][1])[0].items():
            here = merged.setdefault(section, {})
            for key, value in values.items():
                if isinstance(value, list):
                    here[key] = [*here.get(key, []), *value]
                elif isinstance(value, dict):
                    here[key] = {**here.get(key, {}), **value}
                else:
                    here[key] = value
    path = home / f"{'_'.join(names)}.yaml"
    path.write_text(yaml12.write(merged), encoding="utf-8")
    return load_config(path)


def test_there_is_one_short_example_of_every_kind() -> None:
    assert list(examples()) == [*LOSSES, *OTHERS]
    for code, settings in examples().values():
        assert len(code.strip().splitlines()) + len(settings.strip().splitlines()) <= 25
    registered = {re.search(r"@register_(\w+)\(", code)[1] for code, _ in examples().values()}
    assert registered == set(catalog.KINDS)


def batch_of(*groups: tuple[float, ...], steps: int = 1) -> tuple[codec.Batch, list[bytes]]:
    frames = [
        frame_of(codec.GroupTicket(number, 1, 0), values=values, times=TIMES)
        for number, values in enumerate(groups)
    ]
    return codec.Batch(steps, tuple(codec.decode_meta(frame) for frame in frames)), frames


def test_the_estimator_gives_the_advantages_of_the_rows(home: Path) -> None:
    rows = RowMath(
        configured(home, "median", rollout={"rollout_batch_size": 1, "group_size": 3}), WEIGHTS
    )
    batch, _ = batch_of((0.0, 0.25, 1.0), (1.0, 1.0, 1.0))
    values, _ = rows.values(batch, {})
    assert [values[key].value for key in sorted(values)] == [-0.25, 0.0, 0.75, 0.0, 0.0, 0.0]


def test_the_shaping_takes_from_the_reward(home: Path) -> None:
    made = shaping(configured(home, "brevity"), WEIGHTS)
    catalog.import_plugins(["brevity"])
    assert made.shape({"correct": 1.0}, 10) == pytest.approx(0.9)
    assert made.shape({"correct": 0.0}, 10) == 0.0


def test_the_loss_and_the_weights_are_those_of_the_formulas(home: Path) -> None:
    config = configured(home, "soft_clip", "fading")
    catalog.import_plugins(config.algorithm.plugins)
    case, chosen = tokens(0, 3, 4), config.algorithm.policy_loss
    loss, _ = policy_loss(
        "soft_clip",
        **case,
        clip=Clip(0.2, 0.2),
        options=catalog.POLICY_LOSSES.options("soft_clip", chosen.values),
    )
    x = case["logprobs"] - case["anchor_logprobs"]
    want = -case["advantages"] * (1 + 0.3 * torch.tanh(x / 0.3)) * (case["loss_mask"] != 0)
    assert torch.allclose(loss, want)
    weights = importance_weights(
        case["anchor_logprobs"],
        case["behavior_logprobs"],
        case["loss_mask"],
        level="token",
        mode="fading",
        lower=0.0,
        upper=2.0,
        staleness=case["staleness"],
        options=catalog.IMPORTANCE.options("fading", config.algorithm.importance.mode.values),
    )
    ratio = (case["anchor_logprobs"] - case["behavior_logprobs"]).exp()
    want = torch.where(case["loss_mask"] != 0, ratio * 0.8 ** case["staleness"], 1)
    assert torch.allclose(weights, want)


async def test_the_queue_rejects_what_the_filter_does(home: Path) -> None:
    config = configured(home, "rambling")
    custom = config.replay.filter_groups.custom
    assert custom is not None
    queue = ReplayQueue(
        QueueSettings(
            rollout_batch_size=2,
            max_staleness=0,
            total_steps=3,
            group_size=2,
            max_attempts=3,
            max_num_gen_batches=0,
            shaping=Shaping(WEIGHTS, 64),
            filter=FilterRule(custom=custom.name, options=custom.values),
            plugins=tuple(config.replay.plugins),
        )
    )
    short, long = await queue.acquire("a", 0, [], 2)
    verdicts = await queue.put(
        "a", [frame_of(short, versions=(0,)), frame_of(long, versions=(0, 0))]
    )
    assert [(one.status, one.reason) for one in verdicts] == [
        ("accepted", ""),
        ("rejected", "rambling"),
    ]
    await queue.close()


@pytest.mark.parametrize("loss", LOSSES)
def test_all_of_them_train_two_steps(loss: str, home: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "policy")
    config = configured(home, loss, *OTHERS, model=model, learner={"lr": 1e-3})
    set_rank(0, 1, free_port())
    by_id: dict[int, bytes] = {}
    learner = Learner(
        config,
        model_dir=model,
        fetch=lambda _, ids: codec.pack_frames([by_id[group_id] for group_id in ids]),
        device="cpu",
        total_updates=2 * config.updates_per_step,
    )
    try:
        rows = RowMath(config, WEIGHTS)
        for step in (1, 2):
            batch, frames = batch_of((0.0, 1.0), (1.0, 0.5), steps=step)
            by_id.update(enumerate(frames))
            [plan], coef = rows.plans(batch), rows.kl_coef
            values, metrics = rows.values(batch, learner.prepare(plan))
            metrics |= MetricSums.from_wire(learner.train(values, coef)).means()
            assert all(np.isfinite(value) for value in metrics.values())
            assert metrics["train/grad_norm"] > 0
            assert "train/importance_weight" in metrics
            assert metrics["train/staleness_max"] == step - 1
            assert ("train/loss/stale_clipped" in metrics) is (loss == "clipped")
    finally:
        learner.close()


def test_a_metric_of_the_ranks_is_added_in_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column where tokens are measured, and its name among the charts beside it."""
    measured = algo_metrics._trust_region
    monkeypatch.setattr(
        algo_metrics, "_trust_region", lambda found: {**measured(found), "flips": found["ratio"]}
    )
    sums, case = MetricSums(), tokens(0, 3, 4)
    loss, diagnostics = policy_loss("ppo_clip", **case, clip=Clip(0.2, 0.2))
    known = {name: value for name, value in case.items() if name != "loss_mask"}
    algo_metrics.loss_metrics(
        sums,
        token_loss=loss,
        diagnostics=diagnostics,
        recomputed=False,
        mask=case["loss_mask"],
        **known,
    )
    row = MetricSums.from_wire(sums.to_wire()).means()
    assert row["train/flips"] == row["train/ratio"]
    assert any(re.fullmatch(r"train/staleness_\d+/flips", name) for name in row)
    with monkeypatch.context() as patched:
        patched.setattr(algo_metrics, "CHARTS", f"{algo_metrics.CHARTS}|flips")
        assert importlib.reload(shown).is_shown("train/flips", 0.5)
    assert not importlib.reload(shown).is_shown("train/flips", 0.5)  # in metrics.jsonl alone


def test_a_metric_of_the_driver_is_added_in_one_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = planning._constant_groups
    monkeypatch.setattr(
        planning, "_constant_groups", lambda *given: {**measured(*given), "rollout/mine": 0.25}
    )
    config = configured(home, "median", rollout={"rollout_batch_size": 1, "group_size": 3})
    batch, _ = batch_of((0.0, 0.25, 1.0))
    _, row = RowMath(config, WEIGHTS).values(batch, {})
    charts = {name for name, value in row.items() if shown.is_shown(name, value)}
    assert row["rollout/mine"] == 0.25 and {"rollout/mine", "rollout/zero_std_groups"} <= charts
    assert row.keys() - charts >= {"rollout/response_tokens", "rollout/generate_s"}


@pytest.mark.slow
def test_the_console_script_finds_modules_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from async_grpo.tasks.arithmetic import Arithmetic\nclass Mine(Arithmetic): ...\n"
    )
    start = "import sys; from async_grpo.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(  # -P: the working directory is not on the path, as for a console script
        [sys.executable, "-P", "-c", start, "check", "quickstart", "task.name=mine:Mine"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PAGE.parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
