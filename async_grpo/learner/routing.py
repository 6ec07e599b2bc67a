"""Routing replay: in a mixture of experts, later passes over a learner step take the experts of its
first one (R2), and that one those which the engine took (R3).

Runs in: learner ranks. Hides how families pick experts. A router that is near a tie picks others
after an update, or beside other rows: then a ratio compares log-probs under different experts. What
picks is `topk` or `max` of scores [tokens, experts or groups of them] in a layer's block. Experts
and scores that it returns are replaced; the model's own code normalises the scores.

Invariants: a token has one route in a step, and so has a prompt of several rows, in however many
packs; routers keep their gradients; the model routes what has no route.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from async_grpo.learner.adapters import UntrainableError
from async_grpo.learner.attention import current
from async_grpo.learner.backend.base import RunnableModel
from async_grpo.learner.division import WHOLE, Division
from async_grpo.learner.experts import Block, blocks
from async_grpo.learner.packing import Packed, Routes
from async_grpo.learner.prefetch import on_device
from async_grpo.learner.rows import LearnerRow

_PICKING = frozenset((torch.topk, Tensor.topk, torch.max, Tensor.max))
_REFUSED = (
    "learner.routing_replay is set; {} has no router whose experts can be replayed: leave it out"
)
_LAYER = re.compile(r"\.(\d+)\.")


class _Rerouted(TorchFunctionMode):
    """Replaces what a block picks."""

    def __init__(self, number: int, block: Block) -> None:
        super().__init__()
        self._number, self._calls = number, 0
        self._forward = block.module.forward
        vars(block.module)["forward"] = self._routed

    def _routed(self, *args: Any, **kwargs: Any) -> Any:
        self._calls = 0
        with self:
            return self._forward(*args, **kwargs)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`; if it picks, return the experts to take and their scores."""
        result, routes = func(*args, **(kwargs or {})), current.routes
        if func not in _PICKING or routes is None or not isinstance(result, tuple):
            return result
        if args[0].dim() != 2 or result[1].dim() != 2:  # the best of each group, or of all
            return result
        taken = routes.take((self._number, self._calls), result[1])
        self._calls += 1
        return type(result)((args[0].gather(-1, taken), taken))


class RoutingReplay:
    """Records routes of the rows that a policy computes, and replays them."""

    def __init__(self, policy: RunnableModel, division: Division = WHOLE) -> None:
        """Watch the blocks of a model. Raises UntrainableError for one without experts."""
        found = list(blocks(policy.module.hf, division))
        if not found:
            raise UntrainableError(_REFUSED.format(policy.module.hf.config.model_type))
        self.policy = policy
        self._blocks = [_Rerouted(number, block) for number, block in enumerate(found)]
        self._experts = [block.experts for block in found]
        self._layers = [int(_LAYER.findall(block.name)[-1]) for block in found]
        self._of_model = policy.module.hf.config.get_text_config().num_hidden_layers
        self._dtype = np.dtype(np.uint8 if max(self._experts) < 256 else np.int16)
        self._missing = int(np.array(-1).astype(self._dtype))
        self._columns: dict[tuple[int, int], slice] = {}
        self._width = 0

    def recording(self, rows: Sequence[LearnerRow]) -> RunnableModel:
        """Return the policy, each of whose passes gives routes to the next rows. The first of all
        raises UntrainableError if a block picks in another way.
        """
        return _Recording(self, rows)

    def lay(self, packed: Packed, routes: Sequence[np.ndarray | None], **options: Any) -> Packed:
        """Return the pack with routes of its rows' first tokens, in its order; a dummy has none."""
        where, count = self.policy.module.places(packed)
        given = np.full((count, self._width), self._missing, self._dtype)
        for route, places in zip(routes, where, strict=bool(routes)):
            if route is not None:
                given[places[: len(route)]] = route
        device = packed.input_ids.device
        tokens, all_places = np.concatenate(packed.tokens), np.concatenate(where)
        first = np.arange(count)
        first[all_places] = all_places[np.unique(tokens, return_index=True)[1]][tokens]
        tables = on_device(given, device), self._missing, on_device(first, device)
        return replace(packed, routes=Routes(self._columns, *tables, **options))

    def of_engine(self, sent: np.ndarray) -> np.ndarray:
        """Return routes by what an engine sends for n tokens [n, layers * experts of a token]: all
        layers of the model, the largest number of its type where a token has none. The model makes
        picks between groups of experts itself. Raises ValueError for those of another model.
        """
        routes = np.full((len(sent), self._width), self._missing, self._dtype)
        ids = np.where(sent == np.iinfo(sent.dtype).max, -1, sent.astype(np.int32))
        count, rest = divmod(sent.shape[1], self._of_model)
        fits = rest == 0
        for number, layer in enumerate(self._layers):
            start, at = layer * count, (layer + 1) * count
            # what picks experts comes last in a block, once or several times
            for pick in sorted((one for one in self._columns if one[0] == number), reverse=True):
                columns = self._columns[pick]
                width = columns.stop - columns.start
                if at - width >= start:
                    routes[:, columns] = ids[:, at - width : at]
                    at -= width
            largest = ids[:, start : start + count].max(initial=-1)
            fits = fits and at == start and largest < self._experts[number]
        if not fits:
            raise ValueError(
                f"a group has routes of {sent.shape[1]} experts, up to number {ids.max()}, which "
                "are no routes of this model: was it sampled by another one?"
            )
        return routes

    def table(self, recorded: Packed) -> np.ndarray:
        """Return the routes [P, width] that a pass took over a pack."""
        assert recorded.routes is not None and recorded.routes.picked is not None
        picked = {
            pick: self.policy.module.whole(torch.cat(taken), recorded)
            for pick, taken in recorded.routes.picked.items()
        }
        if not self._columns:
            everywhere = {number for number, _ in picked} == set(range(len(self._blocks)))
            if not everywhere or {*map(len, picked.values())} != {len(recorded.routes.given)}:
                raise UntrainableError(_REFUSED.format(self.policy.module.hf.config.model_type))
            for pick, taken in picked.items():
                self._columns[pick] = slice(self._width, self._width + taken.shape[1])
                self._width += taken.shape[1]
        table = torch.cat([picked[pick] for pick in self._columns], -1)
        return table.cpu().numpy().astype(self._dtype)


class _Recording:
    """A policy whose passes give routes to rows."""

    def __init__(self, replay: RoutingReplay, rows: Sequence[LearnerRow]) -> None:
        self.module = replay.policy.module
        self._replay, self._rows = replay, iter(rows)
        self._prompts: dict[bytes, np.ndarray] = {}

    def __call__(
        self, packed: Packed, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `RunnableModel`."""
        following = list(islice(self._rows, len(packed.order)))
        rows = [following[place] for place in packed.order if following]
        keys = [row.prompt.tobytes() for row in rows]
        begun = [
            self._prompts.get(key) if row.routes is None else row.routes
            for key, row in zip(keys, rows, strict=True)
        ]
        known = self._replay.lay(packed, begun, picked={})
        result = self._replay.policy(known, temperature, with_entropy)
        table = self._replay.table(known)
        for key, row, places in zip(keys, rows, self.module.places(packed)[0], strict=bool(rows)):
            row.routes = table[places]
            self._prompts.setdefault(key, row.routes[: len(row.prompt)])
        return result
