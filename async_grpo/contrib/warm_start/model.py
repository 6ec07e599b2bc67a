"""The supervised half of a warm start: tokenizer, small model, the two training phases.

Runs in: the warm-start child process (see `cache`), with all cores. Hides how the model is taught;
`cache` hides where the result is kept.

Invariants: everything follows from the seed; the loss covers the solution and the end token only,
never the prompt. Accuracy needs no sampling: a response is greedily right exactly if the arg-max is
right at every position of the solution, and the expected accuracy at temperature 1 is the mean
probability of the solution; both come from one teacher-forced forward pass.

The clean phase must end well above the accuracy where RL starts: an unfinished one leaves
systematic errors (missed carries) that RL sharpens instead of repairing. The blur phase then lowers
accuracy by flattening the distribution, which RL undoes quickly.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion

from async_grpo.config.schema import WARM_START_POSITIONS, WarmStart
from async_grpo.contrib.warm_start.cache import ALPHABET, Pair, unknown

PAD, EOS = "<|pad|>", "<|endoftext|>"

# Far from the defaults of large models (0.02 and 10,000 or more): a narrow model over a dozen
# positions learns about twice as fast.
_INITIALIZER_RANGE = 0.06
_ROPE_THETA = 100.0
_WEIGHT_DECAY = 0.3  # shortens a plateau on which some seeds stay for hundreds of steps
_LR_WARMUP_STEPS = 50
_BLUR_PATIENCE, _BLUR_LR_GROWTH = 15, 1.1
_CHECK_EVERY = 20
_SAY_EVERY_S = 10.0
_CHECK_PROBLEMS = 384
_IGNORE = -100
_EXPERTS_OF_A_TOKEN = 2
_BYTE_LEVEL = {" ": "\u0120", "\n": "\u010a"}  # how byte-level BPE writes these two

Policy: TypeAlias = Qwen2ForCausalLM | Qwen3MoeForCausalLM


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Share answered right: greedily, and expected of a sample at temperature 1."""

    greedy: float
    sampled: float


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """Optimizer steps, wall seconds and accuracy on training problems of both phases."""

    clean_steps: int
    clean: Accuracy
    blur_steps: int
    blurred: Accuracy
    seconds: float


def build_tokenizer() -> Qwen2Tokenizer:
    """Return a character-level tokenizer of 64 tokens: padding, end of text and the alphabet.

    transformers loads every `qwen2` model's tokenizer as this class: byte-level BPE, here without
    merges, so that an ASCII character is a token. It drops unknown characters; `Encoder` checks
    them.
    """
    tokens = [PAD, EOS, *(_BYTE_LEVEL.get(character, character) for character in ALPHABET)]
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        unk_token=EOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=WARM_START_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model(settings: WarmStart, tokenizer: Qwen2Tokenizer) -> Policy:
    """Return a randomly initialised float32 model of this size, from torch's global generator: a
    Qwen2, or with experts a Qwen3-MoE whose tokens meet as much as those of the dense model.
    """
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "max_position_embeddings": WARM_START_POSITIONS,
        "initializer_range": _INITIALIZER_RANGE,
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROPE_THETA},
        "tie_word_embeddings": settings.tie_embeddings,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    if not settings.experts:
        return Qwen2ForCausalLM(Qwen2Config(**common)).float()
    chosen = min(_EXPERTS_OF_A_TOKEN, settings.experts)
    experts = Qwen3MoeConfig(
        **common,
        head_dim=settings.hidden_size // settings.heads,
        num_experts=settings.experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=settings.intermediate_size // chosen,
        norm_topk_prob=True,
    )
    return Qwen3MoeForCausalLM(experts).float()


def train(
    settings: WarmStart,
    *,
    seed: int,
    batch: Callable[[int, int], list[Pair]],
    progress: Callable[[str], None],
    out: Path,
) -> WarmStartReport:
    """Build, teach and save a model with its tokenizer into `out`; `batch(start, count)` gives
    pairs by position, the first of which only check accuracy. Raises ValueError for unknown
    characters.
    """
    started = time.monotonic()
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(settings, tokenizer)
    encoder = Encoder(tokenizer)
    probe = encoder.encode(batch(0, _CHECK_PROBLEMS))
    size = settings.batch_size
    stream = (batch(start, size) for start in itertools.count(_CHECK_PROBLEMS, size))
    trainer = _Trainer(settings, model, encoder, stream, probe)
    clean_steps = trainer.clean(progress)
    clean = measure(model, probe)
    blur_steps = trainer.blur(progress, seed) if clean_steps else 0
    blurred = measure(model, probe)
    report = WarmStartReport(clean_steps, clean, blur_steps, blurred, time.monotonic() - started)
    _save(model, tokenizer, out)
    return report


def _save(model: Policy, tokenizer: Qwen2Tokenizer, out: Path) -> None:
    # What `model.save_pretrained` would write; but that imports every installed training framework
    # first, which takes seconds.
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    weights = revert_weight_conversion(model, weights)  # files hold every expert alone
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    model.config.save_pretrained(out)
    model.generation_config.do_sample = True
    model.generation_config.save_pretrained(out)
    tokenizer.save_pretrained(out)


@torch.no_grad()
def measure(model: Policy, data: Encoded) -> Accuracy:
    """Greedy and expected sampled accuracy on encoded pairs."""
    model.eval()
    logits = model(input_ids=data.tokens).logits[:, :-1]  # [B, T-1, V]
    target = data.labels[:, 1:]  # [B, T-1]
    asked = target != _IGNORE
    right = (logits.argmax(-1) == target) | ~asked
    picked = target.clamp(min=0).unsqueeze(-1)
    logprob = torch.log_softmax(logits, -1).gather(-1, picked).squeeze(-1)
    total = (logprob * asked).sum(-1)
    return Accuracy(greedy=right.all(-1).float().mean().item(), sampled=total.exp().mean().item())


@dataclass(frozen=True, slots=True)
class Encoded:
    """Right-padded rows of prompt, solution and end token; `labels` are -100 on prompt, padding and
    what an environment says.
    Attention is causal, so padding on the right needs no mask.
    """

    tokens: torch.Tensor  # [B, T] int64
    labels: torch.Tensor  # [B, T] int64


class Encoder:
    """Pairs to tensors: one token per character, so a dictionary replaces the tokenizer, faster."""

    def __init__(self, tokenizer: Qwen2Tokenizer) -> None:
        self.ids = {character: tokenizer.encode(character)[0] for character in ALPHABET}
        self.pad, self.eos = tokenizer.convert_tokens_to_ids([PAD, EOS])

    def encode(self, pairs: list[Pair]) -> Encoded:
        """Tensors of pairs; ValueError names the first unknown character or too long pair."""
        rows = [self._row(prompt, solution) for prompt, solution in pairs]
        width = max(len(tokens) for tokens, _ in rows)
        if width > WARM_START_POSITIONS:
            raise ValueError(
                f"a prompt with its solution has {width} tokens; a warm-started model "
                f"takes at most {WARM_START_POSITIONS}"
            )
        tokens = torch.full((len(rows), width), self.pad)
        labels = torch.full_like(tokens, _IGNORE)
        for row, (ids, wanted) in enumerate(rows):
            tokens[row, : len(ids)] = torch.tensor(ids)
            labels[row, : len(ids)] = torch.tensor(wanted)
        return Encoded(tokens, labels)

    def _row(self, prompt: str, solution: str | tuple[str, ...]) -> tuple[list[int], list[int]]:
        """Tokens and labels of a pair; every turn of the policy has an end token."""
        ids = self._ids(prompt)
        labels = [_IGNORE] * len(ids)
        for number, text in enumerate((solution,) if isinstance(solution, str) else solution):
            said = [*self._ids(text), *[self.eos] * (number % 2 == 0)]
            ids += said
            labels += said if number % 2 == 0 else [_IGNORE] * len(said)
        return ids, labels

    def _ids(self, text: str) -> list[int]:
        try:
            return [self.ids[character] for character in text]
        except KeyError as error:
            raise ValueError(unknown(error.args[0])) from error


class _Trainer:
    """AdamW over both phases; the optimizer's state carries over from one to the other."""

    def __init__(
        self,
        settings: WarmStart,
        model: Policy,
        encoder: Encoder,
        stream: Iterator[list[Pair]],
        probe: Encoded,
    ) -> None:
        self.settings, self.model = settings, model
        self.encoder, self.stream = encoder, stream
        self.probe = probe
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=_WEIGHT_DECAY
        )

    def clean(self, progress: Callable[[str], None]) -> int:
        """Train on solutions until greedy accuracy reaches the target; the steps."""
        limit, said = self.settings.max_steps, -math.inf
        for step in range(1, limit + 1):
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.lr * min(1.0, step / _LR_WARMUP_STEPS)
            loss = self._update(self.encoder.encode(next(self.stream)))
            if step % _CHECK_EVERY == 0 or step == limit:
                accuracy = measure(self.model, self.probe)
                if (now := time.monotonic()) - said >= _SAY_EVERY_S:
                    said = now
                    progress(
                        f"warm start: step {step} of at most {limit}, loss {loss:.3f}, greedy "
                        f"accuracy {accuracy.greedy:.0%} (ends at "
                        f"{self.settings.target_accuracy:.0%})"
                    )
                if accuracy.greedy >= self.settings.target_accuracy:
                    return step
        return limit

    def blur(self, progress: Callable[[str], None], seed: int) -> int:
        """Train on partly random solutions until greedy and sampled accuracy have fallen to their
        targets; returns the steps.

        The learning rate stays high and the optimizer's second moments are those of the clean
        phase, so the first noisy steps unsettle the weights at once; many gentle steps would only
        flatten the distribution and leave the greedy answer right. A seed that holds out gets
        longer and longer steps.
        """
        settings, noise = self.settings, random.Random(f"blur {seed}")
        for step in range(1, settings.blur_max_steps + 1):
            if step > _BLUR_PATIENCE:
                for group in self.optimizer.param_groups:
                    group["lr"] *= _BLUR_LR_GROWTH
            pairs = _blurred(next(self.stream), settings.blur_noise, noise)
            self._update(self.encoder.encode(pairs))
            accuracy = measure(self.model, self.probe)
            if (
                accuracy.greedy <= settings.blur_accuracy
                and accuracy.sampled <= settings.blur_sampled_accuracy
            ):
                return step
        if settings.blur_max_steps:
            progress(
                "warm start: the blur phase has not reached its targets in "
                f"{settings.blur_max_steps} steps"
            )
        return settings.blur_max_steps

    def _update(self, data: Encoded) -> float:
        self.model.train()
        logits = self.model(input_ids=data.tokens).logits  # [B, T, V]
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]),
            data.labels[:, 1:].reshape(-1),
            ignore_index=_IGNORE,
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def _blurred(pairs: list[Pair], share: float, noise: random.Random) -> list[Pair]:
    """Replace this share of solution characters by characters of other solutions."""
    turns = [(solution,) if isinstance(solution, str) else solution for _, solution in pairs]
    pool = "".join(text for one in turns for text in one[::2])

    def blur(text: str) -> str:
        return "".join(noise.choice(pool) if noise.random() < share else one for one in text)

    return [
        (prompt, tuple(text if number % 2 else blur(text) for number, text in enumerate(one)))
        for (prompt, _), one in zip(pairs, turns, strict=True)
    ]
