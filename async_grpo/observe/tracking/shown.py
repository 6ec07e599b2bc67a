"""Which metrics of a run trackers show, and in which order MLflow's page has them.

Runs in: wherever metrics are sent. `metrics.jsonl` has all of them, a few hundred; nobody looks at
as many charts. MLflow sorts its sections by name, so what a run is watched with stands there under
`watch/`, after `eval`, `rollout` and `train`.

Invariants: a name outside the product's own groups passes as it is; counters are not sent while
they are 0, so that what never happened has no chart.
"""

from __future__ import annotations

import re

from async_grpo.algo.metrics import CHARTS, CHARTS_PER_LAG

_FIRST = ("eval", "rollout", "train")
_WATCHED = (
    "checkpoint",
    "cluster",
    "engine",
    "goodput",
    "plan",
    "replay",
    "time",
    "tracking",
    "weights",
)
_MAIN = re.compile(
    r"eval/(?!problems|tokens|seconds).*"
    r"|rollout/.*"  # but for the details below
    rf"|train/(loss(/.+)?|grad_norm|lr|padding|tokens_per_s|{CHARTS})"
    rf"|train/staleness_[\d+-]+/(score|{CHARTS_PER_LAG})"
    r"|time/(step|wait|train|weight_sync|learner_idle|(learner|engine)/(?!restarting).*)"
    r"|goodput/(share|trained|generated)"
    r"|replay/(ready|in_flight|staleness_mean|staleness_max|slowest_tenth)"
    r"|weights/(until_live_s|learner_waited_s|(sampler|kv_cache|version)_error|drift)"
    r"|cluster/rollout_actors|checkpoint/seconds|plan/.*"
)
_COUNTED = re.compile(
    r"eval/(errors|skipped)"
    r"|rollout/(verifier_errors.*|attempts_failed|continued_tokens|forks"
    r"|environment_failures/.*|context_prefilled/.*)|train/repeated"
    r"|goodput/(lost|expired|failed|refused|regenerated|rejected|unused)"
    r"|replay/(expired|failed|rejected|forfeited|late|invalid|overdue|retired|skipped|unused"
    r"|restarts|stale_tokens|unreadable|abandoned)"
    r"|weights/(dropped_engines|repeated)|cluster/(faults|restarts|learner_restarts)"
    r"|checkpoint/failures|time/(learner|engine)/restarting|tracking/errors"
)
_DETAILS = re.compile(
    r"rollout/(response_length_max|response_tokens|reward_missing/.*|forks/.*|requests/.*"
    r"|turns_unread|masked_responses|advantage(_std|_abs_max)?|score_abs_max|versions_per_response"
    r"|mixed_version_responses|baseline_tokens|first_token_s|generate_s|longest_group_s|verifier_s"
    r"|verify_s)"
)
"""What measures of rollouts are left out; another one is shown without an entry here."""


def is_shown(name: str, value: float, *, every: bool = False) -> bool:
    """Whether trackers get this point. every: all metrics, not only the main ones."""
    group = name.partition("/")[0]
    if every or (group not in _FIRST and group not in _WATCHED):
        return True
    if _COUNTED.fullmatch(name):
        return value != 0
    return _MAIN.fullmatch(name) is not None and _DETAILS.fullmatch(name) is None


def placed(name: str) -> str:
    """Return the name that a metric has in MLflow."""
    return f"watch/{name}" if name.partition("/")[0] in _WATCHED else name
