"""`python -m async_grpo.run cfg.yaml [section.key=value ...]`: train, also as a job of Ray.

Runs in: the driver.
"""

import sys

from async_grpo.runtime.stopping import stop_early

if __name__ == "__main__":
    stop_early()  # what follows takes a second to import

    from async_grpo.run.command import main

    sys.exit(main())
