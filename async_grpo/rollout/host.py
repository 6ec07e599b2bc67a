"""One engine with all that it needs to answer problems: tokenizer, task, verifiers, environments.

Runs in: rollout actors, and the commands that evaluate or serve a model alone. Knows nothing of
tickets, groups and the queue (`producer`).

Invariant: `start` reaches `EngineKind.begin` before torch, transformers or the engine's library is
imported.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_grpo.algo.accuracy import ProblemOutcome
from async_grpo.config.schema import Config
from async_grpo.environments.tools import with_tools
from async_grpo.errors import SetupError
from async_grpo.rollout.engine.base import Completion, Engine, Sampling, stop_tokens
from async_grpo.rollout.engine.choice import ENGINE
from async_grpo.rollout.episodes import PlayerParts, PromptTooLong
from async_grpo.rollout.evaluator import EngineEvaluator, probe_sequences
from async_grpo.rollout.generation import Generated, generate
from async_grpo.rollout.players import Player, Players
from async_grpo.rollout.posed import PosedTask
from async_grpo.rollout.time_accounting import EngineTime
from async_grpo.runtime.cores import compute_in
from async_grpo.runtime.garbage import keep_startup
from async_grpo.tasks.base import Problem, Problems, Prompt, Task
from async_grpo.tasks.chat import prompt_ids
from async_grpo.tasks.mixture import create_tasks, parts_of
from async_grpo.tasks.verifier import VerifierPool
from async_grpo.weights.transport import Announcement, Receipt


@dataclass(frozen=True)
class Parts:
    """What `EngineHost.start` loads. posed: each task by its name, "" where there is only one."""

    engine: Engine
    tokenizer: Any
    task: Problems
    posed: Mapping[str, PosedTask]
    evaluator: EngineEvaluator
    players: Players | None = None


class EngineHost:
    """Starts an engine, answers problems with it, and lets it take new weights."""

    def __init__(
        self,
        config: Config,
        *,
        actor_id: str,
        model_dir: str,
        device: str,
        cores: Sequence[int],
        threads: int = 0,
    ) -> None:
        """cores: of the engine; those of its process where there are none. threads: of an engine
        that others lend cores.
        """
        self.actor_id = actor_id
        self._config = config
        self._model_dir, self._device = model_dir, device
        self._cores, self._threads = set(cores), threads
        self._parts: Parts | None = None
        self._counts: Counter[str] = Counter()
        self._paused_s = 0.0
        self._time = EngineTime()
        self._changed = asyncio.Event()
        """Something happened that may be waited for, such as new weights."""
        self._sleep = ExitStack()
        """Open while the engine sleeps."""

    @property
    def parts(self) -> Parts:
        """Engine, task and verifiers. Raises RuntimeError before `start` has returned."""
        if self._parts is None:
            raise RuntimeError(f"{self.actor_id} has not loaded its engine; call start() first")
        return self._parts

    async def start(self, *, backend: str, label: str) -> int:
        """Load tokenizer, task, verifiers and engine, serving as `label`; the responses that the
        engine generates at the same time.
        """
        if self._threads:
            compute_in(self._threads)
        early = ENGINE.begin(self._device, cores=self._cores)
        from async_grpo.runtime import light_imports  # noqa: F401, I001 - before transformers
        from transformers import AutoTokenizer

        config = self._config
        tokenizer = AutoTokenizer.from_pretrained(
            self._model_dir, trust_remote_code=config.model.trust_remote_code
        )
        task, first = self._task()
        if not isinstance(first.prompt, str) and tokenizer.chat_template is None:
            raise SetupError(
                f"task {config.task_names} asks in chat messages, but the tokenizer of "
                f"{self._model_dir} has no chat template; use an instruction-tuned model, or the "
                "task's plain style (task.options.style=plain)"
            )
        others = self._other_cores
        posed = {own.posed: self._posed(own, one, others) for own, one in parts_of(config, task)}
        starting = asyncio.gather(*[one.start() for one in posed.values() if not one.plays])
        engine = await ENGINE.start(
            config,
            model_dir=self._model_dir,
            device=self._device,
            backend=backend,
            label=label,
            early=early,
            stop_token_ids=stop_tokens(self._model_dir, tokenizer.eos_token_id),
            seed=hash63(config.seed, self.actor_id) >> 32,
        )
        await starting
        evaluator = EngineEvaluator(
            config,
            engine=engine,
            task=task,
            posed=posed,
            pose=lambda own, other: self._posed(own, other, others),
            encode=self._encode,
            text=self._text,
        )
        shared = PlayerParts(config, engine, tokenizer, self._counts, self.actor_id, cpu=others)
        self._parts = Parts(engine, tokenizer, task, posed, evaluator, Players(shared))
        for one in posed.values():
            await one.start()
        keep_startup()
        return engine.max_num_seqs

    async def receive(self, announcement: Announcement) -> Receipt:
        """Take and serve the announced weights."""
        # an adapter is loaded beside others, and may wait for a response to end
        goes_on = self._config.adapter_slots > 0
        with nullcontext() if goes_on else self._time.during("paused"):
            receipt = await self.parts.engine.receive(announcement)
        if goes_on or not receipt.failure:  # awake
            self._sleep.close()
        self._paused_s += receipt.seconds.get("total", 0.0)
        self._counts["reprefilled"] += receipt.recomputed_tokens
        self._changed.set()
        return receipt

    async def sleep(self) -> None:
        """Let the engine give the GPU's memory back."""
        lost = await self.parts.engine.sleep()
        self._counts["reprefilled"] += lost
        self._sleep.close()
        self._sleep.enter_context(self._time.during("paused"))

    async def wake(self) -> None:
        """Let the engine go on with the weights that it serves."""
        await self.parts.engine.wake()
        self._sleep.close()

    async def evaluate(
        self, *, indices: Sequence[int], total: int, label: str, samples: int
    ) -> tuple[list[ProblemOutcome], list[dict[str, Any]]]:
        """Outcomes and samples of these held-out problems (`EngineEvaluator.answer`)."""
        with self._time.during("evaluating"):
            return await self.parts.evaluator.answer(
                indices=indices, total=total, label=label, samples=samples
            )

    async def generate(self, prompt: Prompt, sampling: Sampling) -> list[Generated]:
        """Responses to one prompt outside of training, see `generation.generate`."""
        parts = self.parts
        return await generate(parts.engine, parts.tokenizer, self._config.rollout, prompt, sampling)

    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        """Return a few short responses as (prompt, response, log-probs), to compare with the
        learner.
        """
        parts = self.parts
        return await probe_sequences(parts.engine, parts.task, self._encode, self._config.rollout)

    async def health(self) -> None:
        """Raise EngineError when the engine is dead."""
        await self.parts.engine.check()

    async def status(self) -> dict[str, Any]:
        """Return the served label and busy verifiers, for post-mortems; also before `start` has
        returned.
        """
        parts = self._parts
        return {
            "serving": "it is starting" if parts is None else parts.engine.serving,
            "paused": parts is not None and parts.engine.paused,
            "counts": {**self._counts, "paused_s": self._paused_s},
            "verifying": []
            if parts is None
            else [busy for one in parts.posed.values() for busy in one.verifiers.busy()],
        }

    async def close(self) -> None:
        """Stop the engine and the verifiers."""
        await self.parts.evaluator.close()
        for one in self.parts.posed.values():
            await one.close()
        if self.parts.players is not None:
            await self.parts.players.close()
        self.parts.engine.close()

    def _task(self) -> tuple[Problems, Problem]:
        """Load what is posed, and one of its problems: it may have no training data."""
        task = create_tasks(self._config)
        return task, task.evaluation(1)[0]

    def _posed(self, config: Config, task: Task, cpu: set[int]) -> PosedTask:
        return PosedTask(
            config,
            with_tools(task, config.environment.tools),
            make_verifiers=lambda: VerifierPool(config.task, seed=config.seed, cpu=cpu),
            start_player=self._player,
        )

    @property
    def _other_cores(self) -> set[int]:
        """Cores that the engine does not use, for what is not in this process; or all."""
        everywhere = os.sched_getaffinity(0)
        return everywhere - self._cores or everywhere

    async def _player(self, config: Config, task: Any) -> Player:
        assert self.parts.players is not None
        return await self.parts.players.of(config, task)

    def _encode(self, problem: Problem) -> list[int]:
        ids, limit = prompt_ids(self.parts.tokenizer, problem.prompt), self._config.rollout
        if len(ids) > limit.prompt_length:
            raise PromptTooLong(
                f"a prompt has {len(ids)} tokens, rollout.prompt_length is {limit.prompt_length}"
            )
        return ids

    def _text(self, completion: Completion) -> str:
        return self.parts.tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def hash63(*parts: object) -> int:
    """Hash parts to a number of 63 bits, the same everywhere."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
