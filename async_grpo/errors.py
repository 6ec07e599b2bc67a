"""Why a run ends, and with which exit code.

Runs in: any process. Every exception that ends a run in an orderly way is a RunError and carries
its exit code as a class attribute; only classes of this module set one, those elsewhere inherit
it. Any other exception is a bug and exits with 1. Between processes they are pickled by class path.
"""

from __future__ import annotations

from collections.abc import Sequence

EXIT_MEANING = {
    0: "done, or stopped on request",
    1: "an unexpected error; the traceback above says where",
    2: "the configuration, an input file or the cluster's resources do not fit",
    3: "the data has no learning signal left, or too many groups failed",
    4: "too many process deaths, the death of a process that cannot be replaced, or failed "
    "checkpoints or copies",
    5: "the run stalled: a wait reached its deadline",
    6: "wrong numbers: a loss or gradient that is not finite, an engine without the learner's "
    "weights, or a token that is too old",
    7: "the journal of the replay queue cannot be written or read",
}


class RunError(Exception):
    """Ends the run in an orderly way with a message for the user."""

    exit_code = 1


class StopRequested(RunError):
    """Somebody asked the run to end."""

    exit_code = 0


class SetupError(RunError):
    """Found out before training: the configuration, the files or the cluster do not fit."""

    exit_code = 2


class DirectoryTaken(RunError):
    """Another start has taken the run directory over, while this run stood still."""

    exit_code = 2


class NoSignal(RunError):
    """Too many groups gave nothing to learn from, or no problem is left to pose."""

    exit_code = 3


class FaultBudgetSpent(RunError):
    """A process died once too often or has no replacement, or checkpoints fail for good."""

    exit_code = 4


class LearnerLost(FaultBudgetSpent):
    """A learner rank died, or is `silent`: all ranks restart from a checkpoint, or the run ends."""

    def __init__(self, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent


class VerifierFailed(RunError):
    """A response could not be scored, and `task.verifier.on_error` is `fail`."""

    exit_code = 4


class Stalled(RunError):
    """A wait reached its deadline."""

    exit_code = 5


class NonFinite(RunError):
    """An update's loss or gradient norm is not finite; `group_ids` of all ranks in that update."""

    exit_code = 6

    def __init__(self, what: str, group_ids: Sequence[int]) -> None:
        super().__init__(what, list(group_ids))  # the driver's copy is made from these
        self.group_ids = list(group_ids)

    def __str__(self) -> str:
        return f"the {self.args[0]} is not finite; groups {self.group_ids}"


class StalenessError(RunError):
    """A token is older than `max_staleness`, or newer than the learner: a bug that ends the run."""

    exit_code = 6


class TransferMismatch(RunError):
    """Weights arrived other than they were sent, or an engine computes with other weights."""

    exit_code = 6


class JournalError(RunError):
    """The journal cannot be written or read."""

    exit_code = 7


class JournalDamage(JournalError):
    """A record in the middle of a journal segment does not add up."""
