"""`--dry-run` of every architecture: estimates without an error, and the refusal of its run.

What vLLM says of each is measured in test_families_engine.py, and invented here.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from async_grpo.config.load import load_config
from async_grpo.errors import SetupError
from async_grpo.observe.console.console import Console
from async_grpo.run.preflight import architecture
from async_grpo.run.trainer import Trainer
from async_grpo.tools.check.dry_run import dry_run
from tests.support.engine_families import REFUSED
from tests.support.families import FAMILIES, write_family
from tests.support.recipes import CONFIGS

FAST = ("bloom", "gemma3_vision", "gemma4_heads", "mamba2", "qwen3_moe", "recurrent_gemma")
"""One of each kind; the others are slow."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in FAMILIES],
)
def test_a_dry_run_estimates_a_family_and_refuses_what_a_run_refuses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "it has other legs" if name in REFUSED else ""
    monkeypatch.setattr(architecture, "_ask", lambda _: {"refused": why, "sure": False})
    monkeypatch.setattr(architecture, "ANSWERS", str(tmp_path / "answers"))
    write_family(name, tmp_path / "model")
    config = load_config(
        CONFIGS / "quickstart.yaml",
        [
            f"run={{name: {name}, dir: {tmp_path}/run, total_steps: 3}}",
            f"model={{warm_start: null, path: {tmp_path}/model}}",
        ],
    )
    said = io.StringIO()
    try:
        dry_run(Trainer(config), Console(said))
        refused = ""
    except SetupError as error:
        refused = str(error)
    assert (why in refused) if why else not refused, refused
    text = said.getvalue()
    for part in ("# resolved configuration", "parameters", "KV cache"):
        assert part in text, text
    rows = "is computed by its own forward pass in padded sequences" in " ".join(text.split())
    assert bool(why) or rows == (FAMILIES[name].rows == "rows")
