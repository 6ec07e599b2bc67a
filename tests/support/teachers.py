"""What a teacher must have said of a group, by transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from async_grpo.wire.codec import Group


def said(teacher: Any, group: Group) -> np.ndarray:
    """Log-probs of the teacher for the sampled tokens of all rows."""
    found = []
    for row in group.rows:
        prompt = group.prompts[row.prompt]
        tokens = torch.tensor(np.concatenate([prompt, row.response_ids])).long()[None]
        with torch.no_grad():
            logits = teacher(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0]
        found.append(logprobs.numpy()[row.sampled])
    return np.concatenate(found)


def agrees(teacher: Any, group: Group) -> None:
    """Raise AssertionError unless the group has that of the teacher for every sampled token."""
    plane = group.planes["teacher_logprobs"][:, 0]
    np.testing.assert_allclose(plane, said(teacher, group), atol=1e-4)
