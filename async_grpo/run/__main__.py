"""`python -m async_grpo.run cfg.yaml [section.key=value ...]`: train, also as a job of Ray.

Runs in: the driver. Stays for ever; `cli` has all verbs.
"""

import sys

from async_grpo import cli
from async_grpo.runtime.stopping import stop_early

if __name__ == "__main__":
    stop_early()  # what follows takes a second to import
    words = sys.argv[1:]
    verb = cli.as_now("train", words)[0]
    if verb != "train" and words != ["--version"]:
        cli.old_command("python -m async_grpo.run", "train", words)
    with cli.process(verb) as ending:
        ending.code = cli.main(words if words == ["--version"] else ["train", *words])
