"""The engine of vLLM.

Runs in: rollout actors (vLLM's EngineCore is a child process of theirs). Hides vLLM: its
environment switches, request objects, log-prob containers, pause and resume. Token-in, token-out:
no text enters or leaves.

Invariants, beside those of every engine (`base`): tokens are counted twice, as vLLM sees them
arrive, and request by request, aborted ones included (vLLM forgets a request the moment it is
aborted).
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_grpo.config.schema import Config, Deadlines
from async_grpo.config.transports import TRANSPORTS
from async_grpo.errors import SetupError
from async_grpo.rollout.engine.base import Completion, EngineError, Purpose, Sampling
from async_grpo.rollout.engine.speeds import Speeds
from async_grpo.rollout.engine.vllm.adapters import Adapters
from async_grpo.rollout.engine.vllm.arguments import (
    TIES,
    engine_arguments,
    set_environment,
    transfer_name,
)
from async_grpo.rollout.engine.vllm.early_process import EarlyProcess, environment
from async_grpo.rollout.engine.vllm.kv_cache import CacheChoice, Mode, cache_mode
from async_grpo.rollout.engine.vllm.support import adapt, gpu_bytes
from async_grpo.runtime.lifetime import own_directory
from async_grpo.weights.transport import Announcement, Receipt, is_version, parse_label
from async_grpo.wire.kept import KeptSets

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


HEALTH_S = 0.5


class CountedRequests:
    """Sends requests to vLLM and counts their tokens."""

    def __init__(self) -> None:
        self.speeds = Speeds()
        self.sampled: Counter[str] = Counter()
        """`total` by vLLM's own count, running requests included; and by purpose, of ended ones."""
        self.cut_off: dict[str, int] = {}
        """Tokens of aborted requests for rollouts, by name, until `VllmEngine.cut_off` asks."""

    def logger(self) -> type:
        """Make a logger class that only adds up tokens, so that vLLM notes request times. It
        replaces the Prometheus logger, a twentieth of this process's time for an endpoint that is
        not served.
        """
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        sampled, speeds = self.sampled, self.speeds

        class Total(PrometheusStatLogger):
            def __init__(self, vllm_config: object, engine_indexes: object = None) -> None: ...
            def log_engine_initialized(self) -> None: ...

            def record(
                self,
                scheduler_stats: SchedulerStats | None,
                iteration_stats: IterationStats | None,
                *args: object,
                **kwargs: object,
            ) -> None:
                if iteration_stats is not None:
                    sampled["total"] += iteration_stats.num_generation_tokens
                if scheduler_stats is not None and scheduler_stats.iteration_details is not None:
                    tokens = scheduler_stats.iteration_details.num_generation_tokens
                    goes_on = scheduler_stats.num_running_reqs > 0
                    if tokens:
                        speeds.stepped(tokens, goes_on=goes_on)

        return Total

    async def final(
        self,
        llm: AsyncLLM,
        prompt: dict[str, Any],
        params: Any,
        name: str,
        purpose: Purpose,
        adapter: LoRARequest | None = None,
    ) -> RequestOutput | None:
        """Send a request, count its tokens, also if cancelled, and return the last output."""

        async def last() -> RequestOutput | None:
            final = None
            async for output in llm.generate(prompt, params, name, lora_request=adapter):
                final = output
            return final

        self.speeds.asked()
        # a task of its own, so that its tokens can be looked at before it is cancelled
        work = asyncio.ensure_future(last())
        try:
            await asyncio.wait({work})
            final = work.result()
        except BaseException:
            states = list(_states(llm, name))
            parents = {id(state.parent_req): state.parent_req for state in states}
            ended = sum(len(one.token_ids) for parent in parents.values() for one in _ended(parent))
            work.cancel()
            await asyncio.wait({work})
            tokens = ended + sum(len(state.detokenizer.output_token_ids) for state in states)
            self.sampled[purpose] += tokens
            if purpose == "rollouts":
                self.cut_off[name] = tokens
            raise
        if final is not None:
            self.sampled[purpose] += sum(len(output.token_ids) for output in final.outputs)
        return final


def _states(llm: AsyncLLM, name: str) -> Iterator[Any]:
    """vLLM's state of every running response of a request."""
    processor = llm.output_processor
    for request_id in processor.external_req_ids.get(name, ()):
        yield processor.request_states[request_id]


def _ended(parent: Any) -> list[CompletionOutput]:
    """Responses that have ended, of a request whose others still run (None: it has one only)."""
    return [] if parent is None else [one for one in parent.output_aggregator if one is not None]


class VllmEngine:
    """One vLLM AsyncLLM. Build it with `await VllmEngine.start(...)`."""

    def __init__(
        self,
        llm: AsyncLLM,
        *,
        stop_token_ids: Sequence[int],
        kv_cache: Mode,
        deadlines: Deadlines,
        adapters: Adapters | None = None,
        counted: CountedRequests | None = None,
        directory: Path | None = None,
    ) -> None:
        """adapters: None where it gets whole weights. directory: temporary files of the engine."""
        self._llm, self.stop_token_ids = llm, list(stop_token_ids)
        self._caches, self._deadlines = CacheChoice(kv_cache), deadlines
        self._counted, self._directory = counted or CountedRequests(), directory
        self._adapters = adapters or Adapters(0)
        self._requests = 0
        self._running: dict[str, int] = {}  # responses of each named request
        self._steady = asyncio.Event()  # no publication is under way, and the weights are whole
        self._steady.set()
        self._changes = asyncio.Lock()  # of weights, and of what is mapped
        self._asleep = self._mixed = False  # mixed: a load began, and has not ended well
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
    ) -> VllmEngine:
        """Load `model_dir` on `cpu` or `cuda`, serving as `label`. early: from `begin`."""
        early = early or cls.begin(device)
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.core_client import AsyncMPClient

        from async_grpo.rollout.engine.vllm.scheduler import HeldOutputs

        pause = inspect.signature(AsyncMPClient.pause_scheduler_async)
        if not {"mode", "clear_cache"} <= pause.parameters.keys():
            raise SetupError(
                "this vLLM cannot pause and keep its requests, or does not say what becomes of "
                "their caches; install the version of packages.toml"
            )
        shared = device == "cuda" and TRANSPORTS[backend].colocated
        arguments = engine_arguments(
            config,
            model_dir=model_dir,
            device=device,
            backend=backend,
            seed=seed,
            gpu_bytes=gpu_bytes() if shared else None,
        )
        transfer = WeightTransferConfig(backend=transfer_name(backend))
        args = AsyncEngineArgs(
            **arguments, weight_transfer_config=transfer, scheduler_cls=HeldOutputs
        )
        adapt(args, device=device, given=arguments)
        counted = CountedRequests()
        with _temporary_files() as directory, early.offered() if early else nullcontext():
            llm = await asyncio.to_thread(
                AsyncLLM.from_engine_args,
                args,
                # without it vLLM takes the least of its limits, whatever the GPU
                usage_context=UsageContext.OPENAI_API_SERVER,
                stat_loggers=[counted.logger()],
            )
        engine = cls(
            llm,
            stop_token_ids=stop_token_ids,
            kv_cache=cache_mode(config, device=device),
            deadlines=config.weight_sync.deadlines,
            adapters=Adapters(config.adapter_slots),
            counted=counted,
            directory=directory,
        )
        await engine._set_label(label)
        return engine

    @staticmethod
    def begin(device: str, *, cores: Collection[int] = ()) -> EarlyProcess | None:
        """Launch the engine's process before `start` needs it (CPU only), on these cores or any."""
        set_environment(device)
        return EarlyProcess(cores=cores) if device == "cpu" else None

    @property
    def max_num_seqs(self) -> int:
        """Responses that it generates at the same time."""
        return self._llm.vllm_config.scheduler_config.max_num_seqs

    @property
    def serving_version(self) -> int:
        """Served policy version; -1 before the first publication and during the self-check."""
        return parse_label(self.serving).step if is_version(self.serving) else -1

    @property
    def sampled(self) -> Counter[str]:
        """Tokens sampled so far (`CountedRequests.sampled`)."""
        return self._counted.sampled

    @property
    def speeds(self) -> dict[str, float]:
        """Seconds, tokens and steps so far, by how many responses ran (`Speeds.totals`)."""
        return self._counted.speeds.totals()

    @property
    def paused(self) -> bool:
        """Whether a publication runs, or has left weights that may be a mixture."""
        return not self._steady.is_set()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        name: str = "",
        purpose: Purpose = "rollouts",
    ) -> list[Completion]:
        """See `Engine.generate`."""
        if name:
            self._running[name] = sampling.n
        self._requests += 1
        try:
            return await self._generate(prompt_ids, sampling, name or f"r{self._requests}", purpose)
        finally:
            self._running.pop(name, None)

    async def _generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, name: str, purpose: Purpose
    ) -> list[Completion]:
        from vllm import SamplingParams
        from vllm.sampling_params import (
            RepetitionDetectionParams,
            RequestOutputKind,
            StructuredOutputsParams,
        )

        await self._steady.wait()  # the salt below must be that of the weights that will serve it
        options = asdict(sampling)
        options.pop("repetition")
        most = 0
        if options.pop("kept"):
            vocabulary = self._llm.vllm_config.model_config.get_vocab_size()
            most = min(sampling.top_k + TIES, vocabulary)
        if schema := options.pop("schema"):
            options["structured_outputs"] = StructuredOutputsParams(json=schema)
        if sampling.repetition:
            longest, times = sampling.repetition
            options["repetition_detection"] = RepetitionDetectionParams(longest, 1, times)
        params = SamplingParams(
            **options,
            stop_token_ids=[] if sampling.ignore_eos else self.stop_token_ids,
            logprobs=most,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        salt = self.serving  # keeps prefix caches of different versions apart
        prompt = {"prompt_token_ids": list(prompt_ids), "cache_salt": salt}
        with self._adapters.begun(name, salt) as (adapter, label), _answering():
            final = await self._counted.final(self._llm, prompt, params, name, purpose, adapter)
        if final is None or len(final.outputs) != sampling.n:
            raise EngineError(
                f"the engine returned {0 if final is None else len(final.outputs)} of "
                f"{sampling.n} responses"
            )
        first_token = final.metrics.arrival_time + final.metrics.first_token_latency
        try:
            outputs = sorted(final.outputs, key=lambda output: output.index)
            seen = first_token, label, final.num_cached_tokens or 0, salt
            return [_completion(output, *seen, kept=sampling.kept) for output in outputs]
        except EngineError:
            if purpose == "rollouts":
                self._counted.cut_off[name] = sum(len(output.token_ids) for output in final.outputs)
            raise

    @property
    def unfinished(self) -> int:
        """Responses of named requests that have not ended, begun or not."""
        begun = self._llm.output_processor.external_req_ids
        return sum(
            len(begun.get(name, ())) or responses for name, responses in self._running.items()
        )

    def so_far(self, name: str) -> dict[int, Completion]:
        """Partial responses of a running `generate`, by index, read from what vLLM has gathered for
        the final answer, but for the tokens that are held (`scheduler`).
        """
        found: dict[int, Completion] = {}
        label = self._adapters.label(name)
        for state in _states(self._llm, name):
            kept = state.logprobs_processor.num_logprobs > 0
            ended = _ended(state.parent_req)
            found |= {one.index: _completion(one, 0.0, label, kept=kept) for one in ended}
            tokens = state.detokenizer.output_token_ids
            logprobs = state.logprobs_processor.logprobs.logprobs
            if len(tokens) != len(logprobs):
                raise EngineError(
                    f"a response of {len(tokens)} tokens has {len(logprobs)} log-probs"
                )
            starts = state.weight_version_starts
            ends = [start for _, start in starts[1:]] + [len(tokens)]
            labels = [
                (label or own, start, end) for (own, start), end in zip(starts, ends, strict=False)
            ]
            chunks = (chunk.to_nested_list() for chunk in state.sampling_mask_chunks)
            sets = _sets([*chain.from_iterable(chunks)], len(tokens)) if kept else None
            ids, values = np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32)
            found[state.request_index] = Completion(ids, values, labels, "", 0.0, kept=sets)
        return found

    def cut_off(self, name: str) -> int:
        """Tokens of a request for rollouts that was aborted or refused; the second call gives 0."""
        return self._counted.cut_off.pop(name, 0)

    async def score(
        self, sequences: Sequence[tuple[list[int], list[int]]]
    ) -> list[tuple[list[str], np.ndarray]]:
        """See `Engine.score`."""
        scored = await asyncio.gather(*[self._scored(*pair, top_k=0) for pair in sequences])
        return [(labels, values[:, 0]) for labels, values, _ in scored]

    async def top_logprobs(
        self, sequences: Sequence[tuple[list[int], list[int]]], top_k: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """See `Engine.top_logprobs`."""
        asked = [self._scored(*pair, top_k=top_k, reads=True) for pair in sequences]
        return [(values, ids) for _, values, ids in await asyncio.gather(*asked)]

    async def _scored(
        self, prompt: list[int], response: list[int], *, top_k: int, reads: bool = False
    ) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Labels of the weights, and what `Engine.top_logprobs` gives. reads: of a prompt that was
        scored before, under the same weights, only the end is computed.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # The one token that is generated carries the label. Left to itself, vLLM reads no cached
        # prefix where prompt log-probs are wanted, since those of the prefix are not computed.
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=top_k,
            skip_reading_prefix_cache=not reads,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        await self._steady.wait()
        self._requests += 1
        labels = [self.serving]
        tokens: dict[str, Any] = {"prompt_token_ids": prompt + response}
        if reads:
            tokens["cache_salt"] = f"scored {self.serving}"
        name = f"s{self._requests}"
        with self._adapters.begun(name, self.serving) as (adapter, label), _answering():
            final = await self._counted.final(self._llm, tokens, params, name, "probes", adapter)
        if final is None or final.prompt_logprobs is None:
            raise EngineError("the engine returned no log-probs of a prompt")
        if (final.num_cached_tokens or 0) >= len(prompt):  # another response began like this one
            return await self._scored(prompt, response, top_k=top_k)
        labels += [label or span.version for span in final.outputs[0].weight_versions or []]
        found, shape = final.prompt_logprobs, (len(response), 1 + top_k)
        start = found.start_indices[-len(response)]  # of each position: its token, then the best
        values = np.asarray(found.logprobs[start:], np.float32).reshape(shape)
        ids = np.asarray(found.token_ids[start:], np.int32).reshape(shape)
        return labels, values, ids[:, 1:]

    async def classify(self, sequences: Sequence[list[int]]) -> list[float]:
        """See `Engine.classify`."""
        from vllm import PoolingParams

        params = PoolingParams(task="classify", use_activation=False)

        async def one(tokens: list[int]) -> float:
            self._requests += 1
            name, final = f"c{self._requests}", None
            with _answering():
                async for output in self._llm.encode({"prompt_token_ids": tokens}, params, name):
                    final = output
            if final is None or final.outputs.data.numel() != 1:
                raise EngineError("a reward model gave no score, or more than one")
            return float(final.outputs.data.item())

        return await asyncio.gather(*[one(tokens) for tokens in sequences])

    async def connect(self, payload: dict[str, Any]) -> Receipt:
        """Prepare the workers for publications (NCCL: join the group, when the learner does)."""
        return self._receipt(await self._workers("connect_weights", payload))

    async def receive(self, announcement: Announcement) -> Receipt:
        """See `Engine.receive`."""
        async with self._changes:
            self._refuse_older(announcement.label)
            if self._adapters.slots:
                return await self._receive_adapter(announcement)
            self._steady.clear()
            self._mixed = True
            started, limits = time.perf_counter(), self._deadlines
            asleep, lost = self._asleep, [0]
            if asleep:  # its caches are gone, and counted (`sleep`)
                in_flight, clears, why = 0, True, "it slept"
                await self._wake_up(["weights"])
            else:
                self._caches.paused()
                in_flight = self._tokens_in_flight()
                clears, why = self._caches.clears(in_flight)
                # `pause_generation` is this call and a sleep of 20 ms, for users who sort outputs
                # by time and not by their labels.
                core = self._llm.engine_core
                pause = core.pause_scheduler_async(mode="keep", clear_cache=clears)
                await _within(limits.pause_s, "pause", pause)
                self._counted.speeds.interrupted()
                lost = await self._workers("cached_tokens") if clears else lost
            paused = time.perf_counter()
            outcome = self._receipt(await self._workers("take_publication", announcement.payload))
            if outcome.failure:
                return outcome
            loaded = time.perf_counter()
            await _within(limits.resume_s, "resume", self._go_on(announcement.label))
            resumed = time.perf_counter()
            seconds = {
                "pause": paused - started,
                "load": loaded - paused,
                "resume": resumed - loaded,
                "total": resumed - started,
            }
            again = [length for length in self._lengths().values() if clears and length]
            self._counted.speeds.resumed(again)
            if not asleep:
                self._caches.resumed(lost[0], self._lengths)
            return Receipt(
                self.serving,
                seconds=seconds,
                recomputed_tokens=lost[0],
                kept_tokens=0 if clears else in_flight,
                kv_cache=f"{'computed again' if clears else 'kept'} ({why})",
            )

    async def _receive_adapter(self, announcement: Announcement) -> Receipt:
        """Load an adapter beside those of running responses, which go on."""
        if asleep := self._asleep:  # whose requests cannot end
            await self._wake_all()
        try:
            return await self._load_adapter(announcement)
        finally:
            if asleep:
                self._steady.set()

    async def _load_adapter(self, announcement: Announcement) -> Receipt:
        limits = self._deadlines
        try:  # a group over NCCL waits no longer for one engine
            number, kept = await self._adapters.room(min(limits.pause_s, limits.acknowledge_s / 2))
        except TimeoutError as error:
            return Receipt(self.serving, "torn", str(error))
        started = time.perf_counter()
        take = self._workers("take_publication", announcement.payload, [number, kept])
        outcome = self._receipt(await take)
        if outcome.failure:
            return outcome
        self._adapters.serve(number)
        self.serving = announcement.label
        seconds = time.perf_counter() - started
        phases = {"pause": 0.0, "load": seconds, "resume": 0.0, "total": 0.0}
        return Receipt(self.serving, seconds=phases)

    async def sleep(self) -> int:
        """See `Engine.sleep`."""
        self._steady.clear()
        async with self._changes:
            self._caches.paused()
            lost = 0 if self._asleep else self._tokens_in_flight()
            # waits for the current forward pass, drops all caches, and only then unmaps memory
            await self._llm.engine_core.sleep_async(1, "keep")
            self._asleep = True
            self._counted.speeds.interrupted()
        return lost

    async def wake(self) -> None:
        """See `Engine.wake`."""
        async with self._changes:
            if not self._asleep or self._mixed:
                return
            await self._wake_all()
            self._steady.set()

    async def _wake_all(self) -> None:
        await self._wake_up(None)
        again = [length for length in self._lengths().values() if length]
        self._counted.speeds.resumed(again)

    async def _wake_up(self, tags: list[str] | None) -> None:
        """Map memory again: `weights`, with those from before the sleep, or all of it (also None),
        upon which running responses go on.
        """
        awake = await self._llm.engine_core.wake_up_async(tags)
        self._asleep = tags == ["weights"]
        if awake == self._asleep:
            raise EngineError(f"vLLM is {'' if awake else 'not '}awake after it was woken ({tags})")

    def _lengths(self) -> dict[str, int]:
        """Tokens so far of every running response."""
        states = self._llm.output_processor.request_states
        return {name: len(one.detokenizer.output_token_ids) for name, one in states.items()}

    def _tokens_in_flight(self) -> int:
        """Tokens of the responses that have begun, each with its prompt."""
        states, lengths = self._llm.output_processor.request_states, self._lengths()
        return sum(states[name].prompt_len + length for name, length in lengths.items() if length)

    async def attend(self, announcement: Announcement) -> Receipt:
        """See `Engine.attend`."""
        return self._receipt(await self._workers("attend_publication", announcement.payload))

    async def _workers(self, method: str, *args: object) -> list[Any]:
        """Call every worker; raise EngineError when the EngineCore dies (vLLM would wait on)."""
        call = asyncio.ensure_future(self._llm.collective_rpc(method, args=args))
        try:
            while not (await asyncio.wait({call}, timeout=HEALTH_S))[0]:
                await self.check()
            return call.result()
        finally:
            call.cancel()

    def _receipt(self, outcomes: list[dict[str, str]]) -> Receipt:
        """Return the receipt of a call: the first failure of a worker, if any."""
        failed: dict[str, Any] = next(filter(None, outcomes), {})
        return Receipt(self.serving, **failed)

    def _refuse_older(self, label: str) -> None:
        both = is_version(label) and is_version(self.serving)
        if both and parse_label(label) < parse_label(self.serving):
            raise ValueError(
                f"version {label} was announced to an engine that serves {self.serving} already"
            )

    async def _go_on(self, label: str) -> None:
        await self._set_label(label)
        if self._asleep:  # the weights are awake
            await self._wake_up(["kv_cache"])
        else:
            await self._llm.resume_generation()
        self._mixed = False
        self._steady.set()

    async def check(self) -> None:
        """Raise EngineError when the EngineCore process is gone."""
        try:
            await self._llm.check_health()
        # vLLM's own types differ by cause; all of them mean the same to the caller
        except Exception as error:
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


@contextmanager
def _temporary_files() -> Iterator[Path]:
    """Give engine processes a directory for their files, which vLLM leaves when they are killed."""
    directory, owner = own_directory("engine"), str(os.getpid())
    os.environ["VLLM_RPC_BASE_PATH"] = str(directory)
    try:
        with environment(TMPDIR=str(directory), ASYNC_GRPO_ENGINE_OWNER=owner):
            yield directory
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


@contextmanager
def _answering() -> Iterator[None]:
    """Raise vLLM's errors, of a request or of a dead engine (`check` knows), as EngineError."""
    from vllm.exceptions import VLLMError

    try:
        yield
    except VLLMError as error:
        raise EngineError(f"vLLM does not answer the request: {error}") from error


def _completion(
    output: CompletionOutput,
    first_token: float,
    label: str,
    cached_tokens: int = 0,
    salt: str = "",
    *,
    kept: bool,
) -> Completion:
    """label: of all of its tokens; "": what vLLM says. kept: with what each was sampled from."""
    length = len(output.token_ids)
    if output.finish_reason not in ("stop", "length", "repetition"):
        raise EngineError(f"a response ended with {output.finish_reason!r}; it is not trained")
    if (
        output.logprobs is None
        or len(output.logprobs.logprobs) != length
        or list(output.logprobs.token_ids) != list(output.token_ids)
    ):
        raise EngineError(
            f"a response of {length} tokens came without one log-prob per token; it is not trained"
        )
    spans, routes = output.weight_versions or [], output.routed_experts
    mask = output.sampling_mask if kept else None
    labels = [(label or span.version, span.start, span.end) for span in spans]
    return Completion(
        token_ids=np.asarray(output.token_ids, np.int32),
        logprobs=np.asarray(output.logprobs.logprobs, np.float32),
        labels=labels,
        finish_reason=output.finish_reason,
        first_token=first_token,
        cached_tokens=cached_tokens,
        salt=salt,
        routes=None if routes is None else routes.reshape(len(routes), -1),
        kept=_sets(mask.token_ids if mask is not None else [], length) if kept else None,
    )


def _sets(found: list[list[int]], length: int) -> KeptSets:
    if len(found) != length:
        raise EngineError(f"a response of {length} tokens was sampled from {len(found)} sets")
    return KeptSets.of(found)
