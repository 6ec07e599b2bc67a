"""Weights of a tiny model, and the log-probs that an engine with them must give."""

from __future__ import annotations

import copy

import numpy as np
import torch

PROMPT = list(range(5, 17))


def perturbed(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A copy that is visibly different everywhere, norms included."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(
                0.1
                * parameter.pow(2).mean().sqrt().clamp_min(0.05)
                * torch.randn(parameter.shape, generator=generator)
            )
    return other


def learner_logprobs(
    model: torch.nn.Module, prompt: list[int], response: np.ndarray, temperature: float
) -> np.ndarray:
    """Log-probs of a response by one plain forward pass."""
    ids = torch.tensor([prompt + response.tolist()])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.float().log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
