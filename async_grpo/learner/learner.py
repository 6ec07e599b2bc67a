"""One learner rank: prepare and train a learner step, weights out, checkpoints.

Runs in: learner ranks; every method is called on all ranks with the same arguments but the plan.
Hides the backend (`backend`); the formulas are `token_math`'s. Invariants:

- The gradient of an update is that of the plan's rows and weights, whatever their split into
  micro-batches and ranks: weights hold the global normalisers, so losses are added.
- The ranks of a team (`team`) have the same plan and the same results, so that statistics count
  one of them.
- All ranks run the same number of forward and backward passes; a rank without rows runs a dummy
  token with loss 0.
- A non-finite loss or gradient norm ends the update on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from async_grpo.algo.metrics import MetricSums
from async_grpo.algo.step_size import EffectiveStep
from async_grpo.config.schema import Config
from async_grpo.errors import NonFinite
from async_grpo.learner import adapters, checkpoint
from async_grpo.learner.attention import heads_of, takes_segments
from async_grpo.learner.backend.base import Backend, RunnableModel, TrainedModel
from async_grpo.learner.backend.deepspeed.backend import DeepspeedBackend
from async_grpo.learner.batching import PlanRow, RankPlan, RowKey, RowValue, micro_batches
from async_grpo.learner.collectives import Collectives
from async_grpo.learner.forward_choice import Choice, by_row, check_shared, choose, confirm
from async_grpo.learner.kernels import fuse
from async_grpo.learner.lending import LentMemory
from async_grpo.learner.model import ForwardPass, PolicyModel, load_model
from async_grpo.learner.packing import Packed, PackedRow, pack, response_row
from async_grpo.learner.prefetch import ahead, on_device
from async_grpo.learner.routing import RoutingReplay
from async_grpo.learner.rows import (
    LearnerRow,
    Stopwatch,
    TokenBatch,
    decode_rows,
    known,
    learning_rate,
    repeats,
    token_batch,
)
from async_grpo.learner.team import Team
from async_grpo.learner.token_math import TokenMath, UpdateFacts, compare_sampler
from async_grpo.learner.weight_files import divide
from async_grpo.learner.weights import Published, PublishedFactors
from async_grpo.weights.names import check_names, file_shapes
from async_grpo.wire import codec
from async_grpo.wire.kept import KeptSets, joined

Fetch = Callable[[int, Sequence[int]], codec.Buffer]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A micro-batch on the device: number of planned rows, packed rows, token tensors."""

    rows: int
    packed: Packed
    batch: TokenBatch


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass over a micro-batch: rows, token tensors, log-probs [M], entropies [M], and
    log-probs [M, k] of the tokens that a teacher names.
    """

    packed: Packed
    batch: TokenBatch
    logprobs: Tensor
    entropy: Tensor | None
    named: Tensor | None


class Learner:
    """One rank of the learner group. `rank` and `world_size` are its place, `device` is "cpu" or
    "cuda:0", `sharded` whether no rank holds the whole model.
    """

    def __init__(
        self,
        config: Config,
        *,
        model_dir: str,
        fetch: Fetch,
        device: str,
        total_updates: int,
        backend: Callable[..., Backend] = DeepspeedBackend,
    ) -> None:
        """Join the process group of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK, and
        load the model. Raises ValueError for models and settings that cannot be trained.

        fetch(step, group_ids): packed frames of these groups. total_updates: of the run, for the
        schedule. backend: called with the configuration, `dtype` and `device`.
        """
        self.config, self.device = config, device
        self._fetch, self._total_updates = fetch, total_updates
        wanted = config.model.dtype
        exact = wanted == "float32" or (wanted == "auto" and device == "cpu")
        self._dtype = torch.float32 if exact else torch.bfloat16
        self._backend = backend(config, dtype=self._dtype, device=device)
        self._division = self._backend.division
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.updates = 0
        self._reference_moved = False
        self._plan: RankPlan | None = None
        self._rows: dict[RowKey, LearnerRow] = {}
        self._metrics = MetricSums()
        self._torch_device = torch.device(device)
        self._lent = LentMemory(self._torch_device)
        self.sharded = self._division.sharded
        size, timeout_s = config.learner.sequence_parallel, config.watchdog.step_timeout_s
        team = Team(size, self._torch_device, timeout_s=timeout_s) if size > 1 else None
        self._team = team
        self._collectives = Collectives(self._torch_device) if team is None else team.peers
        self._math = TokenMath(config, self._collectives)
        self._grad_norm = math.nan
        self._lr_factor = 1.0
        self._effective = EffectiveStep() if config.learner.ess_step_size else None
        self._choices: dict[str, Choice] = {}
        self.policy = self._build_policy(model_dir)
        files = file_shapes(model_dir)
        policy = self.policy.module
        owned: dict[str, Any] = {"division": self._division, "files": files, "device": self.device}
        self.published = Published(policy.hf, **owned)
        """The policy's weights, for files and engines."""
        self.sent = PublishedFactors(policy.hf, **owned) if config.adapter_slots else self.published
        """What engines get."""
        check_names(files, self.published.weight_metadata(), tied=policy.tied, where=model_dir)
        self._reference = self._build_reference(model_dir)
        self._routing = self._build_routing()
        self._vocabulary: int = policy.hf.config.get_text_config().vocab_size
        if config.learner.fuses:
            reference = [] if self._reference is None else [self._reference.module.hf]
            fuse([policy.hf, *reference], self._torch_device)

    def _build_policy(self, model_dir: str) -> TrainedModel:
        """Return the model that is trained."""
        learner = self.config.learner
        model = self._load(model_dir, gradient_checkpointing=learner.recomputes)
        adapters.restrict(
            model.hf,
            self.config.model,
            seed=self.config.seed,
            base=model_dir,
            division=self._division,
        )
        model.offloads = learner.activation_offload
        trained = self._backend.train(model)
        self._confirm(trained, model_dir)
        if learner.compile:
            model.compile_layers()
        return trained

    def _confirm(self, runs: RunnableModel, model_dir: str) -> None:
        """Compare the chosen forward pass of the loaded model with the model's own, and prepare for
        the kernel that it can have. Collective. Raises ValueError.
        """
        policy = runs.module

        def logprobs(one: ForwardPass, rows: list[PackedRow]) -> list[np.ndarray]:
            policy.use(one)
            packs = [[row] for row in rows] if one.rows == "alone" else [rows]
            return [values for chunk in packs for values in by_row(runs, chunk, self._torch_device)]

        choice = confirm(
            logprobs,
            self._choose(model_dir),
            config=policy.hf.config,
            exact=self._dtype == torch.float32,
            agree=self._collectives.largest,
        )
        check_shared(choice, policy.hf.config, size=self.config.learner.sequence_parallel)
        policy.use(choice.forward_pass)
        policy.segmented = (
            choice.forward_pass.rows == "packed"
            and not choice.needs_logits
            and takes_segments(self._torch_device, self._dtype, heads_of(policy.hf.config).size)
        )

    def _build_reference(self, model_dir: str) -> RunnableModel | None:
        """Return the reference model; None without one, or where it is the policy without its
        adapters.
        """
        settings = self.config.model
        is_base = settings.lora is not None and settings.reference is None
        if is_base or not self.config.algorithm.uses_reference:
            return None
        directory = settings.reference or model_dir
        model = self._load(directory, gradient_checkpointing=False, frozen=True)
        model.requires_grad_(False).eval()
        shapes = [shape for _, shape, _ in self._division.metadata(model)]
        policy = [shape for _, shape, _ in self.published.weight_metadata()]
        if settings.reference_refresh_steps and shapes != policy:
            raise ValueError(
                "model.reference_refresh_steps copies the policy's weights into the reference, but "
                "model.reference is of another architecture; set it to 0, or use a reference of "
                "the policy's architecture"
            )
        reference = self._backend.freeze(model)
        self._confirm(reference, directory)
        return reference

    def _build_routing(self) -> RoutingReplay | None:
        """Return what replays routes, tried on a token; None without. Collective."""
        if self.config.learner.routing_replay == "off":
            return None
        routing = RoutingReplay(self.policy, self._division)
        with torch.no_grad():
            routing.recording([])(self._pack(self.policy, []), 1.0, False)
        return routing

    def _take_routes(self, step: int) -> None:
        """Keep the experts that engines took, if they are replayed. Raises ValueError for a group
        without.
        """
        kept = self._routing if self.config.learner.routing_replay == "r3" else None
        for (group_id, _), row in self._rows.items():
            if kept is not None and row.routes is None:
                raise ValueError(
                    f"step {step}: group {group_id} has no experts of its engine: it was sampled "
                    "with another `learner.routing_replay`"
                )
            row.routes = None if kept is None else kept.of_engine(known(row.routes))

    def _load(
        self, directory: str, *, gradient_checkpointing: bool, frozen: bool = False
    ) -> PolicyModel:
        """Load a model."""
        forward_pass = self._choose(directory).forward_pass
        with self._backend.loading(frozen=frozen):
            model = load_model(
                directory,
                dtype=self._dtype,
                gradient_checkpointing=gradient_checkpointing,
                trust_remote_code=self.config.model.trust_remote_code,
                float32_head=self.config.model.lm_head_fp32,
                forward_pass=forward_pass,
            )
        model.in_step = self.sharded
        model.team = self._team
        return model

    def _choose(self, directory: str) -> Choice:
        """Choose the forward pass for a model, once."""
        if directory not in self._choices:
            trust = self.config.model.trust_remote_code
            self._choices[directory] = choose(directory, trust_remote_code=trust)
        return self._choices[directory]

    def prepare(self, plan: RankPlan) -> dict[RowKey, float]:
        """Fetch and check this rank's rows, and compute the reference and anchor log-probs that the
        loss or the reward needs.

        Returns the token KL of each row that this rank owns, summed over its mask, if the KL is
        part of the reward; else nothing. Raises StalenessError for a token outside the bound,
        ValueError for a payload that does not fit the plan.
        """
        if self._plan is not None:
            raise RuntimeError(
                f"step {plan.step} is prepared while step {self._plan.step} is not trained yet"
            )
        algorithm, self._metrics = self.config.algorithm, MetricSums()
        with Stopwatch() as fetching:
            payload = (
                self._fetch(plan.step, plan.group_ids) if plan.group_ids else codec.pack_frames([])
            )
            self._rows = decode_rows(
                plan,
                payload,
                max_staleness=self.config.replay.max_staleness,
                mask_stale=self.config.replay.on_stale == "mask",
            )
        self._take_routes(plan.step)
        for name, (share, count) in repeats(self._rows).items():
            if count:
                self._metrics.add_value(name, share, count)
        if teachers := algorithm.distill.teachers:
            width = 1 + algorithm.distill.teacher_top_k
            silent = sorted(
                key[0]
                for key, row in self._rows.items()
                if row.teacher is None or row.teacher.shape[1] != width
            )
            if silent:
                raise ValueError(
                    f"step {plan.step}: group {silent[0]} has no log-probs of the frozen model "
                    f"{' or '.join(teachers)}: it was sampled with another `algorithm.distill`"
                )
        self._check_sets(plan)
        self._metrics.add_value("time/learner_fetch", fetching.seconds)
        # Rows outside the loss count in the statistics of their group, with their KL.
        rows = [
            self._rows[key]
            for key, row in plan.rows.items()
            if row.weight != 0 or algorithm.add_token_level_kl
        ]
        tokens, sets = [row.tokens for row in rows], [row.kept for row in rows]
        if algorithm.uses_reference:
            with Stopwatch() as watch:
                references = self._reference_logprobs(tokens, sets)
                for row, values in zip(rows, references, strict=True):
                    row.reference = values
            self._metrics.add_value("time/learner_reference", watch.seconds)
        if algorithm.anchor == "recomputed" or self.config.records_routes:
            with Stopwatch() as watch:
                policy = self.policy if self._routing is None else self._routing.recording(rows)
                anchors = self._no_grad_logprobs(policy, tokens, sets)
                for row, values in zip(rows, anchors, strict=True):
                    row.anchor = values if algorithm.anchor == "recomputed" else None
            self._metrics.add_value("time/learner_proximal", watch.seconds)
        self._plan = plan
        if not algorithm.add_token_level_kl:
            return {}
        sums = {key: self._math.reward_kl(row) for key, row in self._rows.items()}
        return {key: sums[key] for key in plan.owned}

    def _check_sets(self, plan: RankPlan) -> None:
        """Raise ValueError for a row whose sets are missing, or not of the policy's tokens."""
        cut = self.config.rollout.most_kept
        for key, planned in plan.rows.items():
            kept, asked = self._rows[key].kept, planned.weight != 0 and not planned.given
            lacks = cut and asked and (kept is None or not kept.counts.all())
            if lacks or (kept is not None and kept.ids.max(initial=0) >= self._vocabulary):
                raise ValueError(
                    f"step {plan.step}: group {key[0]} does not say from which of the policy's "
                    "tokens each was sampled: it was with another `rollout.top_p`, `top_k` or "
                    "`min_p`"
                )

    def train(
        self, values: dict[RowKey, RowValue], kl_coef: float, lr_factor: float = 1.0
    ) -> dict[str, Any]:
        """Make the optimizer steps of the prepared plan; this rank's metrics of the step
        (`MetricSums.to_wire`). kl_coef: of the token KL in the reward. lr_factor: of the step's
        learning rate.

        Raises NonFinite on every rank: for a loss before any weight of its update changes; for a
        gradient norm afterwards, which spoils the weights.
        """
        plan = self._plan
        if plan is None:
            raise RuntimeError("train without prepare")
        trained = {
            key: self._rows[key]
            for key, row in plan.rows.items()
            if row.weight != 0 and not row.given
        }
        self._math.assign(trained, owned=plan.owned, values=values, kl_coef=kl_coef)
        self._lr_factor = lr_factor
        for index, planned in enumerate(plan.updates):
            self._update(index, planned)
        self._plan, self._rows = None, {}  # after a failure no further step is prepared
        every = self.config.model.reference_refresh_steps
        if self._reference is not None and every and plan.step % every == 0:
            self._division.copy(self.policy.module, self._reference.module)
            self._reference_moved = True
        counts = self._team is None or self._team.place == 0  # the others' are the same
        return (self._metrics if counts else MetricSums()).to_wire()

    def _update(self, index: int, planned: Sequence[Sequence[PlanRow]]) -> None:
        """Make one optimizer step over these micro-batches."""
        with Stopwatch() as watch:
            micro_batches = [[row for row in batch if row.weight != 0] for batch in planned]
            selections = (
                self._select(micro_batches) if self._math.selects else [None] * len(micro_batches)
            )
            losses = []
            prepared = ahead(self._prepare, micro_batches, device=self._torch_device)
            for one, selection in zip(prepared, selections, strict=True):
                done = self._forward(one, with_entropy=self._math.takes_entropy)
                self._observe(done, planned=one.rows, unmoved=index == 0)
                loss = self._math.loss(
                    done.batch,
                    done.logprobs,
                    done.entropy,
                    named=done.named,
                    selection=selection,
                    metrics=self._metrics if one.rows else None,
                )
                self.policy.backward(loss)
                losses.append(loss.detach())
            total = self._checked_total(torch.stack(losses), micro_batches)
            lr = self._step()
        group_ids = sorted({row.group_id for micro_batch in micro_batches for row in micro_batch})
        if not np.isfinite(self._grad_norm):
            raise NonFinite(
                f"gradient norm of update {index}, {self._grad_norm},",
                self._collectives.union(group_ids),
            )
        for name, value in (("loss", total), ("grad_norm", self._grad_norm), ("lr", lr)):
            self._metrics.add_value(f"train/{name}", value)
        self._metrics.add_value("time/learner_update", watch.seconds)

    def _select(self, micro_batches: Sequence[Sequence[PlanRow]]) -> list[UpdateFacts]:
        """Find what the whole update says about each micro-batch, without gradient."""
        assert self._plan is not None, "prepare() comes first"
        with torch.no_grad(), Stopwatch() as watch:
            batches, passes = [], []
            for ready in ahead(self._prepare, micro_batches, device=self._torch_device):
                batches.append(ready.batch)
                if self._math.selects_by_policy:
                    by_entropy = self._math.selects_by_entropy
                    passes.append(self._forward(ready, with_entropy=by_entropy))
            selections = self._math.select(
                self._plan.step,
                batches,
                [one.logprobs for one in passes] or None,
                [one.entropy for one in passes if one.entropy is not None] or None,
            )
        self._metrics.add_value("time/learner_select", watch.seconds)
        return selections

    def _observe(self, done: Pass, *, planned: int, unmoved: bool) -> None:
        """Measure a forward pass. planned: its rows. unmoved: the weights are the step's first."""
        batch, logprobs = done.batch, done.logprobs.detach()
        if planned:
            self._count(done.packed)
            if unmoved:
                compare_sampler(self._metrics, batch, logprobs)
            if (routes := done.packed.routes) is not None:
                for one in routes.changed:
                    pairs = self.policy.module.whole(torch.stack(one, -1), done.packed)
                    self._metrics.add("train/routes_changed", *pairs.unbind(-1))
        if self._effective is not None:
            self._effective.add(logprobs, batch.behavior, batch.trained, batch.row_index)

    def _prepare(self, planned: Sequence[PlanRow]) -> Prepared:
        """Pack a micro-batch; token tensors come in the order of the packed rows.

        Without rows a dummy token takes the same path with weight 0: the order of backward hooks,
        which depends on the outputs that the loss uses, must be the same on ranks that share a
        model.
        """
        known = [self._rows[row.key] for row in planned]
        sets = [row.kept for row in known]
        packed = self._pack(self.policy, [row.tokens for row in known], sets)
        ordered = [planned[position] for position in packed.order if planned]
        rows = [self._rows[row.key] for row in ordered]
        if self._routing is not None:
            packed = self._routing.lay(packed, [row.routes for row in rows])
        batch = token_batch(ordered, rows, self._torch_device)
        return Prepared(len(planned), packed, batch.within(self._vocabulary))

    def _forward(self, ready: Prepared, *, with_entropy: bool) -> Pass:
        """Run the policy over a micro-batch."""
        packed, ids, named = ready.packed, ready.batch.teacher_ids, None
        if ids is not None:
            packed = replace(packed, targets=torch.column_stack([packed.targets, ids]))
        found, entropy = self.policy(packed, self.config.rollout.temperature, with_entropy)
        if ids is not None:
            found, named = found[:, 0], found[:, 1:]
        return Pass(ready.packed, ready.batch, found, entropy, named)

    def _pack(
        self, model: RunnableModel, rows: list[PackedRow], sets: Sequence[KeptSets | None] = ()
    ) -> Packed:
        """Pack rows. sets: of each one's tokens with log-probs."""
        packed = pack(rows, self._torch_device, segmented=model.module.segmented)
        order = packed.order if sets else ()
        kept = joined([sets[index] for index in order], [len(rows[index][2]) for index in order])
        if kept is None:
            return packed
        parts = [on_device(part, self._torch_device) for part in kept.by_size()]
        return replace(packed, kept=tuple(parts))

    def _count(self, packed: Packed) -> None:
        """train/padding: share of attention positions that hold no token; train/shared_prompts:
        share of the rows' tokens that were not computed again; train/micro_batch_tokens: tokens per
        forward pass.
        """
        computed = packed.input_ids.numel()
        tokens, positions = packed.layout.tokens, packed.layout.positions
        self._metrics.add_value("train/padding", positions - tokens, positions)
        self._metrics.add_value("train/shared_prompts", tokens - computed, tokens)
        self._metrics.add_value("train/micro_batch_tokens", computed)

    def _checked_total(self, losses: Tensor, micro_batches: Sequence[Sequence[PlanRow]]) -> float:
        """Sum of the losses over all ranks. Raises NonFinite on every rank."""
        totals = torch.stack([losses.double().sum(), (~losses.isfinite()).double().sum()])
        finite = losses.isfinite().tolist()
        total, broken = self._collectives.sum(totals).tolist()
        if broken or not np.isfinite(total):
            mine = {
                row.group_id
                for ok, micro_batch in zip(finite, micro_batches, strict=True)
                if not ok
                for row in micro_batch
            }
            raise NonFinite("loss", self._collectives.union(sorted(mine)))
        return total

    def _step(self) -> float:
        """Step the optimizer and return the learning rate; sets `_grad_norm`, before clipping."""
        settings, effective = self.config.learner, 1.0
        if self._effective is not None:
            effective = self._effective.factor(self._collectives.sum)
            self._metrics.add_value("train/ess_step_factor", effective)
        lr = (
            effective
            * self._lr_factor
            * learning_rate(
                self.updates,
                lr=settings.lr,
                warmup=settings.warmup_steps,
                schedule=settings.schedule,
                total=self._total_updates,
            )
        )
        self._grad_norm = self.policy.step(lr)
        self.updates += 1
        return lr

    def logprobs(
        self, sequences: list[tuple[list[int], list[int]]], *, temperature: float | None = None
    ) -> list[np.ndarray]:
        """Compute float32 log-probs of each response in (prompt, response) pairs, by default at the
        training temperature. Collective if sharded.
        """
        rows = [
            response_row(np.asarray(prompt), np.asarray(response)) for prompt, response in sequences
        ]
        return self._no_grad_logprobs(self.policy, rows, temperature=temperature)

    def _reference_logprobs(
        self, rows: list[PackedRow], sets: Sequence[KeptSets | None] = ()
    ) -> list[np.ndarray]:
        """Log-probs of the reference model, or of the policy without its adapters."""
        if self._reference is not None:
            return self._no_grad_logprobs(self._reference, rows, sets)
        with adapters.switched_off(self.policy.module):
            return self._no_grad_logprobs(self.policy, rows, sets)

    def _no_grad_logprobs(
        self,
        model: RunnableModel,
        rows: list[PackedRow],
        sets: Sequence[KeptSets | None] = (),
        *,
        temperature: float | None = None,
    ) -> list[np.ndarray]:
        temperature = self.config.rollout.temperature if temperature is None else temperature
        sets = sets or [None] * len(rows)
        shapes = [(prompt.tobytes(), len(prompt), len(response)) for prompt, response, _ in rows]
        passes = micro_batches(shapes, self.config.micro_batch_tokens)
        if self.sharded:
            most = int(self._collectives.largest(len(passes)))
            passes += [[]] * (most - len(passes))
        out: list[np.ndarray] = [np.empty(0, np.float32)] * len(rows)
        packs = ahead(
            lambda chunk: self._pack(
                model, [rows[index] for index in chunk], [sets[index] for index in chunk]
            ),
            passes,
            device=self._torch_device,
        )
        with torch.no_grad():
            for chunk, packed in zip(passes, packs, strict=True):
                values = model(packed, temperature, False)[0].cpu().numpy()
                if chunk:
                    order = [chunk[k] for k in packed.order]
                    ends = np.cumsum([len(rows[index][2]) for index in order])
                    for index, part in zip(order, np.split(values, ends[:-1]), strict=True):
                        out[index] = part
        return out

    def save(self, directory: str, state: dict[str, Any]) -> None:
        """Write weights, optimizer, update counter, random state and `state` (plain values) for an
        exact `load`, into one directory or one per rank. Raises StorageFailure, on every rank.
        """
        kept = {"updates": self.updates, "state": state, "reference_moved": self._reference_moved}
        self.policy.save(directory, kept, layout=self._layout())
        if self._reference is not None and self._reference_moved:
            reference = self._reference.module
            checkpoint.save_reference(reference, directory, division=self._division)

    def load(self, directory: str) -> dict[str, Any]:
        """Continue from `save`, a refreshed reference included; its `state`. Raises ValueError for
        a missing file, or settings that cannot continue it.
        """
        saved = self.policy.load(directory, layout=self._layout())
        self.updates = saved["updates"]
        self._reference_moved = saved["reference_moved"] and self._reference is not None
        if self._reference is not None and self._reference_moved:
            reference = self._reference.module
            checkpoint.load_reference(reference, directory, division=self._division)
        return saved["state"]

    @cached_property
    def _base(self) -> dict[str, str] | None:
        """What stands under adapters, and never changes; None without any. Collective."""
        if self.config.model.lora is None:
            return None
        return adapters.base(self.policy.module.hf, self._division)

    def _layout(self) -> dict[str, Any]:
        model = self.config.model
        return {
            "model.dtype": str(self._dtype),
            "model.lora": None if model.lora is None else model.lora.model_dump(),
            "model.freeze": model.freeze,
            "base": self._base,
        }

    def export(self, directory: str) -> None:
        """Write the model for `from_pretrained` (safetensors and config, no tokenizer), and its
        adapters in `adapter/`. Collective. Raises StorageFailure, on every rank.
        """
        hf = self.policy.module.hf
        checkpoint.export(
            hf,
            self.published.weight_metadata(),
            self.published.named_weights(),
            directory,
            rank=self.rank,
        )
        if self.config.model.lora is not None:
            adapters.export(
                hf, Path(directory) / "adapter", division=self._division, writes=self.rank == 0
            )

    def bytes_to_save(self) -> int:
        """Bytes that this rank writes with `save` and `export`, at most."""
        lora = self.config.model.lora is not None
        saved = self.policy.bytes_to_save(only_trained=lora)
        files = divide(self.published.weight_metadata(), self.world_size)
        own = sum(file.nbytes for file in files if file.rank == self.rank)
        exported = own * (1 + self._reference_moved)
        if lora and self.rank == 0:
            factors = (one for one in self.policy.module.parameters() if one.requires_grad)
            exported += sum(self._division.size(one) for one in factors) * self._dtype.itemsize
        return int(1.1 * (saved + exported)) + 2**24

    def give_back(self) -> None:
        """Leave the device's memory to an engine until `take_back`."""
        reference = None if self._reference is None else self._reference.module
        self._lent.give(*self._backend.holders(), reference)

    def take_back(self) -> None:
        """Have all on the device again, as it was."""
        self._lent.back()

    def close(self) -> None:
        """Free the model and leave the process group."""
        self._plan, self._rows = None, {}
        self._reference = self._routing = None
        del self.policy
        self._backend.close()
