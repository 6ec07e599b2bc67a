"""The command that evaluates a checkpoint or a model: whose settings count, and real answers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from async_grpo.algo.accuracy import ProblemOutcome, metrics
from async_grpo.config.load import dump, load_config
from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.observe.console.console import Console
from async_grpo.rollout.engine.base import EngineError
from async_grpo.rollout.host import EngineHost
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.preflight.model import positions
from async_grpo.tasks.verifier import VerifierError
from async_grpo.tools.evaluate.accuracy import evaluate, rows
from async_grpo.tools.evaluate.alone import CHAT_TOKENS, settings
from tests.support import verbs
from tests.support.models import write_model

ROOT = Path(__file__).resolve().parents[3]
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(12)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a tiny model on rows of its own, with one checkpoint."""
    directory = tmp_path_factory.mktemp("runs") / "mine"
    directory.mkdir()
    data, held = directory / "train.jsonl", directory / "held.jsonl"
    for path, those in ((data, ROWS[:2]), (held, ROWS[2:])):
        path.write_text("".join(json.dumps(row) + "\n" for row in those))
    (directory / "empty.yaml").write_text("")
    config = load_config(
        directory / "empty.yaml",
        [
            "run.total_steps=7",
            f"run.dir={directory}",
            "model.warm_start={}",
            f"task={{name: jsonl, train: {data}, eval: {held}}}",
            "rollout={prompt_length: 8, response_length: 6, rollout_batch_size: 2, group_size: 2}",
            "cluster.engine.kv_cache_gb=0.01",
            "evaluation.n=2",
        ],
    )
    (directory / "config.yaml").write_text(dump(config))
    draft = checkpoint.begin(directory, 7)
    write_model(draft / "hf")
    checkpoint.commit(draft, {"step": 7})
    return directory


def test_the_settings_of_the_run_count_unless_replaced(run_dir: Path) -> None:
    own = settings(str(run_dir), task=None, overrides=[])
    assert own.task.name == "jsonl" and own.rollout.response_length == 6
    assert own.model.path == str(run_dir / "checkpoints" / "step_000007" / "hf")
    assert own.model.warm_start is None
    other = settings(str(run_dir), task="gsm8k", overrides=["rollout.response_length=5"])
    assert other.task.name == "gsm8k" and other.task.train != own.task.train
    assert other.rollout.response_length == 5
    at = str(run_dir / "checkpoints" / "step_000007")
    assert settings(at, task=None, overrides=[]).model == own.model


def test_an_engine_alone_shares_no_gpu_with_a_learner(run_dir: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shutil.copytree(run_dir, shared)
    stored = (shared / "config.yaml").read_text()
    changed = stored.replace("  layout: auto\n", "  layout: colocated\n", 1)
    changed = changed.replace("  device: auto\n", "  device: cuda\n", 1)
    assert changed.count("colocated\n") == changed.count("device: cuda\n") == 1
    (shared / "config.yaml").write_text(changed)
    for one in ("cluster.engine.tensor_parallel_size=2", "cluster.device=cpu"):
        assert settings(str(shared), task=None, overrides=[one]).cluster.layout == "auto"


def test_what_a_run_has_stored_does_not_stand_in_the_way(run_dir: Path, tmp_path: Path) -> None:
    """An ablation's leftovers, a registered model, a task of its evaluations; a moved directory."""
    moved = tmp_path / "moved"
    shutil.copytree(run_dir, moved)
    stored = (moved / "config.yaml").read_text()
    spoiled = stored.replace("kl_loss_coef: 0.001", "kl_loss_coef: 0.5", 1)
    spoiled = spoiled.replace("register_model: null", "register_model: mine", 1)
    spoiled = spoiled.replace("evaluation:\n", "evaluation:\n  task: {name: arithmetic}\n", 1)
    spoiled = spoiled.replace("  before: true\n  task: null\n", "  before: true\n", 1)
    assert spoiled.count("kl_loss_coef: 0.5") == spoiled.count("register_model: mine") == 1
    (moved / "config.yaml").write_text(spoiled)
    own = settings(str(moved), task=None, overrides=["task.env_vars=[A_KEY]"])
    assert own.evaluated_task.env_vars == ["A_KEY"]
    assert own.algorithm.kl_loss_coef == 0.5 and own.evaluated_task.name == "arithmetic"
    assert settings(str(moved), task="gsm8k", overrides=[]).evaluated_task.name == "gsm8k"


def test_a_model_needs_a_task(run_dir: Path) -> None:
    with pytest.raises(SetupError, match="say what is asked, --task"):
        settings("some/model", task=None, overrides=[])
    with pytest.raises(
        SetupError, match=r"^/no/such/place does not exist: name a checkpoint, a run"
    ):
        settings("/no/such/place", task=None, overrides=[])
    known = settings("some/model", task="gsm8k", overrides=[])
    assert known.model.path == "some/model" and known.task.eval == "openai/gsm8k:main:test"
    own = settings("some/model", task="gsm8k", overrides=["task.eval=rows.jsonl"])
    assert (own.task.train, own.task.eval) == (None, "rows.jsonl")


def test_a_person_may_talk_with_a_model_alone(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    alone = settings(model, task=None, overrides=["rollout.max_turns=3"], by_hand=True)
    room = min(CHAT_TOKENS, positions(model)) // 2
    assert alone.rollout.response_length == alone.rollout.prompt_length == room
    assert alone.rollout.max_turns == 3 and alone.task.name == "arithmetic"


@pytest.mark.parametrize("task", ["jsonl", "math"])
def test_held_out_problems_are_looked_at_without_training_data(
    run_dir: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, held = str(run_dir / "checkpoints" / "step_000007" / "hf"), run_dir / "held.jsonl"
    with pytest.raises(SetupError, match=f"task {task} has no held-out problems: set task.eval"):
        evaluate(settings(model, task=task, overrides=["task.eval=null"]), Console())
    if task == "math":
        return
    asked = [f"task.eval={held}", "rollout.response_length=5"]
    with pytest.raises(SetupError, match=r"held-out problem 8 has 5 "):
        short = settings(model, task=task, overrides=[*asked, "rollout.prompt_length=2"])
        evaluate(short, Console())

    async def answered(config: Config, total: int, console: Console) -> dict[str, float]:
        return {"total": total}

    monkeypatch.setattr("async_grpo.tools.evaluate.accuracy._answered", answered)
    found = evaluate(settings(model, task=task, overrides=asked), Console())
    assert found == {"total": len(ROWS) - 2}


def test_the_table_says_what_was_measured(run_dir: Path) -> None:
    config = settings(str(run_dir), task=None, overrides=[])
    outcome = {"judged": 3, "errors": 0, "greedy_tokens": 4, "sampled_tokens": 8}
    outcomes = [ProblemOutcome(greedy=True, right=2, **outcome)] * 3
    outcomes += [ProblemOutcome(greedy=False, right=0, **outcome)]
    said = dict(rows(config, metrics(outcomes, n=2) | {"eval/seconds": 1.0}))
    assert said["accuracy, greedy"].startswith("75.0% (95 % interval ")
    assert said["pass@2"].startswith("75.0%") and "errors" not in said
    assert said["held-out problems"] == "4 of task jsonl"


@pytest.mark.later
def test_a_checkpoint_answers_with_an_engine(run_dir: Path) -> None:
    """The real command, from a directory of its own and without training data: numbers alone on
    stdout, nothing left.
    """
    before = sorted(run_dir.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-m", "async_grpo", "eval", str(run_dir), "--json", "task.train=null"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["eval/problems"] == len(ROWS[2:]) and found["eval/errors"] == 0
    assert 0 <= found["eval/accuracy_greedy"] <= found["eval/accuracy_greedy/high"] <= 1
    assert {"eval/pass_at_1", "eval/pass_at_2"} <= found.keys()
    assert "evaluating on 10 held-out problems" in done.stderr
    assert "WARNING" not in done.stderr and sorted(run_dir.rglob("*")) == before


def test_what_ends_an_evaluation_is_a_sentence_and_a_code(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def ends(error: Exception) -> tuple[int, str]:
        async def start(*_: object, **__: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(EngineHost, "start", start)
            code = verbs.evaluate([str(run_dir)])
        return code, capfd.readouterr().err

    code, said = ends(EngineError("the engine is gone"))
    assert code == 4 and "error: the engine is gone" in said
    assert ends(VerifierError("it hangs"))[0] == 4
    assert ends(SetupError("no rows"))[0] == 2
    code, said = ends(KeyError("a bug"))
    assert code == 1 and "exit code 1: an unexpected error" in said
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert verbs.evaluate([str(run_dir), "cluster.device=cuda"]) == 2
    assert "this machine has no GPU: say cluster.device=auto" in capfd.readouterr().err
