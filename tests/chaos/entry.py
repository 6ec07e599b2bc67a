"""`python -m tests.chaos.entry cfg.yaml [section.key=value ...]`: the command line of a run whose
processes keep a record (`watched`).
"""

from __future__ import annotations

import os
import sys

from async_grpo import cli
from async_grpo.cluster import engine_processes, learner_group
from async_grpo.run import trainer
from tests.chaos import watched


class WatchedTrainer(trainer.Trainer):
    """Writes down which files of checkpoints the driver touches."""

    def start(self) -> None:
        if not self._started:
            record = watched.Record(self.config.run.dir, "driver")
            record.write("driver")
            watched.Accesses(self.config.run.dir, "driver", record)
        super().start()


def main() -> int:
    os.environ[watched.DRIVER] = str(os.getpid())
    engine_processes.RolloutProcess = watched.WatchedRollout
    learner_group.LearnerProcess = watched.WatchedLearner
    trainer.Trainer = WatchedTrainer
    return cli.main(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
