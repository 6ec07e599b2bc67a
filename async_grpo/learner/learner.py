"""One DeepSpeed rank: begin / update / end of a learner step, weights out, checkpoints.

Runs in: learner ranks; every method is called on all ranks with the same arguments but the plan. Hides DeepSpeed, its ZeRO stages and
the token mathematics. Invariants:

- The gradient of an update is that of the plan's rows and weights, whatever their split into micro-batches and ranks: weights hold the
  global normalisers, so losses are added, and DeepSpeed's mean over ranks is undone by the factor `world_size`.
- All ranks run the same number of forward and backward passes; one without rows runs a dummy token with loss 0.
- A non-finite loss or gradient norm ends the update on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from async_grpo import wire
from async_grpo.algo.aggregation import aggregate_loss
from async_grpo.algo.importance import importance_weights
from async_grpo.algo.kl import kl_penalty
from async_grpo.algo.losses import Clip, policy_loss
from async_grpo.algo.metrics import MetricSums, loss_metrics
from async_grpo.batching import PlanRow, RankPlan
from async_grpo.config.schema import Config
from async_grpo.learner import store, zero
from async_grpo.learner.model import Packed, PolicyModel, load_model, pack
from async_grpo.learner.rows import Row, RowKey, Stopwatch, chunks, decode_rows, learning_rate, token_batch

Fetch = Callable[[int, Sequence[int]], wire.Buffer]


class NonFinite(RuntimeError):
    """An update whose loss or gradient norm is not finite. `group_ids`: the groups it came from, of all ranks."""

    exit_code = 6

    def __init__(self, what: str, group_ids: Sequence[int]) -> None:
        super().__init__(f"the {what} is not finite; groups {list(group_ids)}")
        self.group_ids = list(group_ids)


class Learner:
    """One rank of the learner gang. `rank` and `world_size` are its place, `device` is "cpu" or "cuda:0"."""

    def __init__(self, config: Config, *, model_dir: str, fetch: Fetch, device: str, total_updates: int) -> None:
        """Join the process group described by RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK, and load the model.

        fetch(step, group_ids): packed frames of these groups. total_updates: optimizer updates of the whole run, for the schedule.
        Raises ValueError for models and settings that cannot be trained.
        """
        self.config, self.device = config, device
        self._fetch, self._total_updates = fetch, total_updates
        zero.start(device, timeout_s=config.watchdog.step_timeout_s)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.updates = 0
        self._plan: RankPlan | None = None
        self._rows: dict[RowKey, Row] = {}
        self._metrics = MetricSums()
        self._torch_device = torch.device(device)
        wanted = config.model.dtype
        self._dtype = torch.float32 if wanted == "float32" or (wanted == "auto" and device == "cpu") else torch.bfloat16
        self._sharded = config.learner.zero_stage == 3
        self._clip = _clip(config)
        self._grad_norm: float | None = None
        self._build(model_dir)

    def _build(self, model_dir: str) -> None:
        import deepspeed

        learner = self.config.learner
        settings = zero.deepspeed_config(self.config, dtype=self._dtype, world_size=self.world_size)
        model = self._load(model_dir, gradient_checkpointing=learner.gradient_checkpointing)
        self._names = [name.removeprefix("hf.") for name, _ in model.named_parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=learner.lr, betas=tuple(learner.betas), weight_decay=learner.weight_decay)
        if learner.zero_stage == 0:
            optimizer.register_step_pre_hook(self._clip_gradients)
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
        self.engine.train()
        self._reference = self._build_reference(model_dir) if self.config.algorithm.use_kl_loss else None

    def _build_reference(self, model_dir: str) -> torch.nn.Module:
        import deepspeed

        model = self._load(self.config.model.reference or model_dir, gradient_checkpointing=False).requires_grad_(False).eval()
        if not self._sharded:
            return model.to(self._torch_device)
        engine = deepspeed.initialize(model=model, config=zero.reference_config(dtype=self._dtype, world_size=self.world_size))[0]
        engine.eval()
        return engine

    def _load(self, directory: str, *, gradient_checkpointing: bool) -> PolicyModel:
        return load_model(
            directory, dtype=self._dtype, longest_row=self.config.rollout.prompt_length + self.config.rollout.response_length,
            gradient_checkpointing=gradient_checkpointing, trust_remote_code=self.config.model.trust_remote_code,
        )

    def begin(self, plan: RankPlan) -> None:
        """Fetch and check this rank's rows, and compute reference and anchor log-probs where the loss needs them.

        Raises StalenessError for a token outside the bound, ValueError for a payload that does not fit the plan.
        """
        if self._plan is not None:
            raise RuntimeError(f"begin of step {plan.step} while step {self._plan.step} is open; call end first")
        self._metrics = MetricSums()
        with Stopwatch() as fetching:
            payload = self._fetch(plan.step, plan.group_ids) if plan.group_ids else wire.pack_frames([])
            self._rows = decode_rows(plan, payload, max_staleness=self.config.replay.max_staleness)
        self._metrics.add_value("time/learner_fetch", fetching.seconds)
        trained = {(row.group_id, row.row) for update in plan.updates for micro_batch in update for row in micro_batch if row.weight != 0}
        rows = [self._rows[key] for key in sorted(trained)]
        tokens = [row.tokens for row in rows]
        if self._reference is not None:
            with Stopwatch() as watch:
                for row, values in zip(rows, self._no_grad_logprobs(self._reference, tokens), strict=True):
                    row.reference = values
            self._metrics.add_value("time/learner_reference", watch.seconds)
        if self.config.algorithm.anchor == "recomputed":
            with Stopwatch() as watch:
                for row, values in zip(rows, self._no_grad_logprobs(self.engine, tokens), strict=True):
                    row.anchor = values
            self._metrics.add_value("time/learner_anchor", watch.seconds)
        self._plan = plan

    def update(self, index: int) -> None:
        """One optimizer step over `plan.updates[index]`.

        Raises NonFinite on every rank: for a loss before any weight changes; for a gradient norm after, so the weights must not be used.
        """
        if self._plan is None:
            raise RuntimeError(f"update {index} without begin")
        with Stopwatch() as watch:
            micro_batches = self._plan.updates[index]
            losses = []
            for micro_batch in micro_batches:
                loss = self._loss(micro_batch)
                self.engine.backward(loss * self.world_size)
                losses.append(loss.detach())
            total = self._checked_total(torch.stack(losses), micro_batches)
            lr = self._step()
        group_ids = sorted({row.group_id for micro_batch in micro_batches for row in micro_batch})
        if self._grad_norm is None or not np.isfinite(self._grad_norm):
            raise NonFinite(f"gradient norm of update {index}, {self._grad_norm},", self._union(group_ids))
        for name, value in (("loss", total), ("grad_norm", self._grad_norm), ("lr", lr)):
            self._metrics.add_value(f"train/{name}", value)
        self._metrics.add_value("time/learner_update", watch.seconds)

    def end(self) -> dict[str, Any]:
        """Free the payload and return this rank's metrics of the step as sums and counts (`MetricSums.to_wire`)."""
        self._plan, self._rows = None, {}
        return self._metrics.to_wire()

    def _loss(self, planned: Sequence[PlanRow]) -> Tensor:
        """This rank's share of the loss from one micro-batch: a scalar to be added to the others.

        Without rows the dummy token takes the same path with weight 0: ZeRO-3 compares the order of backward hooks between ranks, which
        depends on the outputs that the loss uses.
        """
        algorithm = self.config.algorithm
        planned = [row for row in planned if row.weight != 0]
        packed = pack([self._rows[row.group_id, row.row].tokens for row in planned], self._torch_device)
        logprobs, entropy = self.engine(packed, self.config.rollout.temperature, True)
        planned = [planned[position] for position in packed.order if planned]
        batch = token_batch(planned, [self._rows[row.group_id, row.row] for row in planned], self._torch_device)
        weights = None
        if algorithm.importance.level != "none":
            weights = importance_weights(
                batch.anchor, batch.behavior, batch.mask, level=algorithm.importance.level, mode=algorithm.importance.mode,
                lower=algorithm.importance.lower, upper=algorithm.importance.upper, row_index=batch.row_index,
            )
        token_loss, diagnostics = policy_loss(
            algorithm.policy_loss, logprobs, anchor_logprobs=batch.anchor, behavior_logprobs=batch.behavior, advantages=batch.advantages,
            loss_mask=batch.mask, staleness=batch.lag, clip=self._clip, weights=weights,
        )
        kl = None if batch.reference is None else kl_penalty(logprobs, batch.reference, algorithm.kl_loss_type)
        if planned:
            self._count(packed)
            loss_metrics(
                self._metrics, token_loss=token_loss, anchor_logprobs=batch.anchor, behavior_logprobs=batch.behavior,
                advantages=batch.advantages, staleness=batch.lag, mask=batch.mask, weights=weights, kl=kl, entropy=entropy, **diagnostics,
            )
        if kl is not None:
            token_loss = token_loss + algorithm.kl_loss_coef * kl
        if algorithm.entropy_coef:
            token_loss = token_loss - algorithm.entropy_coef * entropy
        return aggregate_loss(token_loss, batch.weights)

    def _count(self, packed: Packed) -> None:
        """train/padding: share of attention positions that hold no token; train/micro_batch_tokens: tokens per forward pass."""
        computed, padded = packed.input_ids.numel(), sum(bucket.rows * bucket.width for bucket in packed.buckets)
        self._metrics.add_value("train/padding", padded - computed, padded)
        self._metrics.add_value("train/micro_batch_tokens", computed)

    def _checked_total(self, losses: Tensor, micro_batches: Sequence[Sequence[PlanRow]]) -> float:
        """Sum of the losses over all ranks. Raises NonFinite on every rank before any weight changes."""
        totals = torch.stack([losses.double().sum(), (~losses.isfinite()).double().sum()])
        finite = losses.isfinite().tolist()
        dist.all_reduce(totals)
        total, broken = totals.tolist()
        if broken or not np.isfinite(total):
            mine = {row.group_id for ok, micro_batch in zip(finite, micro_batches, strict=True) if not ok for row in micro_batch}
            raise NonFinite("loss", self._union(sorted(mine)))
        return total

    def _union(self, group_ids: Sequence[int]) -> list[int]:
        """Group ids of all ranks, so that every rank raises the same error."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, list(group_ids))
        return sorted({group_id for ids in gathered for group_id in ids})

    def _step(self) -> float:
        """Optimizer step; returns the learning rate, leaves the gradient norm before clipping in `_grad_norm`."""
        settings = self.config.learner
        lr = learning_rate(
            self.updates, lr=settings.lr, warmup=settings.warmup_steps, schedule=settings.schedule, total=self._total_updates
        )
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        if settings.zero_stage > 0:
            self._grad_norm = float(self.engine.get_global_grad_norm())
        self.updates += 1
        return lr

    def _clip_gradients(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Before the step of plain AdamW (stage 0): the gradients are reduced, DeepSpeed neither clips nor measures them."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.config.learner.grad_clip))

    def logprobs(self, sequences: list[tuple[list[int], list[int]]]) -> list[np.ndarray]:
        """Float32 log-probs of each response in (prompt, response) pairs, at the configured temperature; collective with ZeRO-3."""
        return self._no_grad_logprobs(self.engine, [(np.asarray(prompt), np.asarray(response)) for prompt, response in sequences])

    def _no_grad_logprobs(self, model: torch.nn.Module, rows: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        longest_first = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]) - len(rows[index][1]))
        lengths = [len(rows[index][0]) + len(rows[index][1]) for index in longest_first]
        passes = [[longest_first[k] for k in chunk] for chunk in chunks(lengths, self.config.learner.tokens_per_micro_batch)]
        if self._sharded:
            passes += [[]] * (self._maximum(len(passes)) - len(passes))
        out: list[np.ndarray] = [np.empty(0, np.float32)] * len(rows)
        with torch.no_grad():
            for chunk in passes:
                packed = pack([rows[index] for index in chunk], self._torch_device)
                values = model(packed, self.config.rollout.temperature, False)[0].cpu().numpy()
                if chunk:
                    order = [chunk[k] for k in packed.order]
                    ends = np.cumsum([len(rows[index][1]) for index in order])
                    for index, part in zip(order, np.split(values, ends[:-1]), strict=True):
                        out[index] = part
        return out

    def _maximum(self, value: int) -> int:
        tensor = torch.tensor(value, device=self._torch_device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(zip(self._names, self.engine.module.parameters(), strict=True))

    def weight_metadata(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, full shape and dtype name of every weight, in the order of `named_weights`."""
        return [(name, zero.full_shape(parameter), str(parameter.dtype).removeprefix("torch.")) for name, parameter in self._named()]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full weights under Hugging Face names, a tied head left out. Each is valid until the next item.

        Collective with ZeRO-3: every rank must exhaust the iterator.
        """
        for bucket in zero.buckets(self._named()):
            with zero.gathered([parameter for _, parameter in bucket]):
                for name, parameter in bucket:
                    yield name, parameter.data

    @contextmanager
    def perturbed(self, *, scale: float, seed: int) -> Iterator[None]:
        """Inside the block every weight w is w + scale * rms(w) * noise, the same on every rank; leaving restores it bit for bit.

        No update may happen inside. Rank 0 (without ZeRO-3: every rank) keeps a copy of the weights in host memory meanwhile.
        """
        keeps = self.rank == 0 or not self._sharded
        kept: dict[str, Tensor] = {}
        try:
            for name, parameter in self._named():
                with torch.no_grad(), zero.gathered([parameter], modify=True):
                    if keeps:
                        kept[name] = parameter.data.to("cpu", copy=True)
                        parameter.data.add_(_noise(parameter.data, scale=scale, seed=seed, name=name))
            yield
        finally:
            for name, parameter in self._named():
                with torch.no_grad(), zero.gathered([parameter], modify=True):
                    if name in kept:
                        parameter.data.copy_(kept[name])

    def save(self, directory: str, state: dict[str, Any]) -> None:
        """Write weights, optimizer, update counter, random state and `state` (plain values) so that `load` continues bit for bit."""
        store.save(self.engine, directory, {"updates": self.updates, "state": state}, rank=self.rank, layout=self._layout())

    def load(self, directory: str) -> dict[str, Any]:
        """Continue from `save` and return its `state`. Raises ValueError if the ranks, the ZeRO stage or the dtype differ."""
        saved = store.load(self.engine, directory, rank=self.rank, layout=self._layout())
        self.updates = saved["updates"]
        return saved["state"]

    def _layout(self) -> dict[str, Any]:
        return {"learner.ranks": self.world_size, "learner.zero_stage": self.config.learner.zero_stage, "model.dtype": str(self._dtype)}

    def export(self, directory: str) -> None:
        """Write the model for `from_pretrained` (safetensors and config; the tokenizer is the caller's). Collective with ZeRO-3."""
        store.export(self.engine.module.hf, self.named_weights(), directory, writes=self.rank == 0)
        dist.barrier()

    def close(self) -> None:
        """Free the model and leave the process group."""
        import deepspeed

        self._plan, self._rows = None, {}
        self.engine.destroy()
        if self._sharded and self._reference is not None:
            self._reference.destroy()
        self._reference = None
        del self.engine
        deepspeed.comm.destroy_process_group()


def _clip(config: Config) -> Clip:
    algorithm = config.algorithm
    return Clip(
        low=algorithm.clip_low, high=algorithm.clip_high, kind=algorithm.clip_schedule.kind, rate=algorithm.clip_schedule.rate,
        floor=algorithm.clip_schedule.floor, dual=algorithm.clip_ratio_c if algorithm.dual_clip_loss else None,
    )


def _noise(weight: Tensor, *, scale: float, seed: int, name: str) -> Tensor:
    """scale * rms(weight) * standard normal noise, a function of the seed and the name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device=weight.device).manual_seed(int.from_bytes(digest[:7], "little"))
    noise = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=torch.float32)
    return (noise * (scale * weight.float().square().mean().sqrt())).to(weight.dtype)
