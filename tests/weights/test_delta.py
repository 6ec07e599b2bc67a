"""A delta makes the new copy of the old one, bit for bit, and nothing else of anything."""

import itertools

import numpy as np
import pytest

from async_grpo.errors import TransferMismatch
from async_grpo.weights import delta

BLOCK = 2**16


def copies(seed: int, words: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """An old and a new copy; each word changes with probability `share`."""
    random = np.random.default_rng(seed)
    old = random.integers(0, 2**16, words, dtype=np.uint16)
    changed = random.random(words) < share
    new = np.where(changed, old ^ random.integers(1, 2**16, words, dtype=np.uint16), old)
    return old.view(np.uint8), new.view(np.uint8)


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.01, 0.49, 0.51, 1.0])
@pytest.mark.parametrize("words", [0, 32, BLOCK, BLOCK + 32, 64 * BLOCK, 65 * BLOCK + 96])
def test_applied_delta_is_the_new_copy(words: int, share: float) -> None:
    old, new = copies(words, words, share)
    found = delta.encode(old, new)
    applied = old.copy()
    delta.apply(found, applied)
    assert np.array_equal(applied, new)


def test_each_block_is_written_in_the_shorter_way() -> None:
    old = np.zeros(3 * BLOCK, np.uint16)
    new = old.copy()
    new[BLOCK : 2 * BLOCK] = 1  # all of the second block
    new[[0, BLOCK - 1, 2 * BLOCK, 3 * BLOCK - 1]] = 7
    found = delta.encode(old.view(np.uint8), new.view(np.uint8))
    head = found.nbytes - (3 * 4 + 4 * 4 + BLOCK * 2)
    assert 0 < head <= 64


def test_size_follows_what_changed() -> None:
    old, new = copies(1, 32 * BLOCK, 0.01)
    changed = np.count_nonzero(old.view(np.uint16) != new.view(np.uint16))
    assert delta.encode(old, new).nbytes < 4 * changed + 200
    everything = delta.encode(*copies(2, 32 * BLOCK, 1.0))
    assert everything.nbytes < 1.001 * new.nbytes


def test_bits_decide_and_not_values() -> None:
    old = np.array([0.0, np.nan, 1.0, 2.0] * 16, np.float32)
    new = old.copy()
    new[0] = -0.0
    applied = old.copy().view(np.uint8)
    delta.apply(delta.encode(old.view(np.uint8), new.view(np.uint8)), applied)
    assert np.signbit(applied.view(np.float32)[0])
    assert np.array_equal(applied, new.view(np.uint8))


@pytest.mark.parametrize("share", [0.001, 0.9])
def test_damaged_delta_writes_nothing(share: float) -> None:
    old, new = copies(3, 2 * BLOCK + 32, share)
    whole = delta.encode(old, new)
    random = np.random.default_rng(4)
    cuts = [whole[:size] for size in (0, 10, 40, whole.nbytes // 2, whole.nbytes - 1)]
    longer = np.concatenate([whole, np.zeros(4, np.uint8)])
    flipped = []
    for place in itertools.chain(range(36), random.integers(0, whole.nbytes, 50)):
        one = whole.copy()
        one[place] ^= 1 << random.integers(8)
        flipped.append(one)
    for damaged in [*cuts, longer, *flipped]:
        untouched = old.copy()
        with pytest.raises(TransferMismatch):
            delta.apply(damaged, untouched)
        assert np.array_equal(untouched, old)


def test_delta_of_another_model_is_refused() -> None:
    old, new = copies(5, BLOCK, 0.01)
    larger = np.zeros(old.nbytes + 64, np.uint8)
    with pytest.raises(TransferMismatch, match="no delta for weights of"):
        delta.apply(delta.encode(old, new), larger)


def test_delta_between_other_copies_is_refused() -> None:
    """Though their sizes are the same: sender and receiver name what it leads from, and to."""
    old, new = copies(7, BLOCK, 0.01)
    found = delta.encode(old, new, ("v1", "v2"))
    for way in (("v1", "v3"), ("v2", "v1"), None):
        with pytest.raises(TransferMismatch, match="is another one"):
            delta.apply(found, old.copy(), way)
    delta.apply(found, applied := old.copy(), ("v1", "v2"))
    assert np.array_equal(applied, new)


def test_chain_of_versions_ends_at_the_last_one() -> None:
    random = np.random.default_rng(6)
    held = sent = random.integers(0, 256, 2 * BLOCK * 3, dtype=np.uint8)
    held = held.copy()
    for _ in range(30):
        new = sent.copy()
        new.view(np.uint16)[random.integers(0, len(new) // 2, 500)] += 1
        delta.apply(delta.encode(sent, new), held)
        sent = new
        assert np.array_equal(held, sent)
