"""A vLLM engine that generates groups and takes new weights while it does.

Runs in: rollout actors (vLLM's EngineCore is a child process of theirs). Hides vLLM: its
environment switches, request objects, log-prob containers, pause and resume. Token-in, token-out:
no text enters or leaves.

Invariants: `serving` is the label that new tokens carry; it changes only inside `receive`, between
the load and the resume, and its version never falls. An engine whose weights may be a mixture stays
paused. A response keeps its tokens over a publication. Every returned token has a finite log-prob
under the distribution it was sampled from and a version stamped by the engine; anything else
raises.

Requests to vLLM whose tokens are counted, twice: as vLLM sees them arrive, and request by request.
Hides where vLLM keeps what there is of a request: it forgets it in the moment in which the request
is aborted.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from async_grpo.config.schema import Config, Deadlines
from async_grpo.config.transports import TRANSPORTS
from async_grpo.errors import SetupError
from async_grpo.rollout.early_process import EarlyProcess
from async_grpo.runtime.lifetime import own_directory
from async_grpo.weights.transport import Announcement, Receipt, is_version, parse_label
from async_grpo.wire import VersionSpan

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import IterationStats


Purpose = Literal["rollouts", "probes", "evaluated"]


class CountedRequests:
    """`sampled`: tokens so far: `total` by vLLM's own count, running requests included; and by
    purpose, of requests that ended.

    `cut_off`: tokens of aborted requests for rollouts, by name, for those who ask.
    """

    def __init__(self) -> None:
        self.sampled: Counter[str] = Counter()
        self.cut_off: dict[str, int] = {}

    def logger(self) -> type:
        """A logger for vLLM that only adds up tokens. With one of our own, vLLM notes the times of
        requests without its default loggers.

        It takes the place of the one for Prometheus, which would cost a twentieth of this process's
        time, and whose endpoint nobody serves.
        """
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        sampled = self.sampled

        class Total(PrometheusStatLogger):
            def __init__(self, vllm_config: object, engine_indexes: object = None) -> None: ...
            def log_engine_initialized(self) -> None: ...

            def record(
                self,
                scheduler_stats: object,
                iteration_stats: IterationStats | None,
                *args: object,
                **kwargs: object,
            ) -> None:
                if iteration_stats is not None:
                    sampled["total"] += iteration_stats.num_generation_tokens

        return Total

    async def final(
        self, llm: AsyncLLM, prompt: dict[str, Any], params: Any, name: str, purpose: Purpose
    ) -> RequestOutput | None:
        """What a request came to; its tokens are counted, also when the call is cancelled, which
        aborts it.
        """

        async def last() -> RequestOutput | None:
            final = None
            async for output in llm.generate(prompt, params, name):
                final = output
            return final

        work = asyncio.ensure_future(
            last()
        )  # a task of its own, so that there is something to look at before it is cancelled
        try:
            await asyncio.wait({work})
            final = work.result()
        except BaseException:
            processor = llm.output_processor
            states = [
                processor.request_states[request_id]
                for request_id in processor.external_req_ids.get(name, ())
            ]
            parents = {
                id(state.parent_req): state.parent_req
                for state in states
                if state.parent_req is not None
            }
            ended = sum(
                len(one.token_ids)
                for parent in parents.values()
                for one in parent.output_aggregator
                if one is not None
            )
            work.cancel()
            await asyncio.wait({work})
            tokens = ended + sum(len(state.detokenizer.output_token_ids) for state in states)
            self.sampled[purpose] += tokens
            if purpose == "rollouts":
                self.cut_off[name] = tokens
            raise
        self.sampled[purpose] += (
            sum(len(output.token_ids) for output in final.outputs) if final is not None else 0
        )
        return final


HEALTH_S = 0.5
CPU_KV_CACHE_GB, SHARED_GPU_KV_CACHE_GB = 0.25, 4.0


class EngineError(RuntimeError):
    """The engine returned something that must not be trained, or died."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One response: token_ids [L] int32, logprobs [L] float32 (processed: temperature included),
    labels by span of tokens.

    finish_reason: "" while it goes on. first_token: when the request's first token came, in Unix
    seconds.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    labels: list[tuple[str, int, int]]
    finish_reason: str
    first_token: float

    @property
    def versions(self) -> list[VersionSpan]:
        """Policy versions by span. Raises ValueError for a label that is no version: such a
        response cannot be trained.
        """
        return [
            VersionSpan(parse_label(label).step, start, end) for label, start, end in self.labels
        ]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample: a subset of vLLM's parameters. `seed` None draws from the engine's own
    generator.
    """

    n: int
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


class Engine:
    """One vLLM AsyncLLM. Build it with `await Engine.start(...)`."""

    def __init__(
        self, llm: AsyncLLM, *, stop_token_ids: Sequence[int], recompute: bool, deadlines: Deadlines
    ) -> None:
        self._llm, self._stop_token_ids, self._recompute, self._deadlines = (
            llm,
            list(stop_token_ids),
            recompute,
            deadlines,
        )
        self._requests = 0
        self._running: dict[str, int] = {}  # responses of each named request
        self._counted = CountedRequests()
        self._directory: Path | None = None
        self._steady = asyncio.Event()  # no publication is under way, and the weights are whole
        self._steady.set()
        self.serving = ""

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        model_dir: str,
        device: str,
        backend: str,
        stop_token_ids: Sequence[int],
        label: str,
        seed: int,
        early: EarlyProcess | None = None,
    ) -> Engine:
        """Load `model_dir` on `device` (`cpu` or `cuda`), ready for publications over `backend`,
        serving as `label`. early: from `begin`.
        """
        early = early or cls.begin(device)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.core_client import AsyncMPClient

        if not {"mode", "clear_cache"} <= set(
            inspect.signature(AsyncMPClient.pause_scheduler_async).parameters
        ):
            raise SetupError(
                "this vLLM cannot pause with requests kept, or not say what becomes of "
                "their caches; install the version of packages.toml"
            )
        args = AsyncEngineArgs(
            **_engine_arguments(
                config, model_dir=model_dir, device=device, backend=backend, seed=seed
            )
        )
        counted = CountedRequests()
        with _temporary_files() as directory, early.offered() if early else nullcontext():
            llm = await asyncio.to_thread(
                AsyncLLM.from_engine_args, args, stat_loggers=[counted.logger()]
            )
        engine = cls(
            llm,
            stop_token_ids=stop_token_ids,
            recompute=config.weight_sync.kv_cache == "recompute",
            deadlines=config.weight_sync.deadlines,
        )
        engine._directory, engine._counted = directory, counted
        await engine._set_label(label)
        return engine

    @staticmethod
    def begin(device: str, *, cores: Collection[int] = ()) -> EarlyProcess | None:
        """Let the engine's process start before `start` needs it; on CPU only. cores: on which it
        will run, any if empty.
        """
        _set_environment(device)
        return EarlyProcess(cores=cores) if device == "cpu" else None

    @property
    def serving_version(self) -> int:
        """Policy version of the weights it serves; -1 before the first publication and during the
        self-check.
        """
        return parse_label(self.serving).step if is_version(self.serving) else -1

    @property
    def sampled(self) -> Counter[str]:
        """Tokens sampled so far: `total`, running requests included; and by purpose, of requests
        that ended.
        """
        return self._counted.sampled

    @property
    def paused(self) -> bool:
        """A publication is under way, or has left weights that may be a mixture."""
        return not self._steady.is_set()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        name: str = "",
        purpose: Purpose = "rollouts",
    ) -> list[Completion]:
        """`sampling.n` responses to one prompt, prompt tokens not included. Cancelling the call
        aborts the request.

        name: for `so_far`, `unfinished` and `cut_off`; no two requests have the same.
        """
        if not name:
            self._requests += 1
            return await self._generate(prompt_ids, sampling, f"r{self._requests}", purpose)
        self._running[name] = sampling.n
        try:
            return await self._generate(prompt_ids, sampling, name, purpose)
        finally:
            del self._running[name]

    async def _generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, name: str, purpose: Purpose
    ) -> list[Completion]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        await self._steady.wait()  # the salt below must be that of the weights that will serve it
        params = SamplingParams(
            n=sampling.n,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            stop_token_ids=self._stop_token_ids,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # The salt keeps prefix caches of different versions apart.
        prompt = {"prompt_token_ids": list(prompt_ids), "cache_salt": self.serving}
        final = await self._counted.final(self._llm, prompt, params, name, purpose)
        if final is None or len(final.outputs) != sampling.n:
            raise EngineError(
                f"the engine returned {0 if final is None else len(final.outputs)} of "
                f"{sampling.n} responses"
            )
        first_token = final.metrics.arrival_time + final.metrics.first_token_latency
        try:
            return [
                _completion(output, first_token)
                for output in sorted(final.outputs, key=lambda output: output.index)
            ]
        except EngineError:
            if purpose == "rollouts":
                self._counted.cut_off[name] = sum(len(output.token_ids) for output in final.outputs)
            raise

    @property
    def unfinished(self) -> int:
        """Responses of named requests that have not ended, those included that have not begun."""
        begun = self._llm.output_processor.external_req_ids
        return sum(
            len(begun.get(name, ())) or responses for name, responses in self._running.items()
        )

    def so_far(self, name: str) -> dict[int, Completion]:
        """What there is of the responses of a `generate` that runs, by index. Costs nothing until
        it is asked for; generation goes on.

        vLLM streams to whoever pays for every token, so this looks at what it has gathered for the
        final answer.
        """
        processor, found = self._llm.output_processor, {}
        for request_id in processor.external_req_ids.get(name, ()):
            state = processor.request_states[request_id]
            if state.parent_req is not None:
                found |= {
                    one.index: _completion(one, 0.0)
                    for one in state.parent_req.output_aggregator
                    if one is not None
                }
            tokens, logprobs = (
                state.detokenizer.output_token_ids,
                state.logprobs_processor.logprobs.logprobs,
            )
            if len(tokens) != len(logprobs):
                raise EngineError(
                    f"a response of {len(tokens)} tokens has {len(logprobs)} log-probs; it "
                    "is not kept"
                )
            starts = state.weight_version_starts
            ends = [start for _, start in starts[1:]] + [len(tokens)]
            labels = (
                [(label, start, end) for (label, start), end in zip(starts, ends, strict=True)]
                if starts
                else []
            )
            found[state.request_index] = Completion(
                token_ids=np.asarray(tokens, np.int32),
                logprobs=np.asarray(logprobs, np.float32),
                labels=labels,
                finish_reason="",
                first_token=0.0,
            )
        return found

    def cut_off(self, name: str) -> int:
        """Tokens of a request for rollouts that was aborted, or whose responses are refused;
        once.
        """
        return self._counted.cut_off.pop(name, 0)

    async def score(
        self, sequences: Sequence[tuple[list[int], list[int]]]
    ) -> list[tuple[list[str], np.ndarray]]:
        """Log-probs [L] at temperature 1 of each response in (prompt, response) pairs, and the
        labels under which they were computed.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # The one token that is generated carries the label. Where prompt log-probs are wanted, vLLM
        # reads no cached prefix.
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        async def one(prompt: list[int], response: list[int]) -> tuple[list[str], np.ndarray]:
            await self._steady.wait()
            self._requests += 1
            labels = [self.serving]
            final = await self._counted.final(
                self._llm,
                {"prompt_token_ids": prompt + response},
                params,
                f"s{self._requests}",
                "probes",
            )
            if final is None or final.prompt_logprobs is None:
                raise EngineError("the engine returned no log-probs of a prompt")
            labels += [span.version for span in final.outputs[0].weight_versions or []]
            rows = final.prompt_logprobs[len(prompt) :]
            return labels, np.asarray(
                [row[token].logprob for row, token in zip(rows, response, strict=True)], np.float32
            )

        return list(
            await asyncio.gather(*[one(prompt, response) for prompt, response in sequences])
        )

    async def connect(self, payload: dict[str, Any]) -> Receipt:
        """Prepare the workers for publications (for NCCL: join the group; blocks until the learner
        joins too).
        """
        return self._receipt(await self._workers("connect_weights", payload))

    async def receive(self, announcement: Announcement) -> Receipt:
        """Serve the announced weights: pause with requests kept, load, label, resume.

        When the receipt names a failure, the weights may be a mixture and the engine stays paused
        until a publication succeeds. Raises TimeoutError for a phase beyond its deadline,
        ValueError for a version older than the served one; then the engine must be replaced.
        """
        self._refuse_older(announcement.label)
        self._steady.clear()
        started, deadlines = time.perf_counter(), self._deadlines
        # `pause_generation` is this call and a sleep of 20 ms, which sorts outputs for whoever
        # looks at the time and not at their labels.
        await _within(
            deadlines.pause_s,
            "pause",
            self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=self._recompute),
        )
        lost = await self._workers("cached_tokens") if self._recompute else [0]
        paused = time.perf_counter()
        outcome = self._receipt(await self._workers("take_publication", announcement.payload))
        if outcome.failure:
            return outcome
        loaded = time.perf_counter()
        await _within(deadlines.resume_s, "resume", self._go_on(announcement.label))
        resumed = time.perf_counter()
        seconds = {
            "pause": paused - started,
            "load": loaded - paused,
            "resume": resumed - loaded,
            "total": resumed - started,
        }
        return Receipt(self.serving, seconds=seconds, recomputed_tokens=lost[0])

    async def _workers(self, method: str, *args: object) -> list[Any]:
        """What every worker answers. Raises EngineError when the EngineCore dies: vLLM leaves such
        a call without an answer for ever.
        """
        call = asyncio.ensure_future(self._llm.collective_rpc(method, args=args))
        try:
            while not (await asyncio.wait({call}, timeout=HEALTH_S))[0]:
                await self.check()
            return call.result()
        finally:
            call.cancel()

    def _receipt(self, outcomes: list[dict[str, str]]) -> Receipt:
        """What the workers say, as one answer."""
        failed = next((outcome for outcome in outcomes if outcome), {})
        return Receipt(self.serving, **failed)

    def _refuse_older(self, label: str) -> None:
        if (
            is_version(label)
            and is_version(self.serving)
            and parse_label(label) < parse_label(self.serving)
        ):
            raise ValueError(
                f"version {label} was announced to an engine that serves {self.serving} already"
            )

    async def _go_on(self, label: str) -> None:
        await self._set_label(label)
        await self._llm.resume_generation()
        self._steady.set()

    async def check(self) -> None:
        """Raise EngineError when the EngineCore process is gone."""
        try:
            await self._llm.check_health()
        except (
            Exception
        ) as error:  # vLLM's own types differ by cause; all of them mean the same to the caller
            raise EngineError(f"the engine is not healthy: {error}") from error

    def close(self) -> None:
        """Stop the EngineCore process."""
        self._llm.shutdown()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _set_label(self, label: str) -> None:
        await self._llm.update_weight_version(label)
        self.serving = label


async def _within(seconds: float, phase: str, work: Awaitable[None]) -> None:
    try:
        await asyncio.wait_for(work, seconds)
    except TimeoutError as error:
        raise TimeoutError(
            f"the engine's {phase} took longer than weight_sync.deadlines.{phase}_s = {seconds:g} s"
        ) from error


def stop_tokens(model_dir: str, eos_token_id: int | None) -> list[int]:
    """Token ids that end a response: the tokenizer's eos and those of the model's generation
    configuration.
    """
    from transformers.utils import cached_file

    ids = set() if eos_token_id is None else {eos_token_id}
    found = cached_file(
        model_dir, "generation_config.json", _raise_exceptions_for_missing_entries=False
    )
    if found is not None:
        eos = json.loads(Path(found).read_text(encoding="utf-8")).get("eos_token_id")
        ids |= set(eos) if isinstance(eos, list) else {eos} if eos is not None else set()
    if not ids:
        raise ValueError(
            f"{model_dir} names no end-of-sequence token, so no response could end; add "
            "one to its tokenizer"
        )
    return sorted(ids)


@contextmanager
def _temporary_files() -> Iterator[Path]:
    """While the engine's processes start: the directory where they put their sockets and rendezvous
    files, which vLLM leaves when they are killed.
    """
    directory, before = own_directory("engine"), os.environ.get("TMPDIR")
    os.environ["VLLM_RPC_BASE_PATH"] = os.environ["TMPDIR"] = str(directory)
    os.environ["ASYNC_GRPO_ENGINE_OWNER"] = str(os.getpid())
    try:
        yield directory
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        del os.environ["ASYNC_GRPO_ENGINE_OWNER"]
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def _set_environment(device: str) -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault(
        "JOBLIB_MULTIPROCESSING", "0"
    )  # importing it would make a semaphore, which stays when the process is killed
    if device == "cpu":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
            "0"  # keeps the `uni` executor: one EngineCore child, no second worker process
        )
        os.environ["TORCHDYNAMO_DISABLE"] = (
            "1"  # compiling small sampler functions would take 18 s at the first request
        )
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def kv_cache_gb(config: Config, *, device: str, backend: str) -> float | None:
    """KV cache per engine GPU or process in GiB; None where vLLM chooses."""
    if config.cluster.engine.kv_cache_gb is not None:
        return config.cluster.engine.kv_cache_gb
    if device == "cpu":
        return CPU_KV_CACHE_GB
    return SHARED_GPU_KV_CACHE_GB if TRANSPORTS[backend].colocated else None


def _engine_arguments(
    config: Config, *, model_dir: str, device: str, backend: str, seed: int
) -> dict[str, Any]:
    from vllm.config.weight_transfer import WeightTransferConfig

    settings, cpu = config.cluster.engine, device == "cpu"
    dtype = config.model.dtype if config.model.dtype != "auto" else "float32" if cpu else "bfloat16"
    memory = kv_cache_gb(config, device=device, backend=backend)
    arguments: dict[str, Any] = {
        "model": model_dir,
        "dtype": dtype,
        "seed": seed,
        "max_model_len": config.rollout.prompt_length + config.rollout.response_length,
        "max_num_seqs": settings.max_num_seqs,
        "skip_tokenizer_init": True,
        "trust_remote_code": config.model.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": cpu if settings.enforce_eager is None else settings.enforce_eager,
        "weight_transfer_config": WeightTransferConfig(backend=TRANSPORTS[backend].vllm_name),
        "worker_extension_cls": "async_grpo.weights.worker.WorkerExtension",
        "kv_cache_memory_bytes": None if memory is None else int(memory * 2**30),
    }
    if config.model.lm_head_fp32:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if cpu:
        arguments |= {"distributed_executor_backend": "uni", "block_size": 32}
    return arguments


def _completion(output: CompletionOutput, first_token: float) -> Completion:
    length = len(output.token_ids)
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"a response ended with {output.finish_reason!r}; it is not trained")
    if (
        output.logprobs is None
        or len(output.logprobs.logprobs) != length
        or list(output.logprobs.token_ids) != list(output.token_ids)
    ):
        raise EngineError(
            f"a response of {length} tokens came without one log-prob per token; it is not trained"
        )
    labels = [(span.version, span.start, span.end) for span in output.weight_versions or []]
    return Completion(
        token_ids=np.asarray(output.token_ids, np.int32),
        logprobs=np.asarray(output.logprobs.logprobs, np.float32),
        labels=labels,
        finish_reason=output.finish_reason,
        first_token=first_token,
    )
