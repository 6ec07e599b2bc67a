"""Whether a rollout actor that died gets a successor, and whether the run goes on.

Runs in: the driver; knows no process. Hides what counts against the budget, and for how long:

    a process died --died()--> again, now or after a pause (`back_off_s`)    one fault
                          \\--> not again: the budget is spent
    its place has no resources --unplaced()--> not again                     the same fault
    a node left --node_left()--> not again                                   one fault for all there
    so many are alive --enough()--> the run goes on, or ends: `too_few`

A process that dies once is replaced at once; later deaths in the same slot wait, so that they do
not spend the budget in a second. Invariant: a fault counts against the budget for `FORGIVEN_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from async_grpo.config.operation import Cluster
from async_grpo.errors import FaultBudgetSpent

BACK_OFF_S = (0.0, 2.0, 10.0, 30.0)
FORGIVEN_S = 1800.0
"""A fault this old does not count against the budget any more."""


def back_off_s(deaths: int) -> float:
    """Seconds to wait after the `deaths`-th death (from 1) in a slot, before the next process."""
    return BACK_OFF_S[min(max(deaths, 1), len(BACK_OFF_S)) - 1]


@dataclass(frozen=True)
class Decision:
    """What becomes of a slot: another process after so many seconds, or none, and why."""

    again: bool
    after_s: float = 0.0
    why: str = ""


class RestartBudget:
    """Counts the faults of rollout actors. faults, restarts: since the start; deaths: what was said
    of each, the newest last.
    """

    def __init__(self, settings: Cluster, *, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds that never go back."""
        self._settings, self._clock = settings, clock
        self._faults: list[float] = []
        """When each happened."""
        self.restarts = 0
        self.deaths: list[str] = []

    @property
    def faults(self) -> int:
        """Faults since the start, forgiven or not."""
        return len(self._faults)

    @property
    def spent(self) -> int:
        """Faults that count against the budget now."""
        return sum(self._clock() - at < FORGIVEN_S for at in self._faults)

    def died(self, fault: str, *, deaths: int) -> Decision:
        """Decide after a process died, the `deaths`-th of its slot (from 1)."""
        self.deaths.append(fault)
        if self.spent >= self._settings.restart_budget:
            return Decision(again=False, why=f"{fault}; the restart budget is spent")
        self._faults.append(self._clock())
        return Decision(again=True, after_s=back_off_s(deaths))

    def unplaced(self, fault: str) -> Decision:
        """Decide where the place of what died does not get its resources any more."""
        seconds = self._settings.resources_timeout_s
        what = f"it got no resources within cluster.resources_timeout_s = {seconds:g} s"
        return Decision(again=False, why=f"{fault}; {what}")

    def node_left(self, address: str, actor_ids: Sequence[str]) -> str:
        """Count a lost node as one fault, whatever was on it; the sentence."""
        self._faults.append(self._clock())
        lost = ", ".join(actor_ids) or "a free engine slot"
        self.deaths.append(f"node {address} left the cluster, and with it {lost}")
        return self.deaths[-1]

    def enough(self, alive: int) -> bool:
        """Whether the run goes on with so many alive."""
        return alive >= self._settings.rollout_actors.min

    def too_few(self, alive: int, why: str, *, cluster: str) -> FaultBudgetSpent:
        """Return the end of a run in which so many are alive. why: no other one starts; cluster:
        what it has.
        """
        least, budget = self._settings.rollout_actors.min, self._settings.restart_budget
        known = "".join(f"{death}; " for death in self.deaths[-1:])
        return FaultBudgetSpent(
            f"{alive} rollout actors are alive, cluster.rollout_actors.min is {least}, and {why}; "
            f"{known}{self.spent} faults count against cluster.restart_budget = {budget}; the "
            f"cluster has {cluster}"
        )
