"""Which metrics of a run MLflow shows, and in which order its page has them.

Runs in: wherever metrics are sent. `metrics.jsonl` has all of them, a few hundred; nobody looks at
as many charts. MLflow sorts its sections by name, so what a run is watched with stands under
`watch/`, after `eval`, `rollout` and `train`.

Invariants: a name outside the product's own groups passes as it is; counters are not sent while
they are 0, so that what never happened has no chart.
"""

from __future__ import annotations

import re

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
    r"|rollout/(score|score_std|shaped_reward|accuracy|truncated|reward_kl|kl_coef|baseline_reward"
    r"|response_length(_right|_wrong)?|reward/.*|(all_wrong|all_right|zero_std)_groups"
    r"|tokens_per_s_per_response|turns(_max)?|sampled_share|ended/.*|environment_s"
    r"|environment/.*)"
    r"|train/(loss|grad_norm|lr|entropy|kl|approx_kl|pg_clipfrac(_low|_high)?|ratio_max|ess"
    r"|importance_weight|importance_ess|applied_weight|rejected|mismatch|mismatch_kl"
    r"|lag_mean|lag_max|row_length|padding|tokens_per_s)"
    r"|train/lag_[\d+-]+/(score|token_share|pg_clipfrac|ess|mismatch)"
    r"|time/(step|wait|train|publish|learner_idle|(learner|engine)/(?!restarting).*)"
    r"|goodput/(share|trained|generated)"
    r"|replay/(ready|in_flight|lag_mean|lag_max|slowest_tenth)"
    r"|weights/(until_live_s|learner_waited_s|sampler_error|kv_cache_error|drift)"
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


def shown(name: str, value: float, *, every: bool = False) -> str | None:
    """Return the name under which MLflow gets this point; None: it does not. every: all metrics,
    not only the main ones.
    """
    group = name.partition("/")[0]
    if group not in _FIRST and group not in _WATCHED:
        return name
    if not every and not (value != 0 if _COUNTED.fullmatch(name) else _MAIN.fullmatch(name)):
        return None
    return f"watch/{name}" if group in _WATCHED else name
