"""Publications end to end: real learner ranks under every ZeRO stage, the real sender, and a real
engine that generates meanwhile.

The learner ranks are processes of their own, the engine another, as in a run; only Ray is missing.
What each version's weights were is read from the published segment and scored by a plain Hugging
Face model.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import traceback
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_grpo.config.schema import Config
from async_grpo.rollout.engine.base import Completion, Sampling
from async_grpo.rollout.engine.choice import ENGINE
from async_grpo.rollout.engine.vllm import kv_cache
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.rollout.engine.vllm.kv_cache import CacheChoice
from async_grpo.weights.shared_memory import SegmentReader
from async_grpo.weights.transport import Receipt, Staged, TokenSequence, Version
from tests.support import forkserver, nccl_over_gloo
from tests.support.engine_weights import learner_logprobs
from tests.support.learners import (
    SHARD_ALL,
    Case,
    bitwise,
    copy_weights,
    make_case,
    make_config,
    open_learner,
    run_ranks,
    set_rank,
    split,
    train,
)
from tests.support.models import write_model
from tests.support.nccl_over_gloo import Control
from tests.support.processes import free_port

forkserver.import_engines()

DEADLINE_S, START_S = 60.0, 150.0
EXACT, VISIBLE = 1e-4, 1e-3
TEMPERATURE = 0.8
TOKENS = 400
PROMPT = list(range(5, 17))
PROBES: list[TokenSequence] = [
    ([7, 8, 9], list(range(20, 60))),
    (list(range(30, 50)), [90, 3, 44, 17, 80, 5]),
    ([60], list(range(99, 40, -1))),
]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "frozen": {"freeze": ["embed_tokens"]},
    "lora": {"lora": {"rank": 4, "alpha": 16.0}},
}
pytestmark = pytest.mark.timeout(200)


def config_of(directory: str, *, stage: int = 1, ranks: int = 1, variant: str = "plain") -> Config:
    """Learner and engine of one run. The learning rate is so large that every step is seen in the
    log-probs.
    """
    return make_config(
        model={"path": directory, "dtype": "float32", **VARIANTS[variant]},
        rollout={"prompt_length": 128, "response_length": TOKENS + 100, "temperature": TEMPERATURE},
        algorithm={"use_kl_loss": False},
        learner={
            "zero_stage": stage,
            "ranks": ranks,
            "lr": 1e-2,
            "tokens_per_micro_batch": 1024,
            "deepspeed": SHARD_ALL,
        },
        weight_sync={"kv_cache": "recompute"},
        cluster={"engine": {"max_num_seqs": 16}},
    )


def share(case: Case, rank: int, ranks: int) -> list[list[list[int]]]:
    """The rows of this rank in each update, in two micro-batches."""
    return [split(range(rank, len(rows), ranks), 2) for rows in case.updates]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are so small that a second thread costs more than it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- the learner's processes
# ------------------------------------------------------------------------------------------


class Rank:
    """One learner rank with its half of the transport, as the driver calls it."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self._rank = rank

    def open(self, config: Config, directory: str, port: int, key: str) -> dict[str, Any]:
        """Build learner and sender; what the engine must know."""
        from async_grpo.learner.learner import Learner
        from async_grpo.weights.transport import make_sender

        set_rank(self._rank, config.learner.ranks, port)
        self._case = make_case(directory)
        self._splits = share(self._case, self._rank, config.learner.ranks)
        self._learner = Learner(
            config, model_dir=directory, fetch=self._case.fetch, device="cpu", total_updates=100
        )
        self._sender = make_sender(
            "shared_memory",
            self._learner.published,
            config=config,
            key=key,
            pushing=ENGINE.pushing_sender,
        )
        return self._sender.connect("127.0.0.1", [1])[0]

    def train(self) -> None:
        """One optimizer step."""
        train(self._learner, self._case, self._splits)

    def stage(self, label: str, verify: bool) -> Staged:
        """The weights, and their log-probs of the probes."""
        announcement = self._sender.stage(label, verify=verify)
        return Staged(announcement, self._learner.logprobs(PROBES, temperature=1.0))

    def close(self) -> None:
        """Free both."""
        self._sender.close()
        self._learner.close()


def rank_main(pipe: Connection, rank: int) -> None:
    """Answer calls until the pipe closes."""
    one = Rank(rank)
    with contextlib.suppress(EOFError):
        while True:
            name, args = pipe.recv()
            try:
                pipe.send((getattr(one, name)(*args), ""))
            except Exception:  # noqa: BLE001 - raised in the test
                pipe.send((None, traceback.format_exc()))


class Gang:
    """Rank processes that are started when they are first needed and serve one learner after the
    other.

    One rank and two have processes of their own: DeepSpeed numbers modules per process and compares
    the numbers between ranks.
    """

    def __init__(self) -> None:
        self._context = forkserver.context()
        self._teams: dict[int, list[tuple[Any, Connection]]] = {}
        self._ranks: list[tuple[Any, Connection]] = []

    def resize(self, size: int) -> None:
        """From now on calls go to the team of `size` ranks."""
        self._ranks = self._teams.setdefault(size, [])
        while len(self._ranks) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=forkserver.InThisEnvironment(rank_main),
                args=(theirs, len(self._ranks)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def call(self, name: str, *args: Any) -> Any:
        """The answer of rank 0 to a call of all ranks."""
        deadline, pipes, answers = time.monotonic() + START_S, [pipe for _, pipe in self._ranks], {}
        for pipe in pipes:
            pipe.send((name, args))
        while len(answers) < len(pipes):
            ready = wait(
                [pipe for pipe in pipes if pipe not in answers],
                max(0.0, deadline - time.monotonic()),
            )
            assert ready, f"a learner rank did not answer {name} within {START_S:g} s"
            for pipe in ready:
                answers[pipe], error = pipe.recv()
                assert not error, error  # at once: the other rank may wait for this one for ever
        return answers[pipes[0]]

    def kill(self) -> None:
        for process, pipe in itertools.chain(*self._teams.values()):
            pipe.close()
            process.kill()
            process.join(DEADLINE_S)


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    gang = Gang()
    try:
        yield gang
    finally:
        gang.kill()


# -- stamps and the times of publications
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Reign:
    """A version: when the engine was told of it, and when it had said that it serves it (monotonic
    seconds).
    """

    label: str
    began: float
    acknowledged: float


@dataclass(frozen=True)
class Answer:
    """A response, when it was asked for and when it was there (monotonic seconds)."""

    submitted: float
    finished: float
    completion: Completion

    @property
    def labels(self) -> list[str]:
        return [label for label, _, _ in self.completion.labels]


def stamp_errors(answer: Answer, reigns: list[Reign]) -> list[str]:
    """What is wrong with the stamps of a response, given all weight syncs in their order."""
    errors, end = [], 0
    for label, start, stop in answer.completion.labels:
        if start != end or stop <= start:
            errors.append(f"the span of {label} is [{start}, {stop}) after {end}")
        end = stop
    if end != len(answer.completion.token_ids):
        errors.append(f"{end} of {len(answer.completion.token_ids)} tokens are stamped")
    places = {reign.label: place for place, reign in enumerate(reigns)}
    if unknown := set(answer.labels) - set(places):
        return [*errors, f"no publication set {sorted(unknown)}"]
    order = [places[label] for label in answer.labels]
    if order != sorted(set(order)):
        errors.append(f"{answer.labels} do not ascend")
    for place, reign in enumerate(reigns):
        ended = reigns[place + 1].acknowledged if place + 1 < len(reigns) else float("inf")
        replaced = reigns[place + 1].began if place + 1 < len(reigns) else float("inf")
        if place in order and not (answer.submitted <= ended and answer.finished >= reign.began):
            errors.append(f"{reign.label} did not reign while the response ran")
        if (
            place not in order
            and answer.submitted < reign.acknowledged < replaced < answer.finished
        ):
            errors.append(
                f"no token is of {reign.label}, which began and ended while the response ran"
            )
    return errors


def test_wrong_stamps_are_found() -> None:
    reigns = [Reign("v0.0", 0, 1), Reign("v0.1", 10, 11), Reign("v0.2", 20, 21)]

    def answer(
        *labels: tuple[str, int, int], submitted: float = 5.0, finished: float = 25.0
    ) -> Answer:
        return Answer(
            submitted,
            finished,
            Completion(np.zeros(9, np.int32), np.zeros(9, np.float32), list(labels), "length", 0.0),
        )

    right = ("v0.0", 0, 3), ("v0.1", 3, 6), ("v0.2", 6, 9)
    assert stamp_errors(answer(*right), reigns) == []
    for wrong, message in (
        (answer(*right, submitted=12.0), "v0.0 did not reign"),
        (answer(*right, finished=15.0), "v0.2 did not reign"),
        (answer(right[0], ("v0.2", 3, 9)), "no token is of v0.1"),
        (answer(("v0.1", 0, 3), ("v0.0", 3, 6), right[2]), "do not ascend"),
        (answer(*right[:2]), "6 of 9 tokens are stamped"),
        (answer(right[0], ("v0.1", 4, 6), right[2]), r"the span of v0.1 is [4, 6) after 3"),
        (answer(*right[:2], ("v0.3", 6, 9)), "no publication set ['v0.3']"),
    ):
        assert any(message in error for error in stamp_errors(wrong, reigns)), message


# -- the engine
# --------------------------------------------------------------------------------------------------


@dataclass
class Published:
    """A version's weights as a plain model, and the learner's log-probs of the probes under
    them.
    """

    model: torch.nn.Module
    probes: list[np.ndarray]


@dataclass
class Serving:
    """A running engine, its event loop in a thread, and every version that it has served."""

    engine: VllmEngine
    loop: asyncio.AbstractEventLoop
    directory: str
    epochs: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    reigns: list[Reign] = field(default_factory=list)
    versions: dict[str, Published] = field(default_factory=dict)

    def run(self, work: Coroutine[Any, Any, Any], *, seconds: float = DEADLINE_S) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    async def answers(self, prompt: list[int], sampling: Sampling) -> list[Answer]:
        submitted = time.monotonic()
        completions = await self.engine.generate(prompt, sampling)
        return [Answer(submitted, time.monotonic(), completion) for completion in completions]

    async def receive(self, staged: Staged) -> Receipt:
        began = time.monotonic()
        receipt = await self.engine.receive(staged.announcement)
        self.reigns.append(Reign(staged.announcement.label, began, time.monotonic()))
        return receipt


class Engines:
    """One engine at a time: of the `tied` or of the `untied` model. The process of the next one
    begins to import while this one serves.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._kind, self._next = directory, "", VllmEngine.begin("cpu")
        self._serving: Serving | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def get(self, kind: str) -> Serving:
        """The running engine, or in its place a new one if it is of the other model."""
        if self._kind != kind:
            self.close()
            directory = write_model(self._directory / kind, tied=kind == "tied", ends=False)
            start = VllmEngine.start(
                config_of(directory),
                model_dir=directory,
                device="cpu",
                backend="shared_memory",
                stop_token_ids=[],
                label=Version(0, 0).label,
                seed=1,
                early=self._next,
            )
            engine = asyncio.run_coroutine_threadsafe(start, self._loop).result(START_S)
            self._kind, self._serving, self._next = (
                kind,
                Serving(engine, self._loop, directory),
                VllmEngine.begin("cpu"),
            )
        return self._serving

    def close(self) -> None:
        if self._serving is not None:
            self._serving.engine.close()
            self._serving, self._kind = None, ""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("models"))
    try:
        yield engines
    finally:
        engines.close()
        engines._next.end()
        engines._loop.call_soon_threadsafe(engines._loop.stop)


class Run:
    """A learner that publishes to a running engine. Each has its own run epoch, so versions only
    grow.
    """

    def __init__(
        self,
        serving: Serving,
        gang: Gang,
        tmp_path: Path,
        *,
        stage: int = 1,
        ranks: int = 1,
        variant: str = "plain",
    ) -> None:
        self.serving, self._gang, self._epoch = serving, gang, next(serving.epochs)
        self._config = config_of(serving.directory, stage=stage, ranks=ranks, variant=variant)
        self._config = self._config.unchecked_copy(
            update={"run": self._config.run.unchecked_copy(update={"dir": str(tmp_path)})}
        )

    def __enter__(self) -> Self:
        self._gang.resize(self._config.learner.ranks)
        payload = self._gang.call(
            "open",
            self._config,
            self.serving.directory,
            free_port(),
            f"test-{uuid.uuid4().hex[:8]}",
        )
        self._reader = SegmentReader(payload["metadata"])
        assert not self.serving.run(self.serving.engine.connect(payload)).failure
        return self

    def __exit__(self, *_: object) -> None:
        self._gang.call("close")

    def train(self) -> None:
        self._gang.call("train")

    def stage(self, step: int) -> Staged:
        """Version `step` of this run, of which a copy is kept."""
        staged = self._gang.call("stage", Version(self._epoch, step).label, step % 2 == 1)
        model = AutoModelForCausalLM.from_pretrained(
            self.serving.directory, dtype=torch.float32
        ).eval()
        copied = {
            name: tensor.clone()
            for name, tensor in self._reader.tensors(**staged.announcement.payload)
        }
        missing = model.load_state_dict(copied, strict=False)
        assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
        model.tie_weights()
        self.serving.versions[staged.announcement.label] = Published(model, staged.logprobs)
        for (prompt, response), values in zip(PROBES, staged.logprobs, strict=True):
            assert (
                np.abs(learner_logprobs(model, prompt, np.array(response), 1.0) - values).max()
                < EXACT
            ), "the copy is not the learner's policy"
        return staged

    def publish(self, step: int) -> Receipt:
        """Stage and receive; then the engine's log-probs of the probes are the learner's, and were
        others before.
        """
        before = self.serving.versions.get(Version(self._epoch, step - 1).label)
        staged = self.stage(step)
        receipt = self.serving.run(self.serving.receive(staged))
        assert (receipt.serving, receipt.failure) == (staged.announcement.label, "")
        for index, (labels, values) in enumerate(
            self.serving.run(self.serving.engine.score(PROBES))
        ):
            assert set(labels) == {staged.announcement.label}
            assert np.abs(values - staged.logprobs[index]).max() < EXACT
            if before is not None:
                assert np.abs(values - before.probes[index]).mean() > VISIBLE
        return receipt


# -- weight syncs while responses run
# ---------------------------------------------------------------------------------


class Traffic:
    """Long responses, one after the other in several streams, until it is stopped."""

    def __init__(self, serving: Serving, *, streams: int = 2) -> None:
        self._serving, self._stopping = serving, threading.Event()
        self._streams = [
            asyncio.run_coroutine_threadsafe(self._stream(TOKENS - 70 * index), serving.loop)
            for index in range(streams)
        ]

    async def _stream(self, tokens: int) -> list[Answer]:
        answers: list[Answer] = []
        while not self._stopping.is_set():
            answers += await self._serving.answers(
                PROMPT, Sampling(n=2, max_tokens=tokens, temperature=TEMPERATURE)
            )
            assert [len(answer.completion.token_ids) for answer in answers[-2:]] == [tokens] * 2, (
                "tokens were lost"
            )
        return answers

    def stop(self) -> list[Answer]:
        """All responses, the running ones included."""
        self._stopping.set()
        return [answer for stream in self._streams for answer in stream.result(DEADLINE_S)]


def check_answer(answer: Answer, serving: Serving) -> None:
    """Stamps fit the times, and every token has the log-prob of the version it is stamped with, not
    of another.
    """
    assert (
        stamp_errors(answer, serving.reigns) == [] and answer.completion.finish_reason == "length"
    )
    by_label = {
        label: learner_logprobs(
            serving.versions[label].model, PROMPT, answer.completion.token_ids, TEMPERATURE
        )
        for label in answer.labels
    }
    for (label, start, end), other in zip(
        answer.completion.labels, [*answer.labels[1:], answer.labels[0]], strict=True
    ):
        recorded = answer.completion.logprobs[start:end]
        assert np.abs(recorded - by_label[label][start:end]).max() < EXACT
        if other != label and end - start > 20:
            assert np.abs(recorded - by_label[other][start:end]).mean() > VISIBLE


@pytest.mark.later
def test_kept_caches_mix_policies_but_not_records(
    engines: Engines, gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kv_cache: keep`: running responses go on with the old cache; new requests never meet it."""
    serving = engines.get("untied")
    monkeypatch.setattr(serving.engine, "_caches", CacheChoice("keep"))
    prompt = [3 + 7 * place % 96 for place in range(100)]  # three full blocks of the prefix cache
    greedy = Sampling(n=1, max_tokens=8, temperature=TEMPERATURE)

    async def through(staged: Staged) -> tuple[list[Answer], Receipt]:
        """A response that runs through the publication."""
        running = asyncio.create_task(
            serving.answers(PROMPT, Sampling(n=4, max_tokens=TOKENS, temperature=TEMPERATURE))
        )
        await asyncio.sleep(0.4)
        assert not running.done(), "the response ended before the publication"
        receipt = await serving.receive(staged)
        return await running, receipt

    with Run(serving, gang, tmp_path) as run:
        run.publish(0)
        serving.run(serving.answers(prompt, greedy))
        run.train()
        old, staged = serving.reigns[-1].label, run.stage(1)
        answers, receipt = serving.run(through(staged))
        assert receipt.recomputed_tokens == 0 and receipt.kept_tokens > 4 * len(PROMPT)
        [fresh] = serving.run(serving.answers(prompt, greedy))
        stale = serving.run(salted(serving.engine, prompt, old))
    new = serving.versions[staged.announcement.label].model
    assert fresh.labels == [staged.announcement.label]
    assert (
        np.abs(
            fresh.completion.logprobs
            - learner_logprobs(new, prompt, fresh.completion.token_ids, TEMPERATURE)
        ).max()
        < EXACT
    )
    assert (
        np.abs(stale[1] - learner_logprobs(new, prompt, stale[0], TEMPERATURE)).max() > VISIBLE
    ), "the old prefix was not cached at all"
    for answer in answers:
        assert (
            stamp_errors(answer, serving.reigns) == []
            and np.isfinite(answer.completion.logprobs).all()
        )
        assert answer.labels == [old, staged.announcement.label]
        (_, _, switch), (_, start, end) = answer.completion.labels
        before, after = (
            learner_logprobs(
                serving.versions[label].model, PROMPT, answer.completion.token_ids, TEMPERATURE
            )
            for label in answer.labels
        )
        assert np.abs(answer.completion.logprobs[:switch] - before[:switch]).max() < EXACT
        assert np.abs(answer.completion.logprobs[start:end] - after[start:end]).mean() > VISIBLE


async def salted(engine: VllmEngine, prompt: list[int], salt: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probs of a request with a salt of ours, which is what `generate` does
    not do.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=8,
        temperature=TEMPERATURE,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    async for output in engine._llm.generate(
        {"prompt_token_ids": prompt, "cache_salt": salt}, params, f"salted-{uuid.uuid4().hex}"
    ):
        final = output.outputs[0]
    return np.array(final.token_ids), np.array(
        [row[token].logprob for row, token in zip(final.logprobs, final.token_ids, strict=True)],
        np.float32,
    )


@pytest.mark.later
def test_scores_name_every_version_that_they_may_be_of(
    engines: Engines, gang: Gang, tmp_path: Path
) -> None:
    serving = engines.get("untied")

    async def scores(staged: Staged) -> list[tuple[list[str], np.ndarray]]:
        """Asked for before, while and after the weights are received."""
        receiving, asked = None, []
        for moment in range(60):
            if (
                moment == 10
                # more than it computes at once: some are submitted under the old weights and
                # computed
                # under the new
            ):
                await asked[0]  # one at least is of the old weights alone
                asked += [asyncio.create_task(serving.engine.score(PROBES[:1])) for _ in range(100)]
                await asyncio.sleep(0)
                receiving = asyncio.create_task(serving.receive(staged))
            asked.append(asyncio.create_task(serving.engine.score(PROBES[:1])))
            await asyncio.sleep(0.004)
        assert not (await receiving).failure
        asked.append(asyncio.create_task(serving.engine.score(PROBES[:1])))
        return [score for [score] in await asyncio.gather(*asked)]

    with Run(serving, gang, tmp_path) as run:
        run.publish(0)
        run.train()
        old, staged = serving.reigns[-1].label, run.stage(1)
        found = serving.run(scores(staged))
    new = staged.announcement.label
    kinds = {frozenset(labels) for labels, _ in found}
    assert kinds == {frozenset({old}), frozenset({new}), frozenset({old, new})}
    assert (
        np.abs(serving.versions[old].probes[0] - serving.versions[new].probes[0]).mean() > VISIBLE
    )
    for labels, values in found:
        assert (
            min(np.abs(values - serving.versions[label].probes[0]).max() for label in set(labels))
            < EXACT
        ), f"a score of {labels} is of neither"


FAST = [
    ("untied", "frozen", 2, 2),
    ("untied", "plain", 3, 2),
    ("tied", "lora", 1, 2),
    ("tied", "lora", 3, 1),
]
"""Every ZeRO stage with two ranks, every variant; the rest is slow."""
ALL = [
    (model, variant, stage, ranks)
    for model in ("untied", "tied")
    for variant in VARIANTS
    for stage in (1, 2, 3)
    for ranks in (1, 2)
]
CELLS = sorted(
    [*FAST, *(cell for cell in ALL if cell not in FAST)], key=lambda cell: cell[0], reverse=True
)


@pytest.mark.parametrize(
    ("kind", "variant", "stage", "ranks"),
    [cell if cell in FAST else pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS],
)
def test_long_responses_live_through_publications(
    engines: Engines, gang: Gang, tmp_path: Path, kind: str, variant: str, stage: int, ranks: int
) -> None:
    serving = engines.get(kind)
    with Run(serving, gang, tmp_path, stage=stage, ranks=ranks, variant=variant) as run:
        run.publish(0)
        traffic = Traffic(serving)
        for step in (1, 2):
            run.train()
            receipt = run.publish(step)
            assert receipt.recomputed_tokens > 0, "no response was running"
        answers = traffic.stop()
    labels = [reign.label for reign in serving.reigns[-3:]]
    assert {label for answer in answers for label in answer.labels} == set(labels)
    assert max(len(answer.labels) for answer in answers) >= 2
    for answer in answers:
        check_answer(answer, serving)


@pytest.mark.later
def test_an_engine_chooses_by_what_it_measured(
    engines: Engines, gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kv_cache: auto`: the first publication is computed again and measured; with the bound at 0 %
    of the time the next keeps caches, without a bound it does not.
    """
    serving = engines.get("untied")
    monkeypatch.setattr(serving.engine, "_caches", CacheChoice("auto"))
    with Run(serving, gang, tmp_path) as run:
        run.publish(0)
        traffic = Traffic(serving)
        receipts = []
        for step, share in ((1, 0.05), (2, 0.0), (3, 1e9)):
            monkeypatch.setattr(kv_cache, "SHARE", share)
            run.train()
            receipts.append(run.publish(step))
        traffic.stop()
    assert [bool(one.recomputed_tokens) for one in receipts] == [True, False, True]
    assert [bool(one.kept_tokens) for one in receipts] == [False, True, False]
    assert receipts[0].kv_cache == "computed again (to measure what that costs)"
    assert receipts[1].kv_cache.startswith("kept (computing ")


# -- overlap
# --------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Losses and gradient norms of all steps, the weights at staging and at the end, what arrived,
    and when the steps after staging ran.
    """

    history: list[dict[str, float]]
    staged: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    received: list[dict[str, torch.Tensor]] = field(default_factory=list)
    trained: tuple[float, float] = (0.0, 0.0)


class Nothing:
    """No publication at all; the others do something between `start` and `finish`, while
    steps run.
    """

    def __init__(self, learner: Any, directory: Path) -> None:
        self.learner, self.directory = learner, directory

    def start(self) -> None: ...

    def finish(self) -> list[dict[str, torch.Tensor]]:
        return []


class Staging(Nothing):
    """Staged in shared memory and left alone until the end."""

    def start(self) -> None:
        from async_grpo.weights.shared_memory import SharedMemorySender

        self.sender = SharedMemorySender(
            self.learner.published, key=f"test-{uuid.uuid4().hex[:8]}", fallback=self.directory
        )
        [payload] = self.sender.connect("127.0.0.1", [1])
        self.announcement = self.sender.stage("v0.1", verify=True)
        self.reader = SegmentReader(payload["metadata"])

    def read(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.clone()
            for name, tensor in self.reader.tensors(**self.announcement.payload)
        }

    def finish(self) -> list[dict[str, torch.Tensor]]:
        try:
            return [self.read()] if self.learner.rank == 0 else []
        finally:
            self.sender.close()


class Reading(Staging):
    """Staged in shared memory and read all the time."""

    def start(self) -> None:
        super().start()
        self._done, self._copies, self._errors = threading.Event(), [], []
        self._thread = threading.Thread(target=self._read_on, daemon=True)
        self._thread.start()

    def _read_on(self) -> None:
        try:
            while self.learner.rank == 0 and not self._done.is_set():
                self._copies = [*self._copies[-20:], self.read()]
        except Exception as error:  # noqa: BLE001 - raised in `finish`
            self._errors.append(error)

    def finish(self) -> list[dict[str, torch.Tensor]]:
        self._done.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive() and not self._errors, self._errors
        assert self.learner.rank > 0 or len(self._copies) >= 2
        return [*self._copies, *super().finish()]


class Sending(Nothing):
    """Over the nccl transport, from a copy, while the steps run."""

    overlap = True

    def start(self) -> None:
        from tests.support.nccl_sides import Receiver, make_sender

        self.sender = make_sender(self.learner.published, overlap=self.overlap)
        [payload] = self.sender.connect("127.0.0.1", [1])
        self.receiver = (
            Receiver(payload, self.learner.config.model.path, device=1)
            if self.learner.rank == 0
            else None
        )
        joined = self.receiver and self.receiver.join()
        assert self.sender.rendezvous() == ""
        if joined:
            joined.result(DEADLINE_S)
        self.announcement = self.sender.stage("v0.1", verify=False)
        assert self.announcement.streamed != self.overlap
        self._receiving = self.receiver and self.receiver.receive(self.announcement.payload)
        if self.overlap and self.receiver:
            assert self.sender.send() == ""

    def finish(self) -> list[dict[str, torch.Tensor]]:
        try:
            if not self.overlap:
                assert self.sender.send() == ""
            if self._receiving is None:
                return []
            self._receiving.result(DEADLINE_S)
            return [self.receiver.received]
        finally:
            self.sender.close()


class Streaming(Sending):
    """Without overlap nothing is copied, so `send` reads the model as it is by then."""

    overlap = False


def outcome_of(
    kind: type[Nothing],
    directory: str,
    scratch: Path,
    *,
    stage: int,
    rank: int = 0,
    world: int = 1,
    port: int = 0,
) -> Outcome:
    """A learner step, a publication, and two more steps before it is over."""
    case = make_case(directory, n_updates=2)
    config, splits = config_of(directory, stage=stage, ranks=world), share(case, rank, world)
    with open_learner(
        config, {"plain": directory}, case, rank=rank, world=world, port=port
    ) as learner:
        history, publication = train(learner, case, splits), kind(learner, scratch)
        staged = copy_weights(learner)
        publication.start()
        began = time.monotonic()
        history += train(learner, case, splits) + train(learner, case, splits)
        trained = began, time.monotonic()
        received = publication.finish()
        return Outcome(history, staged, copy_weights(learner), received, trained)


def check_overlap(
    control: Control,
    directory: str,
    scratch: Path,
    *,
    ports: Sequence[int] = (0,) * 4,
    **place: int,
) -> None:
    """Steps are bit-equal whatever a publication does meanwhile, and what arrives is bit-equal to
    the weights at staging.

    ports: one for each of the four learners, where there are several ranks: a store that is used
    twice remembers the first group.
    """
    alone = outcome_of(Nothing, directory, scratch, port=ports[0], **place)
    assert not bitwise(alone.staged, alone.weights) and len(alone.history) == 6
    for kind, port in zip((Staging, Reading, Sending), ports[1:], strict=True):
        if place.get("rank", 0) == 0:
            control.clear()
            control.inject({"kind": "slow", "rank": 0, "seconds": 0.2})
        one = outcome_of(kind, directory, scratch, port=port, **place)
        assert (
            one.history == alone.history
            and bitwise(one.weights, alone.weights)
            and bitwise(one.staged, alone.staged)
        )
        if place.get("rank", 0) == 0:
            assert one.received and all(bitwise(copy, one.staged) for copy in one.received)
            if kind is Sending:
                begun, sent = (control.events(kind, rank=0) for kind in ("begin", "end"))
                assert any(
                    begin.t < one.trained[1] and end.t > one.trained[0]
                    for begin, end in zip(begun, sent, strict=True)
                ), "nothing was sent while the steps ran"


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # so that they are as before after the test
    with nccl_over_gloo.installed(tmp_path) as control:
        yield control


@pytest.mark.later
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_steps_are_bit_equal_with_and_without_overlap(
    control: Control, tmp_path: Path, stage: int
) -> None:
    directory = write_model(tmp_path / "model")
    check_overlap(control, directory, tmp_path, stage=stage)
    control.inject()
    streamed = outcome_of(Streaming, directory, tmp_path, stage=stage)
    [received] = streamed.received
    assert bitwise(received, streamed.weights) and not bitwise(received, streamed.staged), (
        "the comparison sees later weights"
    )


def overlap_rank(rank: int, ports: list[int], directory: str, scratch: str) -> None:
    torch.set_num_threads(1)
    nccl_over_gloo.install()
    for stage in (1, 2, 3):
        own = ports[4 * stage - 4 : 4 * stage]
        check_overlap(
            Control(Path(scratch)),
            directory,
            Path(scratch),
            ports=own,
            stage=stage,
            rank=rank,
            world=2,
        )


@pytest.mark.slow
def test_steps_of_two_ranks_are_bit_equal_with_and_without_overlap(
    control: Control, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "model")
    run_ranks(
        overlap_rank, [free_port() for _ in range(12)], directory, str(tmp_path), seconds=START_S
    )
