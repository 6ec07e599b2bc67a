"""Metrics as sums and counts, so that a mean over ranks and micro-batches is exact.

Runs in: learner ranks (tensors) and the driver (merging). Hides when device values are read: tensors are queued and read once, when the
numbers are asked for. Invariants: no mean of means; masked entries never count, whatever they hold; a metric without a single value
does not exist instead of being 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from async_grpo.algo.losses import MAX_LOG_RATIO

SHARE = "/token_share"
"""Ending of names whose value 0 means that the part does not occur; it is left out."""
_BUCKETS = 20
_BOUNDARIES = (0, *(2**power for power in range(_BUCKETS - 2)))


class MetricSums:
    """Named sums with counts, and extremes. Names are paths (`train/ppo_kl`); `<path>/rho` with `<path>/rho_sq` gives `<path>/ess`."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._highs: dict[str, float] = {}
        self._lows: dict[str, float] = {}
        self._pending: list[tuple[list[str], Tensor]] = []
        """Names and, per name, a row (sum, count) still on the device."""
        self._pending_extremes: list[tuple[dict[str, float], str, Tensor]] = []

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

    def maximum(self, name: str, value: float | Tensor) -> None:
        """Keep the largest value; minus infinity counts as no value."""
        self._extreme(self._highs, name, value)

    def minimum(self, name: str, value: float | Tensor) -> None:
        """Keep the smallest value; infinity counts as no value."""
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
        return {"sums": {name: list(entry) for name, entry in self._sums.items()}, "highs": dict(self._highs), "lows": dict(self._lows)}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> MetricSums:
        """The sums that `to_wire` wrote."""
        sums = cls()
        sums._sums = {name: [float(total), float(count)] for name, (total, count) in wire["sums"].items()}
        sums._highs, sums._lows = dict(wire["highs"]), dict(wire["lows"])
        return sums

    def means(self) -> dict[str, float]:
        """Sum / count per name, the extremes, and the effective sample size (sum rho)^2 / (n sum rho^2), a share in (0, 1]."""
        self._settle()
        absent = {name for name, (total, _) in self._sums.items() if total == 0 and name.endswith(SHARE)}
        out = {name: total / count for name, (total, count) in self._sums.items() if count > 0 and name not in absent}
        for name in [name for name in out if name.endswith("/rho_sq")]:
            square, mean = out.pop(name), out[name.removesuffix("_sq")]
            out[name.removesuffix("rho_sq") + "ess"] = mean * mean / square
        return out | self._highs | self._lows

    def _extreme(self, store: dict[str, float], name: str, value: float | Tensor) -> None:
        if isinstance(value, Tensor):
            self._pending_extremes.append((store, name, value.detach().double().reshape(())))
            return
        if abs(value) != float("inf"):
            choose = max if store is self._highs else min
            store[name] = choose(store.get(name, value), value)

    def _settle(self) -> None:
        """Read all queued tensors in one transfer."""
        pending, extremes = self._pending, self._pending_extremes
        tensors = [table.reshape(-1) for _, table in pending] + [value.reshape(1) for _, _, value in extremes]
        if not tensors:
            return
        numbers = iter(torch.cat([tensor.to(tensors[0].device) for tensor in tensors]).tolist())
        self._pending, self._pending_extremes = [], []
        for names, _ in pending:
            for name in names:
                total, count = next(numbers), next(numbers)
                if count:
                    self.add_value(name, total, count)
        for store, name, _ in extremes:
            self._extreme(store, name, next(numbers))


def lag_bucket(lag: int) -> str:
    """Name of the lag's bucket: "0", "1", "2", "3-4", "5-8", "9-16", and so on by powers of two."""
    if lag <= 2:
        return str(max(lag, 0))
    high = 1 << (lag - 1).bit_length()
    return f"{high // 2 + 1}-{high}"


def loss_metrics(
    sums: MetricSums,
    *,
    token_loss: Tensor,
    log_ratio: Tensor,
    ratio: Tensor,
    clipped_low: Tensor,
    clipped_high: Tensor,
    dual_clipped: Tensor,
    anchor_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    staleness: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    kl: Tensor | None = None,
    entropy: Tensor | None = None,
) -> None:
    """Add the metrics of one micro-batch to `sums`, over all tokens in the mask and again per lag bucket (`train/lag_2/ppo_kl`).

    All tensors have one shape, [B, T] or packed [N]; `log_ratio` to `dual_clipped` are the diagnostics of `policy_loss`. Means: pg_loss,
    ppo_kl (anchor - current), approx_kl (k3), pg_clipfrac and its low, high and dual parts, ratio, abs_log_ratio, rho (current against
    behaviour) with ess, advantage, lag, and where given kl, entropy, importance_weight and importance_zero (share of weights that are 0).
    rollout_mismatch is mean |anchor - behaviour|, only for an anchor other than the behaviour policy (pass the same tensor twice
    otherwise); at lag 0 it is the disagreement of sampler and learner. Extremes: ratio_min, ratio_max, lag_max, log_ratio_abs_max,
    advantage_abs_max. `train/lag_2/token_share` is the bucket's share of the tokens.
    """
    if mask.numel() == 0:
        return
    valid = mask.reshape(-1) != 0
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    mismatch = anchor_logprobs - behavior_logprobs
    rho = (log_ratio + mismatch).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    columns = {
        "pg_loss": token_loss,
        "ppo_kl": -log_ratio,
        "approx_kl": torch.expm1(clamped) - clamped,
        "pg_clipfrac": clipped_low | clipped_high,
        "pg_clipfrac_low": clipped_low,
        "pg_clipfrac_high": clipped_high,
        "pg_clipfrac_dual": dual_clipped,
        "ratio": ratio,
        "abs_log_ratio": log_ratio.abs(),
        "rho": rho,
        "rho_sq": rho.square(),
        "advantage": advantages,
    }
    if anchor_logprobs is not behavior_logprobs:
        columns["rollout_mismatch"] = mismatch.abs()
    if weights is not None:
        columns |= {"importance_weight": weights, "importance_zero": weights == 0}
    columns |= {name: tensor for name, tensor in (("kl", kl), ("entropy", entropy)) if tensor is not None}
    _add_by_lag(sums, columns, staleness.reshape(-1), valid)
    extremes = {"lag_max": staleness, "ratio_max": ratio, "log_ratio_abs_max": log_ratio.abs(), "advantage_abs_max": advantages.abs()}
    for name, tensor in extremes.items():
        sums.maximum(f"train/{name}", _filled(tensor, valid, -torch.inf).amax())
    sums.minimum("train/ratio_min", _filled(ratio, valid, torch.inf).amin())


def _add_by_lag(sums: MetricSums, columns: dict[str, Tensor], lag: Tensor, valid: Tensor) -> None:
    """Sums of every column [N], in all and per lag bucket, as one matrix product."""
    names = list(columns)
    values = torch.stack([_filled(column, valid, 0) for column in columns.values()])  # [M, N]
    bucket = torch.bucketize(torch.where(valid, lag, 0).double(), lag.new_tensor(_BOUNDARIES, dtype=torch.float64)).clamp(max=_BUCKETS - 1)
    members = torch.nn.functional.one_hot(bucket, _BUCKETS).double() * valid.unsqueeze(-1)  # [N, K]
    totals, counts = values @ members, members.sum(0)  # [M, K], [K]
    all_tokens = counts.sum()
    sums.add_table([f"train/{name}" for name in names], torch.stack([totals.sum(1), all_tokens.expand(len(names))], -1))
    sums.add_table(["train/lag_mean"], torch.stack([_filled(lag, valid, 0).sum(), all_tokens]).unsqueeze(0))
    labels = [f"train/lag_{lag_bucket(boundary)}" for boundary in _BOUNDARIES] + [f"train/lag_{_BOUNDARIES[-1] + 1}+"]
    sums.add_table(
        [f"{label}/{name}" for name in names for label in labels], torch.stack([totals, counts.expand_as(totals)], -1).reshape(-1, 2)
    )
    sums.add_table([f"{label}{SHARE}" for label in labels], torch.stack([counts, all_tokens.expand_as(counts)], -1))


def _filled(tensor: Tensor, valid: Tensor, fill: float) -> Tensor:
    """Flat float64 copy [N] with `fill` where not valid."""
    return torch.where(valid, tensor.detach().reshape(-1).double(), fill)
