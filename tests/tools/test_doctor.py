"""`async-grpo doctor`: what there is, and a sentence and exit code 2 for what is missing."""

from __future__ import annotations

from importlib import metadata

import pytest

from async_grpo import cli
from async_grpo.tools import doctor


def test_a_machine_that_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = cli.main(["doctor"]), capsys.readouterr().out
    assert all(f"{name} " in said for name in doctor.LIBRARIES)
    assert code == (2 if "error: " in said else 0)


def test_what_is_missing_or_other_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"torch": "2.13.0+cpu", "ray": "2.60.0", "numpy": "2.3.5"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: ["ray[default]==1.2", "x>=1"])
    monkeypatch.setattr(doctor, "LEAST_DISK_GIB", 1e9)
    monkeypatch.setattr(doctor, "SHARED_MEMORY", "/nowhere")
    assert cli.main(["doctor"]) == 2
    said = capsys.readouterr().out
    assert "error: vllm is not installed: make install" in said
    assert f"error: ray is {versions['ray']}, and 1.2 is what is tested: make install" in said
    assert "error: /nowhere is not there: docker run --shm-size=8g" in said
    assert "and a small run needs 1e+09: run.dir may be on another disk" in said
    assert "numpy is" not in said
