"""`python -m async_grpo VERB ...`: the command line (`cli`)."""

from async_grpo.cli import script

if __name__ == "__main__":
    script()
