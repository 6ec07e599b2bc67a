"""Metrics as sums and counts, so that a mean over ranks and micro-batches is exact.

Runs in: learner ranks (tensors) and the driver (merging). Hides when device values are read: tensors are queued and read once, when the
numbers are asked for. Invariants: no mean of means; masked entries never count, whatever they hold; a metric without a single value
does not exist instead of being 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SHARE = "/token_share"
"""Ending of names whose value 0 means that the part does not occur; it is left out."""
ESS = {"rho": "ess", "rho_seq": "ess_seq", "importance_weight": "importance_ess"}
"""Name of a weight -> name of its effective sample size (sum w)^2 / (n sum w^2), from the sums of w and of `<name>_sq`."""
CHI2 = {"mismatch_ratio": "mismatch_chi2", "mismatch_ratio_seq": "mismatch_chi2_seq"}
"""Name of a ratio -> name of mean(w^2) - 1, from the sum of `<name>_sq`."""


class MetricSums:
    """Named sums with counts, and extremes. Names are paths (`train/ppo_kl`); `ESS` and `CHI2` say what is derived from two sums."""

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
        """Keep the largest value; minus infinity counts as no value. A list of names takes a tensor with a value for each, read later."""
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
        return {"sums": {name: list(entry) for name, entry in self._sums.items()}, "highs": dict(self._highs), "lows": dict(self._lows)}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> MetricSums:
        """The sums that `to_wire` wrote."""
        sums = cls()
        sums._sums = {name: [float(total), float(count)] for name, (total, count) in wire["sums"].items()}
        sums._highs, sums._lows = dict(wire["highs"]), dict(wire["lows"])
        return sums

    def means(self) -> dict[str, float]:
        """Sum / count per name, the extremes, and what `ESS` (a share in (0, 1]) and `CHI2` derive."""
        self._settle()
        absent = {name for name, (total, _) in self._sums.items() if total == 0 and name.endswith(SHARE)}
        out = {name: total / count for name, (total, count) in self._sums.items() if count > 0 and name not in absent}
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

    def _extreme(self, store: dict[str, float], name: str | list[str], value: float | Tensor) -> None:
        if isinstance(value, Tensor):
            names = [name] if isinstance(name, str) else name
            if value.numel() != len(names):
                raise ValueError(f"{len(names)} extremes need as many values, got {value.numel()}: {names}")
            self._pending_extremes.append((store, names, value.detach().double().reshape(-1)))
            return
        if abs(value) != float("inf"):
            choose = max if store is self._highs else min
            store[name] = choose(store.get(name, value), value)

    def _settle(self) -> None:
        """Read all queued tensors in one transfer."""
        pending, extremes = self._pending, self._pending_extremes
        tensors = [table.reshape(-1) for _, table in pending] + [values for _, _, values in extremes]
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
