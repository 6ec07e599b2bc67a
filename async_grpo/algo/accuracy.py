"""What held-out answers say: accuracy, pass@k, and how far both can be trusted.

Runs in: the rollout actors (outcomes) and the driver (metrics). Hides the estimators; plain numbers
only.

    pass@k     1 - C(n - c, k) / C(n, k), mean over problems, of n samples of which c are right:
               unbiased for every k <= n (Chen et al. 2021, arXiv 2107.03374)
    intervals  95 %. Of the greedy accuracy, a share of independent problems: Wilson's. Of pass@k, a
               mean over problems of values in [0, 1]: normal, after z^2 / 2 problems that are all
               right and z^2 / 2 that are all wrong were added (Agresti and Coull's rule, where
               every value is 0 or 1), so that it has a width when all problems have the same value

Invariants: problems are the unit, samples of one problem are not independent; a response without a
verdict counts as wrong, unless nothing at all was judged: then there is no accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

Z = 1.959963984540054
"""Half of a 95 % interval in standard deviations."""


@dataclass(frozen=True, slots=True)
class ProblemOutcome:
    """One held-out problem: whether the greedy response is right, how many samples are right;
    responses judged, and not scorable; tokens of the greedy response and of the samples; its task,
    of several.
    """

    greedy: bool
    right: int
    judged: int
    errors: int
    greedy_tokens: int
    sampled_tokens: int
    task: str = ""


# problems share the few values that there are, and large binomials take a while
@lru_cache(maxsize=2**14)
def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that one of k samples is right, from n with c right; 1 <= k <= n."""
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples of which {c} are right")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def wilson(right: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, `right` of `total` > 0 (Wilson 1927)."""
    share, room = right / total, Z * Z / total
    middle, half = share + room / 2, Z * math.sqrt(share * (1 - share) / total + room / (4 * total))
    return max(0.0, (middle - half) / (1 + room)), min(1.0, (middle + half) / (1 + room))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of one or more independent values in [0, 1]."""
    total, extra = len(values) + Z * Z, Z * Z / 2
    mean = (sum(values) + extra) / total
    squares = sum((value - mean) ** 2 for value in values) + extra * ((1 - mean) ** 2 + mean**2)
    half = Z * math.sqrt(squares) / total
    return max(0.0, mean - half), min(1.0, mean + half)


def powers_of_two(n: int) -> Iterator[int]:
    """1, 2, 4, ... up to n."""
    k = 1
    while k <= n:
        yield k
        k *= 2


def metrics(outcomes: Sequence[ProblemOutcome], *, n: int) -> dict[str, float]:
    """`eval/...` of one or more problems with `n` samples each; of several tasks the accuracy of
    each too.
    """
    out = {
        "eval/problems": float(len(outcomes)),
        "eval/errors": float(sum(one.errors for one in outcomes)),
        "eval/tokens": float(sum(one.greedy_tokens + one.sampled_tokens for one in outcomes)),
        "eval/response_length": sum(one.greedy_tokens for one in outcomes) / len(outcomes),
    }
    if n:
        out["eval/response_length_sampled"] = sum(one.sampled_tokens for one in outcomes) / (
            n * len(outcomes)
        )
    judging = {one.task for one in outcomes if one.judged}
    outcomes = [one for one in outcomes if one.task in judging]
    if not outcomes:
        return out
    for task in sorted(judging | {""}):
        own = [one.greedy for one in outcomes if task in ("", one.task)]
        name = f"eval/task/{task}/accuracy_greedy" if task else "eval/accuracy_greedy"
        out |= _with_interval(name, sum(own) / len(own), wilson(sum(own), len(own)))
    for k in powers_of_two(n):
        values = [pass_at_k(n, one.right, k) for one in outcomes]
        out |= _with_interval(f"eval/pass_at_{k}", sum(values) / len(values), mean_interval(values))
    return out


def _with_interval(name: str, value: float, interval: tuple[float, float]) -> dict[str, float]:
    return {name: value, f"{name}/low": interval[0], f"{name}/high": interval[1]}
