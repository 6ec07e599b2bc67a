"""What a teacher must have said of a group, by transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from async_grpo.wire.codec import Group, Row


def said(teacher: Any, group: Group) -> torch.Tensor:
    """Log-probs [S, V] of the teacher in the place of the S sampled tokens of all responses."""
    found = []
    for row in responses(group):
        prompt = group.prompts[row.prompt]
        tokens = torch.tensor(np.concatenate([prompt, row.response_ids])).long()[None]
        with torch.no_grad():
            logits = teacher(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1)[row.sampled])
    return torch.cat(found)


def responses(group: Group) -> list[Row]:
    return [row for row in group.rows if row.role != "demonstration"]


def agrees(teacher: Any, group: Group) -> None:
    """Raise AssertionError unless the group has what the teacher says of every sampled token, and
    of the most probable ones in its place.
    """
    plane, ids = group.planes["teacher_logprobs"], group.planes.get("teacher_ids")
    sampled = np.concatenate([row.response_ids[row.sampled] for row in responses(group)])
    logprobs = said(teacher, group)
    assert not plane[len(sampled) :].any(), "of demonstrations it says nothing"
    plane, ids = plane[: len(sampled)], None if ids is None else ids[: len(sampled)]
    own = logprobs.gather(-1, torch.tensor(sampled).long()[:, None])
    np.testing.assert_allclose(plane[:, :1], own, atol=1e-4)
    if ids is None:
        return
    np.testing.assert_allclose(plane[:, 1:], logprobs.topk(ids.shape[1]).values, atol=1e-4)
    named = logprobs.gather(-1, torch.tensor(ids).long())
    np.testing.assert_allclose(plane[:, 1:], named, atol=1e-4)
    assert all(len(set(row)) == len(row) for row in ids.tolist())
