"""Every metric that the code names is explained in docs/reference/metrics.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from async_grpo.algo.losses import Clip, policy_loss
from async_grpo.algo.metrics import MetricSums, loss_metrics
from async_grpo.observe.tracking import shown
from tests.support.metric_page import NAME, PAGE, explained

ROOT = Path(__file__).resolve().parents[2]
UNTRACKED = {
    "weights/self_check_error",  # printed at the start
    "weights/self_check_moved",
    "weights/self_check_sampler_error",
    "eval/accuracy_sampled",  # read from older runs
}
BEGINNINGS = {"rollout/advantage"}
"""Put together with what is measured of them: `rollout/advantage_std`. So are strings that end with
`_`.
"""


def named(source: str) -> Iterator[str]:
    """Metric names among the strings of a module."""
    for node in ast.walk(ast.parse(source)):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and NAME.fullmatch(text):
            yield text


def of_the_loss() -> set[str]:
    """Names that the ranks measure per token and per response, all of them on, without the lag."""
    ones, logprobs = torch.ones(6), torch.linspace(-1.0, -0.5, 6)
    known = {
        "anchor_logprobs": logprobs - 0.1,
        "behavior_logprobs": logprobs - 0.2,
        "advantages": ones,
        "staleness": torch.zeros(6),
    }
    loss, diagnostics = policy_loss(
        "ppo_clip", logprobs, **known, loss_mask=ones, clip=Clip(0.2, 0.2, dual=3.0)
    )
    sums = MetricSums()
    loss_metrics(
        sums,
        token_loss=loss,
        diagnostics=diagnostics,
        logprobs=logprobs,
        recomputed=True,
        mask=ones,
        row_index=torch.tensor([0, 0, 0, 1, 1, 1]),
        **known,
        **dict.fromkeys(("weights", "kept", "kl", "entropy"), ones),
    )
    return {name for name in sums.means() if not name.startswith("train/staleness_0")}


def test_a_metric_in_the_code_is_on_the_page() -> None:
    page = explained(PAGE.read_text(encoding="utf-8"))
    found = {
        name: path
        for path in sorted((ROOT / "async_grpo").rglob("*.py"))
        if path.name != "old_names.py"  # names that a metric had
        for name in named(path.read_text(encoding="utf-8"))
    }
    assert len(found) > 110, "the names are not where this test looks"
    missing = {
        name: str(path.relative_to(ROOT))
        for name, path in found.items()
        if name not in page | UNTRACKED and not _begins(name, page)
    }
    assert missing == {}, "explain them in docs/reference/metrics.md"
    assert of_the_loss() - page == set(), "explain them in docs/reference/metrics.md"
    assert not UNTRACKED & page
    assert found.keys() >= UNTRACKED | BEGINNINGS


def _begins(name: str, page: set[str]) -> bool:
    """Whether the string is the beginning of a name in the page, put together elsewhere."""
    return (name in BEGINNINGS or name.endswith("_")) and any(
        known.startswith(name) for known in page
    )


def alternatives(pattern: str) -> list[str]:
    """The parts between the bars outside of brackets."""
    parts, depth = [""], 0
    for letter in pattern:
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def test_every_name_that_mlflow_shows_is_a_metric() -> None:
    """A pattern of `shown` that fits no documented metric is a misspelling."""
    names = {name.replace("<k>", "0") for name in explained(PAGE.read_text(encoding="utf-8"))}
    names |= {name.replace("train/", "train/staleness_0/") for name in names}
    for pattern in (shown._MAIN.pattern, shown._COUNTED.pattern):
        for part in alternatives(pattern):
            inner = re.fullmatch(r"([^()]*)\(([^()?]+)\)", part)
            ones = [inner[1] + one for one in inner[2].split("|")] if inner else [part]
            for one in ones:
                assert any(re.fullmatch(one, name) for name in names), one


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (
            "| `staleness_mean`, `staleness_max` | ... |",
            {"train/staleness_mean", "train/staleness_max"},
        ),
        ("| `rejected`, `rejected/a`, `/b` |", {"train/rejected", "train/rejected/a"}),
        ("no path in `replay/ready` below `loss`", {"replay/ready"}),
    ],
)
def test_the_page_is_read(line: str, names: set[str]) -> None:
    assert names <= explained(f"## `train/`: tokens\n\n{line}\n## else\n`other`")
    assert "train/other" not in explained(f"## `train/`: tokens\n{line}\n## else\n`other`")
