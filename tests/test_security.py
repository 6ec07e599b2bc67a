"""Code from a model's directory runs only when asked for, wherever a model or a tokenizer is
loaded.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from async_grpo.config import schema

PACKAGE = Path(schema.__file__).parents[1]
WITHOUT_CODE = {"tools/inspect/lines.py"}
"""Build their own model and tokenizer, or leave the library's default, which is off."""


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [
        (path, ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def test_remote_code_is_off_unless_asked() -> None:
    assert schema.Model().trust_remote_code is False


def test_every_load_of_a_model_or_tokenizer_says_whether_its_code_may_run() -> None:
    loads = 0
    for path, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in ("from_pretrained", "from_config") and ast.unparse(
                node.func.value
            ).startswith(("Auto", "transformers.Auto")):
                loads += 1
                values = [
                    ast.unparse(keyword.value)
                    for keyword in node.keywords
                    if keyword.arg == "trust_remote_code"
                ]
                allowed = {
                    "trust_remote_code",
                    "trust",
                    "config.model.trust_remote_code",
                    "self.config.model.trust_remote_code",
                }
                assert (values and values[0] in allowed) or path.relative_to(
                    PACKAGE
                ).as_posix() in WITHOUT_CODE, f"{path.name}:{node.lineno}: {ast.unparse(node)}"
    assert loads >= 3


def test_the_setting_reaches_learner_engine_and_tokenizers() -> None:
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).endswith("model.trust_remote_code")
    }
    assert {
        "learner/learner.py",
        "rollout/engine/vllm/arguments.py",
        "rollout/host.py",
        "run/checkpoint/saver.py",
    } <= users


def test_nothing_but_the_setting_switches_remote_code_on() -> None:
    for path, tree in trees():
        if path.name == "vllm_keys.py":  # names of arguments, and of the settings that decide them
            continue
        for node in ast.walk(tree):
            pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
            found = [
                value
                for key, value in pairs
                if isinstance(key, ast.Constant) and key.value == "trust_remote_code"
            ]
            found += (
                [node.value]
                if isinstance(node, ast.keyword) and node.arg == "trust_remote_code"
                else []
            )
            assert not [
                value for value in found if isinstance(value, ast.Constant) and value.value
            ], f"{path.name}:{node.lineno}"
