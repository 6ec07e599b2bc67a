"""What seeds cost the sampler: `python -m benchmarks.seeded [--rounds 6]`.

One engine as a rollout actor runs it generates the same number of groups with a seed per group
(`rollout.seeded: on`) and without, in turn. The model is small and has random weights, so that
responses have their full length; with a larger model the sampler's share of the time, and with it
the cost of seeds, is smaller.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import time
from pathlib import Path

from async_grpo.config.load import load_config, resolve
from async_grpo.config.schema import Config
from async_grpo.contrib.warm_start.cache import ensure_warm_start
from async_grpo.rollout.engine import Engine, Sampling

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
OVERRIDES = [
    "model.warm_start.max_steps=0",
    "model.warm_start.blur_max_steps=0",
    "rollout.response_length=64",
    "run.dir=/tmp/async_grpo_seeded",
]
GROUPS, GROUP_SIZE, PROMPT = 32, 8, list(range(3, 11))


async def tokens_per_s(engine: Engine, config: Config, *, seeded: bool, start: int) -> float:
    """Tokens per second over GROUPS groups at once."""

    def sampling(group: int) -> Sampling:
        seed = 7_919 * (start + group) if seeded else None
        return Sampling(
            n=GROUP_SIZE, max_tokens=config.rollout.response_length, temperature=1.0, seed=seed
        )

    began = time.perf_counter()
    answers = await asyncio.gather(
        *[engine.generate(PROMPT, sampling(group)) for group in range(GROUPS)]
    )
    return sum(len(one.token_ids) for group in answers for one in group) / (
        time.perf_counter() - began
    )


async def measure(config: Config, rounds: int) -> dict[bool, list[float]]:
    """Rates without and with seeds, in rounds; the first round warms up."""
    model = await asyncio.to_thread(
        ensure_warm_start, config, progress=lambda text: None, timeout_s=600.0
    )
    engine = await Engine.start(
        config,
        model_dir=model,
        device="cpu",
        backend="shared_memory",
        stop_token_ids=[1],
        label="v0",
        seed=1,
    )
    rates: dict[bool, list[float]] = {False: [], True: []}
    try:
        for number in range(rounds + 1):
            for seeded in (False, True) if number % 2 else (True, False):
                rate = await tokens_per_s(engine, config, seeded=seeded, start=number * GROUPS)
                if number:
                    rates[seeded].append(rate)
    finally:
        engine.close()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    config = resolve(load_config(str(CONFIG), OVERRIDES))
    rates = asyncio.run(measure(config, arguments.rounds))
    ratios = [
        with_seeds / without for without, with_seeds in zip(rates[False], rates[True], strict=True)
    ]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores; {GROUPS} groups x {GROUP_SIZE} "
        f"responses x up to 64 tokens, {arguments.rounds} rounds"
    )
    for seeded, name in ((False, "without seeds"), (True, "with seeds")):
        print(
            f"{name:14} {statistics.median(rates[seeded]):8.0f} tokens/s "
            f"({min(rates[seeded]):.0f} to {max(rates[seeded]):.0f})"
        )
    print(
        f"with / without {statistics.median(ratios):8.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
