"""Train the warm-start model in a process of its own.

Runs in: the child that `cache.ensure_warm_start` starts. Hides nothing.
"""

from async_grpo.contrib.warm_start.cache import main

if __name__ == "__main__":
    main()
