"""Time and peak memory of the mathematics: `python -m benchmarks.algo [--parts advantages losses
logprobs] [--quick]`.

    advantages   every estimator for 100,000 rollouts in groups of 8: one number per row, and [B, T]
                 tensors of 32 tokens     against grpo
    losses       every policy loss, forward and backward, for 1,000,000 packed tokens in 2,000 rows;
                 selections, diagnostics   against ppo_clip
    logprobs     chunked log-probs, forward and backward, for 4,096 tokens, hidden size 896,
                 vocabulary 151,936 (float32)     against naive

Each case runs alone in a process of its own with one thread, in several rounds over all cases of a
part. Seconds are CPU seconds: with one thread they hardly depend on what else the machine does,
where wall time does. A ratio compares with the reference case of the same round: printed is the
median over the rounds, with the smallest and the largest. Memory is the resident peak above the
level with the inputs in place. A case that would not fit into the memory that is free is left out
and says so.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from async_grpo.algo.advantages import compute_advantages, row_advantages
from async_grpo.algo.catalog import ESTIMATORS, POLICY_LOSSES
from async_grpo.algo.logprobs import token_logprobs
from async_grpo.algo.losses import Clip, policy_loss
from async_grpo.algo.metrics import MetricSums, loss_metrics
from async_grpo.algo.selection import select_tokens, token_hashes

GROUP_SIZE, MICRO_BATCH, CLIP = 8, 16_384, Clip(0.2, 0.28)
SELECTING = sorted(POLICY_LOSSES.where(lambda traits: traits.selects))
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Sizes:
    """How much work a case is."""

    rollouts: int = 100_000
    width: int = 32
    tokens: int = 1_000_000
    rows: int = 2_000
    hidden: int = 896
    positions: int = 4_096
    vocabulary: int = 151_936


QUICK = Sizes(
    rollouts=800, width=8, tokens=5_000, rows=20, hidden=16, positions=128, vocabulary=1_000
)
Work = Callable[[], None]


def advantages_case(name: str, sizes: Sizes) -> Work:
    """`<layout>/<estimator>`: layout "rows" or "tokens"."""
    layout, estimator = name.split("/")
    random = torch.Generator().manual_seed(0)
    rewards = torch.randint(0, 5, (sizes.rollouts,), generator=random).double() / 4
    groups = torch.arange(sizes.rollouts) // GROUP_SIZE
    lengths = torch.randint(1, sizes.width + 1, (sizes.rollouts,), generator=random)
    if layout == "rows":
        return lambda: void(row_advantages(estimator, rewards, groups, lengths=lengths))
    mask = torch.arange(sizes.width) < lengths.unsqueeze(-1)
    token_rewards = (
        (mask.cumsum(-1) == lengths.unsqueeze(-1)).float() * mask * rewards.float().unsqueeze(-1)
    )
    traits = ESTIMATORS[estimator]
    baselines = rewards.roll(1) if traits.baseline or traits.turns else None
    return lambda: void(
        compute_advantages(estimator, token_rewards, mask, groups, reward_baselines=baselines)
    )


def loss_case(name: str, sizes: Sizes) -> Work:
    """`<loss>`, `select/<loss>` or `diagnostics` (by micro-batches) on random tokens with ratios on
    both sides of the clip interval.
    """
    random = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(sizes.tokens, generator=random)

    cuts = torch.randperm(sizes.tokens - 1, generator=random)[: sizes.rows - 1] + 1
    row_index = torch.zeros(sizes.tokens, dtype=torch.int64).index_fill(0, cuts, 1).cumsum(0)
    anchor = normal() * 0.5 - 1
    logprobs = (anchor + 0.2 * normal()).requires_grad_()
    common = {
        "anchor_logprobs": anchor,
        "advantages": torch.randn(sizes.rows, generator=random)[row_index],
        "loss_mask": (torch.rand(sizes.tokens, generator=random) > 0.05).to(torch.uint8),
        "staleness": torch.randint(0, 5, (sizes.rows,), generator=random)[row_index],
    }
    behavior = anchor + 0.05 * normal()

    def select(loss: str) -> Tensor:
        positions = torch.arange(sizes.tokens)
        hashes = token_hashes(0, 1, row_index // GROUP_SIZE, row_index % GROUP_SIZE, positions)
        return select_tokens(loss, logprobs=logprobs.detach(), clip=CLIP, hashes=hashes, **common)

    def loss(kind: str, selection: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        return policy_loss(
            kind,
            logprobs,
            behavior_logprobs=behavior,
            clip=CLIP,
            row_index=row_index,
            selection=selection,
            **common,
        )

    if name.startswith("select/"):
        return lambda: void(select(name.removeprefix("select/")))
    if name == "diagnostics":
        token_loss, found = loss("ppo_clip", None)
        tensors = {
            "token_loss": token_loss,
            "logprobs": logprobs.detach(),
            "anchor_logprobs": anchor,
            "behavior_logprobs": behavior,
            "advantages": common["advantages"],
            "staleness": common["staleness"],
            "mask": common["loss_mask"],
            "row_index": row_index,
        }

        def diagnose() -> None:
            sums = MetricSums()
            for start in range(0, sizes.tokens, MICRO_BATCH):
                part = {key: tensor[start : start + MICRO_BATCH] for key, tensor in tensors.items()}
                of_loss = {
                    key: tensor[start : start + MICRO_BATCH] for key, tensor in found.items()
                }
                loss_metrics(sums, diagnostics=of_loss, recomputed=True, **part)
            void(sums.means())

        return diagnose
    selection = select(name) if name in SELECTING else None
    return lambda: void(torch.autograd.grad(loss(name, selection)[0].sum(), logprobs))


def logprobs_case(name: str, sizes: Sizes) -> Work:
    """`naive`, `chunked` or `chunked with entropy`: log-probs and the gradients of hidden states
    and head.
    """
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(sizes.positions, sizes.hidden, generator=random).requires_grad_()
    head = (
        torch.randn(sizes.vocabulary, sizes.hidden, generator=random) / sizes.hidden**0.5
    ).requires_grad_()
    targets = torch.randint(0, sizes.vocabulary, (sizes.positions,), generator=random)

    def naive() -> None:
        picked = torch.log_softmax(hidden @ head.T, -1).gather(-1, targets.unsqueeze(-1))
        torch.autograd.grad(picked.sum(), [hidden, head])

    def chunked() -> None:
        logprobs, entropy = token_logprobs(
            hidden,
            targets,
            lambda part: part @ head.T,
            vocab_size=sizes.vocabulary,
            temperature=1.0,
            with_entropy=name != "chunked",
        )
        torch.autograd.grad(
            logprobs.sum() if entropy is None else logprobs.sum() + entropy.sum(), [hidden, head]
        )

    return naive if name == "naive" else chunked


def void(_: object) -> None:
    """Forget a result."""


@dataclass(frozen=True)
class Part:
    """Cases that are compared with one of them. `repeats` of a case within a round; `needs_gb`
    (sizes) what a case takes at most.
    """

    make: Callable[[str, Sizes], Work]
    reference: str
    cases: tuple[str, ...]
    repeats: int
    needs_gb: Callable[[str, Sizes], float] = lambda name, sizes: 1.0


def naive_gb(name: str, sizes: Sizes) -> float:
    """Logits, their log-softmax and a gradient; the head, its gradient and a copy."""
    logits, head = sizes.positions * sizes.vocabulary * 4e-9, sizes.hidden * sizes.vocabulary * 4e-9
    return (3 * logits if name == "naive" else 1.0) + 3 * head


PARTS = {
    "advantages": Part(
        advantages_case,
        "rows/grpo",
        (
            *(f"rows/{name}" for name, spec in ESTIMATORS.items() if not spec.returns),
            *(f"tokens/{name}" for name in ESTIMATORS),
        ),
        repeats=5,
    ),
    "losses": Part(
        loss_case,
        "ppo_clip",
        (*POLICY_LOSSES, *(f"select/{name}" for name in SELECTING), "diagnostics"),
        repeats=5,
    ),
    "logprobs": Part(
        logprobs_case,
        "naive",
        ("naive", "chunked", "chunked with entropy"),
        repeats=1,
        needs_gb=naive_gb,
    ),
}


def kilobytes(path: str, field: str) -> int:
    """A line `field:  123 kB` of a file in /proc. VmRSS is the resident memory of a process now,
    VmHWM its peak.
    """
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{path} has no {field}: memory is measured on Linux only")
    return int(found[1])


def measure(pipe: Connection, part: str, name: str, sizes: Sizes) -> None:
    """In the child: send (median seconds of the repeats, peak MB of the first run)."""
    spec = PARTS[part]
    torch.set_num_threads(1)
    spec.make(name, QUICK)()  # loads what is loaded once
    work = spec.make(name, sizes)
    ctypes.CDLL(None).malloc_trim(
        0
    )  # memory that the preparation has freed would hide what the work takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present level
    level, seconds = kilobytes("/proc/self/status", "VmRSS"), []
    for repeat in range(spec.repeats + (spec.repeats > 1)):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
        if repeat == 0:
            peak = (kilobytes("/proc/self/status", "VmHWM") - level) / 1024
    pipe.send((statistics.median(seconds[-spec.repeats :]), peak))


def alone(part: str, name: str, sizes: Sizes) -> tuple[float, float] | str:
    """Seconds and MB of one case in a process of its own, or why there are none."""
    free = kilobytes("/proc/meminfo", "MemAvailable") * 1024e-9
    need = PARTS[part].needs_gb(name, sizes)
    if free < need:
        return f"left out: needs about {need:.1f} GB, {free:.1f} GB are free"
    context = multiprocessing.get_context(
        "fork"
    )  # torch is imported once; nothing has started its threads here
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=measure, args=(theirs, part, name, sizes))
    child.start()
    theirs.close()
    try:
        if not ours.poll(TIMEOUT_S):
            raise TimeoutError(f"{part} {name} took longer than {TIMEOUT_S:g} s")
        return ours.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"{part} {name} ended with exit code {child.exitcode}") from None
    finally:
        child.kill()
        child.join()


def table(part: str, sizes: Sizes, *, rounds: int) -> list[str]:
    """Lines of the part's table."""
    spec = PARTS[part]
    results = {name: [] for name in spec.cases}
    for _ in range(rounds):
        for name in spec.cases:
            results[name].append(alone(part, name, sizes))
    lines = [f"| {part} | CPU seconds | against {spec.reference} | peak MB |", "|---|---|---|---|"]
    references = results[spec.reference]
    for name, found in results.items():
        done = [
            (one, other)
            for one, other in zip(found, references, strict=True)
            if not isinstance(one, str)
        ]
        if not done:
            lines.append(f"| {name} | {found[0]} | | |")
            continue
        ratios = sorted(one[0] / other[0] for one, other in done if not isinstance(other, str))
        ratio = (
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            if ratios
            else "no reference"
        )
        seconds, peak = statistics.median(one[0] for one, _ in done), max(one[1] for one, _ in done)
        lines.append(f"| {name} | {seconds:.4g} | {ratio} | {peak:.0f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.algo", description="Time and memory of the mathematics."
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes and one round: shows that it runs, not how fast",
    )
    arguments = parser.parse_args()
    print(
        f"{platform.machine()}, one thread of {len(os.sched_getaffinity(0))} cores, torch "
        f"{torch.__version__}"
    )
    sizes, rounds = (QUICK, 1) if arguments.quick else (Sizes(), arguments.rounds)
    for part in arguments.parts:
        print("\n".join(["", *table(part, sizes, rounds=rounds)]), flush=True)


if __name__ == "__main__":
    main()
