"""What is said of verifiers that fail, again and again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from async_grpo.cluster.verifier_errors import VerifierErrors
from async_grpo.config.schema import Config


@pytest.mark.asyncio
async def test_the_first_error_of_a_kind_is_said_and_every_tenfold_count() -> None:
    counts, said, what = {"timeout": 0, "exception": 0}, [], "it"

    def kinds() -> dict[str, str]:
        return {kind: f"{kind}: {what}: no answer" for kind, count in counts.items() if count}

    async def metrics() -> dict[str, float]:
        return {f"rollout/verifier_errors_{kind}": float(n) for kind, n in counts.items()}

    queue = SimpleNamespace(metrics=metrics, reports=SimpleNamespace(verifier_errors=kinds))
    config = Config.model_validate({"run": {"total_steps": 1}, "model": {"path": "m"}})
    errors = VerifierErrors(config, queue, SimpleNamespace(note=said.append), None)
    for number in range(1, 1101):
        counts["timeout"], what = number, f"after {number}"
        await errors.tell()
    assert [line.split(" (")[0] for line in said[1:]] == [
        "verifiers have failed 10 times by timeout",
        "verifiers have failed 100 times by timeout",
        "verifiers have failed 1000 times by timeout",
    ]
    assert said[0].startswith("a verifier failed, the group is issued again")
    counts["exception"] = 5000
    for _ in range(2):
        await errors.tell()
    assert len(said) == 6 and "failed 5000 times by exception" in said[-1]
    for name in ("URLError", "TimeoutError", "URLError"):
        what = name
        await errors.tell()
    assert [
        f"{name}: no answer; the next" in line
        for name, line in zip(("URLError", "TimeoutError"), said[6:], strict=True)
    ] == [True, True], "another cause is no longer the one that the log has"
    assert errors.told["exception"] == "exception: URLError: no answer"
    queue.reports.verifier_errors = lambda: {"exception": "exception"}
    await errors.tell()
    assert len(said) == 9, "one without words is one more"
    queue.reports.verifier_errors = kinds
    for number in range(100):
        what = f"Error{number}"
        await errors.tell()
    assert len(said) == 20 + 4, "a program that invents classes does not fill the log"


@pytest.mark.asyncio
async def test_a_frozen_model_is_no_verifier() -> None:
    said: list[str] = []

    async def metrics() -> dict[str, float]:
        return {"rollout/verifier_errors_frozen": 12.0}

    reports = SimpleNamespace(verifier_errors=lambda: {"frozen": "gpt: no connection"})
    queue = SimpleNamespace(metrics=metrics, reports=reports)
    config = Config.model_validate({"run": {"total_steps": 1}, "model": {"path": "m"}})
    errors = VerifierErrors(config, queue, SimpleNamespace(note=said.append), None)
    for _ in range(2):
        await errors.tell()
    assert [line.split(" (")[0] for line in said] == [
        "a frozen model gave no answer, the group is issued again: gpt: no connection; the next "
        "ones like this are only counted",
        "frozen models have failed 12 times by frozen",
    ]
