"""`python -m async_grpo.run cfg.yaml [section.key=value ...]`: train, also as a job of Ray.

Runs in: the driver. Stays for ever; `cli` has all verbs.
"""

import sys

from async_grpo import cli
from async_grpo.runtime.stopping import stop_early

if __name__ == "__main__":
    stop_early()  # what follows takes a second to import
    words = sys.argv[1:]
    if words == ["--version"]:
        sys.exit(cli.main(words))
    verb, now = cli.as_now("train", words)
    sys.exit(
        cli.run_verb("train", words)
        if verb == "train"
        else cli.old_spelling("python -m async_grpo.run", "train", words)
    )
