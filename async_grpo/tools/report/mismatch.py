"""How far the learner's log-probs of the sampled tokens are from the engines', by cause, and which
settings correct that.

Runs in: the report's process. Hides how steps are summed up: each has the weight that the cause has
in it. Invariant: a cause that did not occur, or that nobody measured, has no row.
"""

from __future__ import annotations

from async_grpo.tools.report.data import RunData

COLUMNS = ("cause", "share", "mean difference", "largest", "settings that correct it")
MEANING = (
    "Log-probs of the sampled tokens: by the learner's weights before a step, against those of the "
    "engine that sampled them. What equal weights leave is part of the other rows too. Experts "
    "are compared between the learner's own passes; where an engine picks others, the difference "
    "is in the rows above."
)
NOTHING = "No learner step compared its log-probs with those of the engines."
_CAUSES = {
    "weights/sampler_error": (
        "equal weights: dtype, kernels",
        "model.dtype model.lm_head_fp32 algorithm.importance.level",
    ),
    "weights/kv_cache_error": (
        "equal weights, caches of older ones",
        "weight_sync.kv_cache algorithm.importance.level",
    ),
    "weights/version_error": (
        "older weights: version",
        "replay.max_staleness algorithm.anchor algorithm.importance.level algorithm.clip_schedule",
    ),
}
"""Metric -> the cause in words, and settings."""
_ROUTES = "train/routes_changed"
_OVERFLOWS = "rollout/kept_overflows"


def mismatch(data: RunData) -> list[tuple[str, ...]]:
    """List the rows of the table."""
    rows: list[tuple[str, ...]] = []
    for name, (cause, settings) in _CAUSES.items():
        share, most = f"{name}_share", f"{name}_max"
        compared = [row.values for row in data.rows if share in row.values]
        occurred = [one for one in compared if one[share] and {name, most} <= one.keys()]
        if occurred:
            total = sum(one[share] for one in occurred)
            mean = sum(one[share] * one[name] for one in occurred) / total
            largest = max(one[most] for one in occurred)
            part = f"{total / len(compared):.1%} of tokens"
            rows.append((cause, part, f"{mean:.2g}", f"{largest:.2g}", _settings(data, settings)))
    if changed := data.series(_ROUTES)[1]:
        part = f"{sum(changed) / len(changed):.2%} of picks"
        said = _settings(data, "learner.routing_replay model.router")
        rows.append(("other experts: routing", part, "", "", said))
    if again := max(data.series(_OVERFLOWS)[1], default=0):
        said = _settings(data, "rollout.top_k rollout.top_p rollout.min_p model.lm_head_fp32")
        rows.append(
            ("sampled from unknown sets: support", f"{again:.0f} groups again", "", "", said)
        )
    return rows


def _settings(data: RunData, names: str) -> str:
    """Name the settings with their values."""
    values = {name: data.setting(name) for name in names.split()}
    named = {
        name: value.get("name") if isinstance(value, dict) else value
        for name, value in values.items()
    }
    return ", ".join(f"{name} is {value}" for name, value in named.items() if value is not None)
