"""Metrics of the training as sums and counts, exact over micro-batches and ranks.

Runs in: learner ranks (tensors) and the driver (merging). Hides the table of diagnostics and when
device values are read: tensors are queued and read once, when the numbers are asked for. Everything
is counted over all tokens in the mask, and again per bucket of staleness
(`train/staleness_2/ppo_kl`); numbers of whole responses count each response with a token in the
mask once, in the bucket of its oldest token.

Invariants: no mean of means; masked entries never count, whatever they hold; a metric without a
single value does not exist instead of being 0; shapes never depend on values.

Names: d = current - anchor log-prob, r = exp(d), rho = exp(current - behavior), w = exp(anchor -
behavior). Every log ratio is clamped to [-20, 20] before `exp`; `log_ratio_abs_max` is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from async_grpo.algo.late import torch
from async_grpo.algo.losses import MAX_LOG_RATIO, bounded_exp

if TYPE_CHECKING:
    from torch import Tensor

CHARTS = (
    "entropy|kl|teacher(_top_k)?_kl|sft_loss|repeated_tokens|same_response|approx_kl|pg_clipfrac(_low|_high)?|ratio_max|ess|importance_weight|importance_ess"
    "|applied_weight|rejected|mismatch|mismatch_kl|staleness_mean|staleness_max|sequence_length"
)
"""Which metrics of this module trackers show, as a regular expression; all are in `metrics.jsonl`.
"""
CHARTS_PER_LAG = "token_share|pg_clipfrac|ess|mismatch"
"""Those that are shown per bucket of staleness too."""
SHARE = "/token_share"
"""Ending of names whose value 0 means that the part does not occur; it is left out."""
ESS = {"rho": "ess", "rho_seq": "ess_seq", "importance_weight": "importance_ess"}
"""Weight -> its effective sample size (sum w)^2 / (n sum w^2), from sums of w and `<name>_sq`."""
CHI2 = {"mismatch_ratio": "mismatch_chi2", "mismatch_ratio_seq": "mismatch_chi2_seq"}
"""Name of a ratio -> name of mean(w^2) - 1, from the sum of `<name>_sq`."""


class MetricSums:
    """Named sums with counts, and extremes. Names are paths (`train/ppo_kl`); `ESS` and `CHI2` say
    what is derived from two sums.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._highs: dict[str, float] = {}
        self._lows: dict[str, float] = {}
        self._pending: list[tuple[list[str], Tensor]] = []
        """Names and, per name, a row (sum, count) still on the device."""
        self._pending_extremes: list[tuple[dict[str, float], list[str], Tensor]] = []

    def add(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add every entry of `values` where `mask` (same shape) is not 0."""
        valid = torch.ones_like(values, dtype=torch.bool) if mask is None else mask != 0
        total = torch.where(valid, values.detach().double(), 0).sum()
        self._pending.append(([name], torch.stack([total, valid.sum().double()]).unsqueeze(0)))

    def add_value(self, name: str, value: float, count: float = 1) -> None:
        """Add a plain number that stands for `count` values with the sum `value`."""
        entry = self._sums.setdefault(name, [0.0, 0.0])
        entry[0] += value
        entry[1] += count

    def maximum(self, name: str | list[str], value: float | Tensor) -> None:
        """Keep the largest value; minus infinity counts as no value. A list of names takes a tensor
        with a value for each, read later.
        """
        self._extreme(self._highs, name, value)

    def minimum(self, name: str | list[str], value: float | Tensor) -> None:
        """Keep the smallest value; infinity counts as no value. Names as for `maximum`."""
        self._extreme(self._lows, name, value)

    def add_table(self, names: list[str], table: Tensor) -> None:
        """Add a (sum, count) per name: `table` [len(names), 2], read later."""
        self._pending.append((names, table.detach().double()))

    def merge(self, other: MetricSums) -> None:
        """Add everything that `other` holds."""
        other._settle()
        for name, (total, count) in other._sums.items():
            self.add_value(name, total, count)
        for name, value in other._highs.items():
            self.maximum(name, value)
        for name, value in other._lows.items():
            self.minimum(name, value)

    def to_wire(self) -> dict[str, Any]:
        """Plain numbers for another process; see `from_wire`."""
        self._settle()
        return {
            "sums": {name: list(entry) for name, entry in self._sums.items()},
            "highs": dict(self._highs),
            "lows": dict(self._lows),
        }

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> MetricSums:
        """Return the sums that `to_wire` wrote."""
        sums = cls()
        sums._sums = {
            name: [float(total), float(count)] for name, (total, count) in wire["sums"].items()
        }
        sums._highs, sums._lows = dict(wire["highs"]), dict(wire["lows"])
        return sums

    def means(self) -> dict[str, float]:
        """Sum / count per name, extremes, and what `ESS` (a share in (0, 1]) and `CHI2` derive."""
        self._settle()
        out = {
            name: total / count
            for name, (total, count) in self._sums.items()
            if count > 0 and not (total == 0 and name.endswith(SHARE))
        }
        for name in [name for name in out if name.endswith("_sq")]:
            path, _, leaf = name.removesuffix("_sq").rpartition("/")
            if leaf not in ESS | CHI2:
                continue
            square, mean = out.pop(name), out.get(f"{path}/{leaf}", 0.0)
            if leaf in ESS:
                out[f"{path}/{ESS[leaf]}"] = mean * mean / square if square else 0.0
            else:
                out[f"{path}/{CHI2[leaf]}"] = square - 1
        return out | self._highs | self._lows

    def _extreme(
        self, store: dict[str, float], name: str | list[str], value: float | Tensor
    ) -> None:
        if isinstance(value, torch.Tensor):
            names = [name] if isinstance(name, str) else name
            if value.numel() != len(names):
                raise ValueError(
                    f"{len(names)} extremes need as many values, got {value.numel()}: {names}"
                )
            self._pending_extremes.append((store, names, value.detach().double().reshape(-1)))
            return
        assert isinstance(name, str), "a list of names takes a tensor"
        if abs(value) != float("inf"):
            choose = max if store is self._highs else min
            store[name] = choose(store.get(name, value), value)

    def _settle(self) -> None:
        """Read all queued tensors in one transfer."""
        pending, extremes = self._pending, self._pending_extremes
        tensors = [table.reshape(-1) for _, table in pending]
        tensors += [values for _, _, values in extremes]
        if not tensors:
            return
        numbers = iter(torch.cat([tensor.to(tensors[0].device) for tensor in tensors]).tolist())
        self._pending, self._pending_extremes = [], []
        for names, _ in pending:
            for name in names:
                total, count = next(numbers), next(numbers)
                if count:
                    self.add_value(name, total, count)
        for store, names, _ in extremes:
            for name in names:
                self._extreme(store, name, next(numbers))


def lag_bucket(lag: int) -> str:
    """Name of the lag's bucket: "0", "1", "2", "3-4", "5-8", "9-16", and so on by powers of two."""
    if lag <= 2:
        return str(max(lag, 0))
    high = 1 << (lag - 1).bit_length()
    return f"{high // 2 + 1}-{high}"


_POWERS = 18
_LABELS = [
    f"train/staleness_{lag_bucket(lag)}" for lag in (0, *(2**power for power in range(_POWERS)))
] + [f"train/staleness_{2 ** (_POWERS - 1) + 1}+"]


def loss_metrics(
    sums: MetricSums,
    *,
    token_loss: Tensor,
    diagnostics: dict[str, Tensor],
    logprobs: Tensor,
    anchor_logprobs: Tensor,
    behavior_logprobs: Tensor,
    recomputed: bool,
    advantages: Tensor,
    staleness: Tensor,
    mask: Tensor,
    chosen: Tensor | None = None,
    row_index: Tensor | None = None,
    weights: Tensor | None = None,
    kept: Tensor | None = None,
    kl: Tensor | None = None,
    entropy: Tensor | None = None,
) -> None:
    """Add the metrics of one micro-batch: tensors [B, T], or packed [N] with `row_index` [N] int64.

    `diagnostics` come from `policy_loss`; `kept` is 0 for rejected tokens; `chosen` is the mask of
    what averages ratios; `recomputed`: the anchor is another forward pass than the sampler's.
    Without rows, whole responses have no metrics.
    """
    if mask.numel() == 0:
        return
    valid = mask.reshape(-1) != 0

    def flat(tensor: Tensor) -> Tensor:
        return torch.where(valid, tensor.detach().reshape(-1).double(), 0)

    behavior, anchor, lag = flat(behavior_logprobs), flat(anchor_logprobs), flat(staleness)
    current, mismatch = flat(logprobs), anchor - behavior if recomputed else None
    found = {name: flat(tensor) for name, tensor in diagnostics.items()}
    optional = {"weights": weights, "kept": kept, "kl": kl, "entropy": entropy}
    given = {name: flat(tensor) for name, tensor in optional.items() if tensor is not None}
    columns: dict[str, Tensor] = {
        "pg_loss": flat(token_loss),
        "advantage": flat(advantages),
        **{name: given[name] for name in ("kl", "entropy") if name in given},
        "staleness_mean": lag,
        **{name: tensor for name, tensor in found.items() if name.startswith("loss/")},
    }
    ratios: dict[str, Tensor] = {
        **_trust_region(found),
        **_with_square("rho", bounded_exp(current - behavior)),
        **({} if mismatch is None else _mismatch(mismatch)),
        **_weighting(given.get("weights"), given.get("kept")),
    }
    largest = {
        "staleness_max": lag,
        "ratio_max": found["ratio"],
        "log_ratio_abs_max": found["log_ratio"].abs(),
        "advantage_abs_max": flat(advantages).abs(),
    }
    if mismatch is not None:
        largest["mismatch_max"] = mismatch.abs()
        largest["mismatch_prob_max"] = (anchor.exp() - behavior.exp()).abs()
    bucket = _bucket(lag)
    _add_by_lag(sums, columns, bucket, valid, shares=True)
    _add_by_lag(sums, ratios, bucket, valid if chosen is None else chosen.reshape(-1) != 0)
    _add_extremes(sums.maximum, largest, bucket, valid, least=False)
    _add_extremes(sums.minimum, {"ratio_min": found["ratio"]}, bucket, valid, least=True)
    if (rows := _rows(mask, row_index)) is not None:
        _add_rows(sums, rows, valid, lag, current, behavior, mismatch, given.get("kept"))


def _with_square(name: str, values: Tensor) -> dict[str, Tensor]:
    return {name: values, f"{name}_sq": values.square()}


def _weighting(weights: Tensor | None, kept: Tensor | None) -> dict[str, Tensor]:
    """Gather importance weights, rejection, and their product."""
    columns: dict[str, Tensor] = {}
    if weights is not None:
        columns |= _with_square("importance_weight", weights)
        columns["applied_weight"] = weights
        columns["importance_zero"] = weights == 0
    if kept is not None:
        columns["rejected"] = kept == 0
        columns["applied_weight"] = kept if weights is None else weights * kept
    return columns


def _trust_region(diagnostics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the current policy against the anchor, and what was clipped."""
    difference = diagnostics["log_ratio"]
    clamped = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    low, high = diagnostics["clipped_low"], diagnostics["clipped_high"]
    return {
        "ppo_kl": -difference,
        "approx_kl": difference.square() / 2,
        "approx_kl_k3": torch.expm1(clamped) - clamped,
        "pg_clipfrac": (low + high).clamp(max=1),
        "pg_clipfrac_low": low,
        "pg_clipfrac_high": high,
        "pg_clipfrac_dual": diagnostics["dual_clipped"],
        "ratio": diagnostics["ratio"],
        "abs_log_ratio": difference.abs(),
        "far_ratio": difference.abs() > math.log(2),
    }


def _mismatch(log_ratio: Tensor) -> dict[str, Tensor]:
    """Learner against sampler, and what changed since: the anchor against behaviour, per token."""
    ratio = bounded_exp(log_ratio)
    return {
        "mismatch": log_ratio.abs(),
        "mismatch_kl": -log_ratio,
        "mismatch_kl_k3": ratio - 1 - log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        "mismatch_prob_error": bounded_exp(log_ratio.abs()),
        **_with_square("mismatch_ratio", ratio),
    }


def _rows(mask: Tensor, row_index: Tensor | None) -> Tensor | None:
    """Return a row number below the number of tokens for each, flat; None for packed without
    rows.
    """
    if row_index is None and mask.dim() != 2:
        return None
    if row_index is None:
        return torch.arange(len(mask), device=mask.device).repeat_interleave(mask.shape[1])
    ordered, order = row_index.reshape(-1).sort()
    return torch.zeros_like(order).scatter(0, order[1:], (ordered.diff() != 0).long().cumsum(0))


def _add_rows(
    sums: MetricSums,
    rows: Tensor,
    valid: Tensor,
    lag: Tensor,
    current: Tensor,
    behavior: Tensor,
    mismatch: Tensor | None,
    kept: Tensor | None,
) -> None:
    """Metrics of responses, each by its oldest token. Tensors [N], 0 where not valid; rows < N."""

    def total(values: Tensor) -> Tensor:
        return torch.zeros_like(lag).index_add_(0, rows, values)

    def most(values: Tensor) -> Tensor:
        return torch.full_like(lag, -torch.inf).scatter_reduce(
            0, rows, torch.where(valid, values, -torch.inf), "amax"
        )

    length, oldest = total(valid.double()), most(lag)
    rho, any_token = bounded_exp(total(current - behavior)), length > 0
    columns = {
        "sequence_length": length,
        "staleness_span": oldest + most(-lag),
        **_with_square("rho_seq", rho),
        **_perplexities(*(total(one) / length.clamp(min=1) for one in (current, behavior))),
    }
    if mismatch is not None:
        ratio, mean = bounded_exp(total(mismatch)), total(mismatch) / length.clamp(min=1)
        columns |= {
            **_with_square("mismatch_ratio_seq", ratio),
            "mismatch_ppl_ratio": bounded_exp(-mean),
        }
    if kept is not None:
        columns["rejected_sequences"] = total(kept) == 0
    _add_by_lag(sums, columns, _bucket(oldest), any_token)


def _perplexities(current: Tensor, behavior: Tensor) -> dict[str, Tensor]:
    """Compare perplexities of responses, from their mean log-probs."""
    difference = behavior - current
    return {
        "ppl_current": bounded_exp(-current),
        "ppl_behavior": bounded_exp(-behavior),
        "ppl_ratio": bounded_exp(difference),
        "ppl_log_diff": difference,
        "ppl_log_diff_abs": difference.abs(),
    }


def _bucket(lag: Tensor) -> Tensor:
    """Index into `_LABELS` [N] int64: lags 0, 1, 2 as they are, then bits of lag - 1, plus 1."""
    lag = lag.clamp(min=0)
    digits = torch.frexp((lag - 1).clamp(min=0)).exponent
    return (digits + (lag > 0)).clamp(max=len(_LABELS) - 1).long()


def _add_by_lag(
    sums: MetricSums,
    columns: dict[str, Tensor],
    bucket: Tensor,
    valid: Tensor,
    *,
    shares: bool = False,
) -> None:
    """Sum every column [N], in all and per lag bucket, as one matrix product; with `shares` also
    the share of the entries in each bucket.
    """
    names = list(columns)
    valid_one = valid.double().unsqueeze(-1)
    members = valid_one.new_zeros(len(bucket), len(_LABELS))  # [N, K]
    members.scatter_(1, bucket.unsqueeze(-1), valid_one)
    values = [torch.where(valid, column.double(), 0) for column in columns.values()]  # M x [N]
    totals, counts = torch.stack(values) @ members, members.sum(0)  # [M, K], [K]
    sums.add_table(
        [f"train/{name}" for name in names],
        torch.stack([totals.sum(1), counts.sum().expand(len(names))], -1),
    )
    sums.add_table(
        [f"{label}/{name}" for name in names for label in _LABELS],
        torch.stack([totals, counts.expand_as(totals)], -1).reshape(-1, 2),
    )
    if shares:
        sums.add_table(
            [f"{label}{SHARE}" for label in _LABELS],
            torch.stack([counts, counts.sum().expand_as(counts)], -1),
        )


def _add_extremes(
    keep: Callable[[list[str], Tensor], None],
    columns: dict[str, Tensor],
    bucket: Tensor,
    valid: Tensor,
    *,
    least: bool,
) -> None:
    """Return the largest (or smallest) entry of every column [N], in all and per lag bucket."""
    mode, nothing = ("amin", torch.inf) if least else ("amax", -torch.inf)
    values = torch.stack([torch.where(valid, column, nothing) for column in columns.values()])
    found = values.new_full((len(columns), len(_LABELS)), nothing)  # [E, K], from [E, N]
    found = found.scatter_reduce(1, bucket.expand_as(values), values, mode)
    keep([f"train/{name}" for name in columns], found.amin(1) if least else found.amax(1))
    keep([f"{label}/{name}" for name in columns for label in _LABELS], found.reshape(-1))
