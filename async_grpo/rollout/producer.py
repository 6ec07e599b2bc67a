"""One side of the system: tickets in, scored groups out.

Runs in: rollout actors. Knows nothing of learner steps. The flow of one group:

    ticket -> prompt tokens -> engine: n responses -> verifier children: rewards
        -> frozen models: grades (only with task.judges), log-probs (only with algorithm.distill)
        -> a demonstration, given or of a frozen model (only with algorithm.sft_loss_coef)
        -> frame -> outbox -> queue.put (batched)

With ReMax (arXiv 2310.10505) the engine also gives one greedy response to the prompt, the last
rollout of the group with role `baseline`.

Invariants: a group stays in `holding` until the queue has answered its `put` or `fail`, so nothing
that was completed can be lost with a message; a group that cannot be completed is failed by name
with its reason, and only a dead engine or queue, or a verifier error that must end the run, ends
`run`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.config.schema import Config
from async_grpo.environments.pool import EnvironmentFailed
from async_grpo.errors import SetupError, VerifierFailed
from async_grpo.replay.actor_reports import ActorReport
from async_grpo.replay.partial import PartialStart
from async_grpo.rollout.engine.base import Completion, EngineError, Sampling
from async_grpo.rollout.episodes import Episode, GroupPlay, PromptTooLong, as_rows, routes_plane
from async_grpo.rollout.frozen import FrozenFailed
from async_grpo.rollout.host import EngineHost, hash63
from async_grpo.rollout.judges import Judges
from async_grpo.rollout.partial import PartialFile, PartialGeneration, Turn, encode_all
from async_grpo.rollout.players import Player
from async_grpo.rollout.teaching import Lesson, Teaching
from async_grpo.rollout.ticket_queue import TicketQueue, groups_to_ask_for
from async_grpo.runtime.text import dialogue, first_line, shortened
from async_grpo.runtime.variables import take
from async_grpo.tasks.base import Problem, Problems, Score
from async_grpo.tasks.mixture import ProblemOrder, load_tasks
from async_grpo.tasks.verifier import VerifierError
from async_grpo.wire.codec import Group, GroupTicket, WireError, encode_group
from async_grpo.wire.groups import EPISODE_END, Row
from async_grpo.wire.kept import joined

POLL_S = 0.02
"""Between two requests for tickets; the queue's process lets each wait a while for its answer."""
GATHER_S = 0.01
"""From the first group that is ready to the call that takes it, and all that are ready by then."""
HEARTBEAT_S, HEARTBEATS_PER_S = 0.5, 250.0
"""Between two reports of an actor that asks for nothing, and the most of them that the queue's
process gets from all actors together.
"""


@dataclass(eq=False)
class _GroupWork:
    """One group between ticket and answer: its stage, since when, when it came (monotonic s). asks:
    who scores it. name: of its task, of several.
    """

    ticket: GroupTicket
    stage: str
    since: float
    begun: float
    asks: str = "its verifiers"
    task: asyncio.Task[None] | None = None
    generation: PartialGeneration | None = None
    play: GroupPlay | None = None
    name: str = ""

    @property
    def key(self) -> tuple[int, int]:
        return self.ticket.group_id, self.ticket.attempt


class GroupProducer(EngineHost):
    """Generates groups for the tickets it acquires, until the queue closes."""

    def __init__(
        self,
        config: Config,
        *,
        actor_id: str,
        queue: TicketQueue,
        model_dir: str,
        device: str,
        cores: Sequence[int],
        threads: int = 0,
        partials: str | None = None,
        actors: int = 1,
        frozen: Mapping[str, Any] | None = None,
        env_vars: Mapping[str, str] | None = None,
        order: ProblemOrder | None = None,
    ) -> None:
        """Take the actor's settings. partials: file with partial responses, for tickets that
        continue them. actors: how many there are, about. frozen: models by name (`rollout.frozen`).
        env_vars: `task.env_vars` with their values. order: the run's, with which that of the data
        here is compared.
        """
        take(env_vars or {})
        super().__init__(
            config,
            actor_id=actor_id,
            model_dir=model_dir,
            device=device,
            cores=cores,
            threads=threads,
        )
        self._expected = order
        self._heartbeat_s = max(HEARTBEAT_S, actors / HEARTBEATS_PER_S)
        self._queue = queue
        self._partials = None if partials is None else PartialFile.at(Path(partials))
        self._teaching = Teaching(config, frozen or {})
        self._judges = {
            name: Judges(one.judges, frozen or {})
            for name, one in config.posed_tasks.items()
            if one.judges
        }
        self._baselines = int(config.algorithm.has_baseline)  # greedy, per group
        self._responses = config.rollout.group_size + self._baselines
        self._groups: dict[tuple[int, int], _GroupWork] = {}
        self._outbox: list[tuple[_GroupWork, bytes]] = []
        self._outbox_filled = asyncio.Event()
        self._ended = asyncio.Event()
        self._draining = self._resting = False
        self._produced_at = 0.0
        self._verifier_errors: dict[str, str] = {}
        """The first error of every kind."""

    async def run(self) -> None:
        """Produce groups until the queue closes. Raises when the engine or the queue is gone."""
        self._produced_at = time.monotonic()
        sender = asyncio.create_task(self._send_outbox())
        polled = 0.0
        self._time.producing(True)
        try:
            while not (self._draining and not self._groups):
                want = 0 if self._draining or self._resting else self._room()
                if want or time.monotonic() - polled > self._heartbeat_s:
                    polled = time.monotonic()
                    tickets = await self._acquire(want)
                    if tickets is None:
                        return
                    for ticket in tickets:
                        self._start_group(ticket)
                    if tickets and want > len(tickets):
                        continue
                await self._wait_for_change(POLL_S)
                for task in [sender, *self._group_tasks()]:
                    if task.done() and (error := task.exception()) is not None:
                        raise error
        finally:
            pending = [sender, *self._group_tasks()]
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            self._groups.clear()
            self._outbox.clear()
            self._time.producing(False)
            self._ended.set()

    async def drain(self) -> None:
        """Take no more tickets; return, as `run` does, when the queue has all groups held here."""
        self._draining = True
        self._changed.set()
        await self._ended.wait()

    async def rest(self) -> None:
        """Take no more tickets until `go_on`; groups held here go on, and `run` does not return."""
        self._resting = True

    async def go_on(self) -> None:
        """Take tickets again."""
        self._resting, self._produced_at = False, time.monotonic()
        self._changed.set()

    async def final_report(self) -> ActorReport:
        """Totals of the whole run, once the queue is closed and unfinished groups are dropped."""
        if self._time.is_producing:
            await self._ended.wait()
        return self._report()

    async def status(self) -> dict[str, Any]:
        """See `EngineHost.status`; also groups with stage and ages in seconds, oldest first."""
        now = time.monotonic()
        works = sorted(self._groups.values(), key=lambda work: (work.begun, work.key))
        return await super().status() | {
            "draining": self._draining,
            "in_flight": [
                {
                    "group_id": work.ticket.group_id,
                    "attempt": work.ticket.attempt,
                    "stage": work.stage,
                    "asks": work.asks,
                    "stage_s": now - work.since,
                    "age_s": now - work.begun,
                }
                for work in works
            ],
        }

    async def partials(self) -> list[tuple[PartialStart, bytes]]:
        """Partial responses of all groups in generation, or that the queue has by now."""
        under_way = [work.generation or work.play for work in self._groups.values()]
        growing = [one for one in under_way if one is not None]
        return await encode_all(growing, max_bytes=self._config.wire.max_frame_bytes)

    def _task(self) -> tuple[Problems, Problem]:
        """Load what is posed with its training data, and the first problem. Raises SetupError for
        other data than the run's.
        """
        task, expected = load_tasks(self._config), self._expected
        if expected is not None and ProblemOrder.of(self._config, task).parts != expected.parts:
            raise SetupError(
                f"the training data of {self._config.task_names} are not here what they were at "
                "the start: every node needs the same files, and they must not change during a run"
            )
        return task, task.train(0)

    @cached_property
    def _order(self) -> ProblemOrder:
        return ProblemOrder.of(self._config, self.parts.task)

    def _group_tasks(self) -> list[asyncio.Task[None]]:
        return [work.task for work in self._groups.values() if work.task is not None]

    async def _acquire(self, want: int) -> list[GroupTicket] | None:
        version, report = self.parts.engine.serving_version, self._due_report()
        return await self._queue.acquire(self.actor_id, version, list(self._groups), want, report)

    def _due_report(self) -> ActorReport | None:
        return self._report() if self._time.is_due(self._heartbeat_s) else None

    def _report(self) -> ActorReport:
        engine, speeds = self.parts.engine, dict(self.parts.engine.speeds)
        for posed in self.parts.posed.values():
            for name, spent in posed.verifiers.spent.items():
                speeds[name] = speeds.get(name, 0.0) + spent
        return self._time.report(engine.sampled, self._counts, speeds, errors=self._verifier_errors)

    def _room(self) -> int:
        """Count the groups to ask for."""
        queued = sum(work.stage == "queued" for work in self._groups.values())
        engine = self.parts.engine
        room = groups_to_ask_for(
            engine.max_num_seqs,
            unfinished=engine.unfinished + queued * self._responses,
            groups=len(self._groups),
            responses=self._responses,
        )
        players = [one.player for one in self.parts.posed.values() if one.player is not None]
        if not players or not self._groups:
            return room
        limit = self._config.rollout.max_open_episodes or 2 * engine.max_num_seqs
        begun = sum(one.open_episodes for one in players) + queued * self._responses
        return min(room, max(0, (limit - begun) // self._responses))

    def _start_group(self, ticket: GroupTicket) -> None:
        now, name = time.monotonic(), self._order.task(ticket.group_id)
        work = _GroupWork(ticket, "queued", now, now, name=name)
        if work.key not in self._groups:
            self._groups[work.key] = work
            work.task = asyncio.create_task(self._produce(work))
            self._enter(work, "queued")

    async def _wait_for_change(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return
        self._changed.clear()

    async def _produce(self, work: _GroupWork) -> None:
        config = self._config
        try:
            async with asyncio.timeout(config.rollout.longest_group_s):
                group = await self._group(work)
                frame = encode_group(group, max_bytes=config.wire.max_frame_bytes)
        except TimeoutError:
            timeout_s = config.rollout.longest_group_s
            # Not one slow group but an engine that hangs: this actor is replaced.
            thinks = work.stage in ("verifying", "environment")
            if not thinks and time.monotonic() - self._produced_at > timeout_s:
                raise EngineError(
                    f"no group came out of the engine for rollout.group_timeout_s = {timeout_s:g} s"
                ) from None
            await self._fail(
                work,
                f"timeout: no result within rollout.group_timeout_s = {timeout_s:g} s, it "
                f"was {work.stage}",
            )
        except VerifierError as error:
            await self._fail(work, f"verifier: {error}")
        except EnvironmentFailed as error:
            if error.reason == "start":  # of a child; the next group would not have one either
                raise VerifierFailed(f"the environments of {self.actor_id}: {error}") from error
            await self._fail(work, f"environment: {error}")
        except FrozenFailed as error:
            self._noted("frozen", error)
            await self._fail(work, f"frozen model {error}")
        except (EngineError, WireError, PromptTooLong) as error:
            # a dead engine ends the run of this actor instead of failing group after group
            await self.parts.engine.check()
            await self._fail(work, f"{type(error).__name__}: {error}")
        else:
            self._produced_at = time.monotonic()
            self._outbox.append((work, frame))
            self._enter(work, "put")
            self._changed.set()
            self._outbox_filled.set()

    async def _group(self, work: _GroupWork) -> Group:
        config, parts, ticket, queued = self._config, self.parts, work.ticket, time.time()
        problem, seed = parts.task.train(self._order(ticket.group_id)), None
        if config.seeded:
            seed = hash63(config.seed, "given", ticket.group_id)
        lesson = self._teaching.begin(
            problem, engine=parts.engine, tokenizer=parts.tokenizer, seed=seed
        )
        try:
            return await self._completed(work, problem, lesson, queued)
        finally:
            lesson.close()

    async def _completed(
        self, work: _GroupWork, problem: Problem, lesson: Lesson, queued: float
    ) -> Group:
        """Generate the episodes of a group, and have them graded and taught. queued: when the
        ticket came.
        """
        posed, ticket = self.parts.posed[work.name], work.ticket
        if posed.player is None:
            episodes = await self._respond(work, problem)
        else:
            episodes = await self._play(work, problem, posed.player)
        if (judges := self._judges.get(problem.task)) is not None:
            await self._grade(work, judges, problem, episodes)
        for episode in episodes:
            episode.rewards = posed.named(episode.rewards)
        scored, size = time.time(), posed.config.rollout.group_size
        prompts, rows = as_rows(episodes, trained=size, weights=posed.weights)
        planes, given = await lesson.finish(prompts, rows, partial(self._asks, work))
        routes = [row.routes for episode in episodes for row in episode.session.rows]
        planes |= self._sets(episodes, given, trained=size)
        if self._teaching.asks:
            self._counts["taught"] += 1
            self._counts["teaching_ms"] += round(1000 * (time.time() - scored))
        lengths = [episode.session.sampled for episode in episodes]
        self._counts["groups"] += 1
        self._counts["tokens"] += sum(lengths[:size])
        self._counts["baseline_tokens"] += sum(lengths[size:])
        return Group(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            policy_version=ticket.policy_version,
            actor_id=self.actor_id,
            run_epoch=ticket.run_epoch,
            prompts=prompts,
            rows=[*rows, *given],
            planes=planes | routes_plane(prompts, [*rows, *given], routes),
            times={
                "queued": queued,
                "first_token": min(episode.first_token for episode in episodes),
                "done": max(episode.last_token for episode in episodes),
                "scored": scored,
                **{f"{EPISODE_END}{n}": one.ended for n, one in enumerate(episodes) if one.ended},
            },
        )

    async def _respond(self, work: _GroupWork, problem: Problem) -> list[Episode]:
        """Generate and score the responses to a plain prompt: episodes of one turn."""
        prompt = self._encode(problem)
        self._enter(work, "generating")
        completions = await self._generate(work, prompt)
        done = time.time()
        self._enter(work, "verifying")
        scores = await self._score(work, problem, completions)
        return [
            Episode.of(prompt, completion, score, ended=done)
            for completion, score in zip(completions, scores, strict=True)
        ]

    async def _play(self, work: _GroupWork, problem: Problem, player: Player) -> list[Episode]:
        """Play the episodes of a group, whose environments all begin with the same seed."""
        config, ticket = self._config, work.ticket

        def changed(generating: bool) -> None:
            self._enter(work, "generating" if generating else "environment")

        wanted = [one for sampling in self._wanted(work) for one in [sampling] * sampling.n]
        begun: list[list[Turn]] = []
        if self._partials is not None:
            begun = self._partials.take_turns(ticket, len(wanted), self._counts)
        work.play = GroupPlay(self.parts.engine, ticket, changed, begun)
        self._enter(work, "environment")  # or a worker that is waited for
        seed = hash63(config.seed, "environment", ticket.group_id)
        plays = []
        for number, one in enumerate(wanted):
            own = None if one.seed is None else hash63(one.seed, number)
            sampling = replace(one, n=1, seed=own)
            plays.append(_played(player, problem, sampling, seed=seed, group=work.play))
        return await work.play.all(plays)

    async def _generate(self, work: _GroupWork, prompt: list[int]) -> list[Completion]:
        """Generate samples, then greedy responses, from partial ones where the ticket has some."""
        ticket, wanted = work.ticket, self._wanted(work)
        prefixes: list[Completion] = []
        if self._partials is not None:
            prefixes = self._partials.take(ticket, prompt, wanted, self._counts)
        engine = self.parts.engine
        work.generation = PartialGeneration(engine, ticket, prompt, wanted, prefixes=prefixes)
        return await work.generation.finish()

    def _wanted(self, work: _GroupWork) -> list[Sampling]:
        """How the responses of a group are sampled: samples, then the greedy ones."""
        config, rollout = self._config, self.parts.posed[work.name].config.rollout
        samples = Sampling(
            n=rollout.group_size,
            max_tokens=rollout.response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.most_kept,
            min_p=rollout.min_p,
            seed=hash63(config.seed, work.ticket.group_id) if config.seeded else None,
            repetition=rollout.repetition,
            kept=rollout.most_kept > 0,
        )
        greedy = replace(samples, n=1, temperature=0.0, seed=None, kept=False)
        return [samples, *[greedy] * self._baselines]

    def _sets(
        self, episodes: list[Episode], given: list[Row], *, trained: int
    ) -> dict[str, np.ndarray]:
        """Return planes of the sets from which all tokens were sampled; given: rows that were not.
        Raises EngineError for a token of the first `trained` episodes whose set is not known.
        """
        if not self._config.rollout.most_kept:
            return {}
        turns = [
            (kept, len(values), number < trained)
            for number, episode in enumerate(episodes)
            for row in episode.session.rows
            for kept, values in zip(row.kept, row.logprobs, strict=True)
        ]
        if any(asked and (kept is None or not kept.counts.all()) for kept, _, asked in turns):
            self._counts["kept_overflows"] += 1
            raise EngineError(
                "a token was sampled from so many equally probable ones beyond rollout.top_k that "
                "the engine does not know them all"
            )
        turns += [(None, len(row.behavior_logprobs), False) for row in given]
        kept = joined([kept for kept, _, _ in turns], [length for _, length, _ in turns])
        return {} if kept is None else kept.planes

    async def _score(
        self, work: _GroupWork, problem: Problem, completions: list[Completion]
    ) -> list[Score]:
        posed = self.parts.posed[work.name]
        results = await posed.verifiers.score_many(
            [(self._text(completion), problem.reference) for completion in completions]
        )
        scores = []
        for result in results:
            if isinstance(result, VerifierError):
                self._refused(work, result)
                result = Score(rewards=dict.fromkeys(posed.task.weights, 0.0), correct=0.0)
            scores.append(result)
        return scores

    async def _grade(
        self, work: _GroupWork, judges: Judges, problem: Problem, episodes: list[Episode]
    ) -> None:
        """Add what judges say of each episode to its rewards."""
        work.asks = "its judges"
        self._enter(work, "verifying")
        asked, tokenizer = time.monotonic(), self.parts.tokenizer
        texts = [
            dialogue(one.said)
            if one.said
            else tokenizer.decode(one.session.rows[0].response_ids, skip_special_tokens=True)
            for one in episodes
        ]
        for name, values in (await judges.grade(problem, texts)).items():
            for episode, value in zip(episodes, values, strict=True):
                if isinstance(value, VerifierError):
                    self._refused(work, value)
                    value = 0.0
                episode.rewards[name] = value
        self._counts["judged"] += 1
        self._counts["judging_ms"] += round(1000 * (time.monotonic() - asked))

    def _noted(self, kind: str, error: Exception) -> None:
        """Count an error, which the driver tells."""
        self._counts["verifier_errors"] += 1
        self._counts[f"verifier_errors_{kind}"] += 1
        self._verifier_errors[kind] = shortened(first_line(error), 300)

    def _refused(self, work: _GroupWork, error: VerifierError) -> None:
        """Count what could not be scored, and raise it unless it is worth 0, as VerifierFailed
        where it ends the run.
        """
        self._noted(error.reason, error)
        on_error = self._config.task.verifier.on_error
        if on_error == "fail":
            raise VerifierFailed(
                f"a verifier of {self.actor_id}: group {work.ticket.group_id} could not be "
                f"scored ({error}) and task.verifier.on_error is fail"
            ) from error
        if on_error != "zero":
            raise error

    async def _send_outbox(self) -> None:
        """Put whatever is ready in one call, and wait a moment for more; what comes during the call
        goes with the next.
        """
        while True:
            await self._outbox_filled.wait()
            await asyncio.sleep(GATHER_S)
            self._outbox_filled.clear()
            batch = list(self._outbox)
            if not batch:
                continue
            verdicts = await self._queue.put(self.actor_id, [frame for _, frame in batch])
            for verdict in verdicts:
                self._counts[f"put_{verdict.status}"] += 1
            del self._outbox[: len(batch)]
            for work, _ in batch:
                self._leave(work)

    async def _fail(self, work: _GroupWork, reason: str) -> None:
        self._counts["failed"] += 1
        self._enter(work, "fail")
        # neither: its prompt was too long
        sampling = work.generation or work.play
        tokens = 0 if sampling is None else sampling.tokens
        await self._queue.fail(self.actor_id, [work.ticket], reason, [tokens])
        self._leave(work)

    def _asks(self, work: _GroupWork, stage: str, whom: str) -> None:
        work.asks = whom
        self._enter(work, stage)

    def _enter(self, work: _GroupWork, stage: str) -> None:
        work.stage, work.since = stage, time.monotonic()
        self._time.stage(work.key, stage)

    def _leave(self, work: _GroupWork) -> None:
        self._groups.pop(work.key, None)
        self._time.stage(work.key, None)
        self._changed.set()


async def _played(player: Player, problem: Problem, sampling: Sampling, **of: Any) -> Episode:
    episode = await player.play(problem, sampling, **of)
    episode.ended = time.time()
    return episode
