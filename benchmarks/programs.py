"""Agents over HTTP: `python -m benchmarks.programs [--only learning load] [--seeds 0 1 2]
[--out FILE.jsonl] [--docs FILE]`.

    learning   the task `chain` as a Python environment (configs/chain.yaml), and the same problems
               played by an unmodified `openai` loop, a program per episode
               (examples/openai_loop/chain.yaml): accuracy after as many steps, from the same start
    load       64 episodes with 4 requests each, all at once, on one engine: over the endpoint,
               from a client in a process of its own, and as calls of the engine; paired

Rows of runs are appended to FILE, and what stands in it is not run again. A client process shares
the machine's two cores with the engine, so what it costs counts against the endpoint here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from async_grpo.agents.endpoint.served import ServedEpisode
from async_grpo.agents.endpoint.server import Endpoint
from async_grpo.config.load import load_config, resolve
from async_grpo.config.schema import Config
from async_grpo.contrib.warm_start.cache import ensure_warm_start
from async_grpo.rollout.chat_format import PlainFormat
from async_grpo.rollout.engine import Engine, Sampling
from async_grpo.rollout.episodes import Episode
from async_grpo.rollout.session import Session
from benchmarks.async_vs_sync import until
from benchmarks.machine import machine
from benchmarks.rows import append, read_rows
from benchmarks.tables import aim, spread, write_docs

ROOT = Path(__file__).parents[1]
SIDES = {"environment": "configs/chain.yaml", "program": "examples/openai_loop/chain.yaml"}
STEPS, GOAL, TIMEOUT_S = 20, 0.9, 1500.0
EPISODES, REQUESTS, ROUNDS = 64, 4, 6
PROMPT_TOKENS, TOKENS = 32, 64
"""Of a request of the load, and of each answer: random weights never end one."""
TEXTS = [
    [f"{episode}:{request}>".rjust(PROMPT_TOKENS, "0") for request in range(REQUESTS)]
    for episode in range(EPISODES)
]
"""Prompts of as many characters, which are tokens."""


def learn(side: str, seed: int) -> dict[str, Any]:
    """Run one side; its evaluations by step."""
    with tempfile.TemporaryDirectory(prefix="programs-") as scratch:
        run_dir, began = Path(scratch) / "run", time.monotonic()
        command = [
            *(sys.executable, "-m", "async_grpo.run", SIDES[side]),
            f"seed={seed}",
            f"run.dir={run_dir}",
            f"run.total_steps={STEPS}",
            "environment.max_invalid=0",  # programs go on too
            "evaluation={every_steps: 2, max_samples: 200, n: 0}",
        ]
        with open(Path(scratch) / "log.txt", "w+") as log:
            found = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=TIMEOUT_S
            )
            if found.returncode:
                log.seek(0)
                raise RuntimeError(f"{side}, seed {seed}: {log.read()[-2000:]}")
        text = (run_dir / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [line for line in lines if "time/step" in line]
    return {
        "kind": "learning",
        "side": side,
        "seed": seed,
        "points": [
            (int(line["step"]), 0.0, 0, line["eval/accuracy_greedy"])
            for line in lines
            if "eval/accuracy_greedy" in line
        ],
        "lag_mean": statistics.mean(line["train/lag_mean"] for line in steps),
        "step_s": statistics.median(line["time/step"] for line in steps),
        "total_s": time.monotonic() - began,
        "machine": machine(),
    }


def learning_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The result as Markdown."""
    runs = {(row["seed"], row["side"]): row for row in rows if row["kind"] == "learning"}
    seeds = sorted({seed for seed, _ in runs if all((seed, side) in runs for side in SIDES)})
    if not seeds:
        return ["Not measured yet."]
    lines = [
        f"{rows[-1]['machine']}; {STEPS} steps of 32 groups x 8, accuracy on 200 held-out "
        "problems every second step.",
        "",
        "| seed | side | before | 90 % after | at the end | mean lag | median step |",
        "|---|---|---|---|---|---|---|",
    ]
    for seed in seeds:
        for side in SIDES:
            row = runs[seed, side]
            reached = until(row["points"], GOAL, 0)
            when = "never" if reached is None else f"{reached:.1f} steps"
            lines.append(
                f"| {seed} | {side} | {row['points'][0][3]:.1%} | {when} | "
                f"{row['points'][-1][3]:.1%} | {row['lag_mean']:.2f} | {row['step_s']:.2f} s |"
            )
    return lines


def load_config_of(directory: str) -> Config:
    """Settings of the load: a model of 3 M parameters with random weights."""
    return resolve(
        load_config(
            str(ROOT / SIDES["program"]),
            [
                f"run.dir={directory}",
                "model.warm_start={hidden_size: 256, intermediate_size: 768, layers: 4, "
                "max_steps: 0, blur_max_steps: 0}",
                "cluster.engine.max_num_seqs=256",
                f"rollout.prompt_length={PROMPT_TOKENS}",
                f"rollout.turn_length={TOKENS}",
                f"rollout.response_length={TOKENS * REQUESTS}",
                f"rollout.context_length={PROMPT_TOKENS + TOKENS * REQUESTS}",
                f"rollout.max_turns={REQUESTS}",
            ],
        )
    )


class Load:
    """An engine, and the same requests in two ways."""

    def __init__(self, config: Config, engine: Engine, tokenizer: Any) -> None:
        self._config, self._engine, self._tokenizer = config, engine, tokenizer
        self._counts: Counter[str] = Counter()
        self._endpoint = Endpoint(config.endpoint, words=tokenizer.decode, counts=self._counts)
        self._sampling = Sampling(n=1, max_tokens=TOKENS, temperature=1.0)

    async def start(self) -> None:
        """Begin to listen."""
        await self._endpoint.start()

    async def close(self) -> None:
        """Stop listening."""
        await self._endpoint.close()

    async def calls(self) -> tuple[float, float]:
        """Tokens per second of calls, and CPU seconds of this process."""
        prompts = [self._tokenizer(text)["input_ids"] for texts in TEXTS for text in texts]
        began, cpu = time.perf_counter(), time.process_time()
        done = await asyncio.gather(
            *[self._engine.generate(ids, self._sampling) for ids in prompts]
        )
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        return sum(len(one.token_ids) for [one] in done) / seconds, cpu

    async def served(self, client: asyncio.subprocess.Process) -> tuple[float, float, float]:
        """Tokens per second over the endpoint, CPU seconds of this process and of the client."""
        async with AsyncExitStack() as stack:
            episodes = [self._episode() for _ in range(EPISODES)]
            keys = [
                await stack.enter_async_context(self._endpoint.serving(one)) for one in episodes
            ]
            assert client.stdin is not None and client.stdout is not None
            cpu = time.process_time()
            asked = {"url": self._endpoint.url, "keys": keys, "texts": TEXTS}
            client.stdin.write(json.dumps(asked).encode() + b"\n")
            said = json.loads(await client.stdout.readline())
            cpu = time.process_time() - cpu
            tokens = sum(one.episode.session.sampled for one in episodes)
            assert said["answered"] == EPISODES * REQUESTS, said
        return tokens / said["seconds"], cpu, said["cpu"]

    def _episode(self) -> ServedEpisode:
        async def sample(tokens: list[int], sampling: Sampling) -> Any:
            [done] = await self._engine.generate(tokens, sampling)
            return done

        return ServedEpisode(
            self._config.rollout,
            Episode(Session(), {"correct": 0.0}),
            sample=sample,
            formats=lambda tools: PlainFormat(self._tokenizer),
            text=lambda ids: self._tokenizer.decode(ids, skip_special_tokens=False),
            sampling=self._sampling,
            counts=self._counts,
        )


async def loads(rounds: int) -> dict[str, Any]:
    """Both ways in turn, after a round that warms up."""
    with tempfile.TemporaryDirectory(prefix="programs-") as scratch:
        config = load_config_of(scratch)
        model = await asyncio.to_thread(
            ensure_warm_start, config, progress=lambda text: None, timeout_s=600.0
        )
        from transformers import AutoTokenizer

        engine = await Engine.start(
            config,
            model_dir=model,
            device="cpu",
            backend="shared_memory",
            stop_token_ids=[],
            label="v0.0",
            seed=1,
        )
        load = Load(config, engine, AutoTokenizer.from_pretrained(model))
        await load.start()
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.programs_client"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        found: dict[str, list[float]] = {"calls": [], "served": [], "cpu_ms": [], "client_ms": []}
        try:
            for number in range(rounds + 1):
                both: dict[str, Any] = {}
                for way in ("calls", "served") if number % 2 else ("served", "calls"):
                    both[way] = await (load.calls() if way == "calls" else load.served(client))
                if number:
                    found["calls"].append(both["calls"][0])
                    found["served"].append(both["served"][0])
                    per_request = 1e3 / (EPISODES * REQUESTS)
                    found["cpu_ms"].append((both["served"][1] - both["calls"][1]) * per_request)
                    found["client_ms"].append(both["served"][2] * per_request)
        finally:
            client.kill()
            await client.wait()
            await load.close()
            engine.close()
    return {"kind": "load", "machine": machine(), **found}


def load_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The result as Markdown."""
    found = [row for row in rows if row["kind"] == "load"]
    if not found:
        return ["Not measured yet."]
    row = found[-1]
    ratios = [one / other for one, other in zip(row["served"], row["calls"], strict=True)]
    median = statistics.median(ratios)
    return [
        f"{row['machine']}; {EPISODES} episodes x {REQUESTS} requests at once, prompts of "
        f"{PROMPT_TOKENS} tokens and answers of {TOKENS}; {len(ratios)} rounds.",
        "",
        "| | |",
        "|---|---|",
        f"| calls of the engine, tokens/s | {spread(row['calls'], ',.0f')} |",
        f"| over the endpoint, tokens/s | {spread(row['served'], ',.0f')} |",
        f"| endpoint / calls | {spread(ratios)} |",
        f"| more CPU of the actor per request | {spread(row['cpu_ms'], '.1f')} ms |",
        f"| CPU of the client per request | {spread(row['client_ms'], '.1f')} ms |",
        "",
        "| aim | figure | |",
        "|---|---|---|",
        aim("at least 0.9 of the calls", f"{median:.2f}", met=median >= 0.9),
    ]


def main() -> None:
    """Measure what FILE lacks, print the tables, and write them into the docs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=("learning", "load"), default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=Path("docs/programs.jsonl"))
    parser.add_argument("--docs", type=Path)
    arguments = parser.parse_args()
    only = arguments.only or ["learning", "load"]
    if "load" in only:
        append(arguments.out, asyncio.run(loads(arguments.rounds)))
    if "learning" in only:
        done = {(row.get("side"), row.get("seed")) for row in read_rows(arguments.out)}
        for seed in arguments.seeds:
            for side in SIDES:
                if (side, seed) not in done:
                    append(arguments.out, learn(side, seed))
    rows = read_rows(arguments.out)
    for name, table in (("learning", learning_table(rows)), ("load", load_table(rows))):
        print("\n".join(table), flush=True)
        if arguments.docs:
            write_docs(arguments.docs, table, benchmark=f"programs.{name}")


if __name__ == "__main__":
    main()
