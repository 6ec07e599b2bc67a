"""A real engine whose sampling is cut: of which tokens it says that each was sampled, and the
learner's log-probs over those.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_grpo.config.schema import Config
from async_grpo.learner.model import PolicyModel
from async_grpo.learner.packing import pack, response_row
from async_grpo.rollout.engine.base import Completion, Sampling
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.wire.kept import KeptSets, joined
from tests.support.engine_weights import PROMPT, learner_logprobs
from tests.support.learners import loaded
from tests.support.models import write_model

TEMPERATURE, TOP_K, TOKENS = 0.7, 20, 60
CUT = Sampling(4, TOKENS, TEMPERATURE, top_p=0.9, top_k=TOP_K, kept=True)
LEAST = replace(CUT, top_p=1.0, min_p=0.05)
pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that is sure of some tokens and not of others."""
    path = write_model(tmp_path_factory.mktemp("model") / "model", ends=False)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    model.save_pretrained(path)
    return path


Answers = tuple[
    list[Completion], list[Completion], list[Completion], list[Completion], list[int], list[int]
]


async def generated(directory: str) -> Answers:
    """Responses from sets by top-p and by min-p, beside others without; a response whose sets have
    more tokens than are looked for; the lengths of the first ones and of their sets on the way.
    """
    config = Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": directory, "dtype": "float32"},
            "rollout": {"prompt_length": 32, "response_length": 100, "top_k": TOP_K},
            "cluster": {"engine": {"max_num_seqs": 16}},
        }
    )
    engine = await VllmEngine.start(
        config,
        model_dir=directory,
        device="cpu",
        backend="shared_memory",
        stop_token_ids=[],
        label="v0.0",
        seed=1,
    )
    try:
        plain = replace(CUT, n=2, kept=False, top_p=1.0, top_k=0)
        greedy = replace(CUT, n=1, kept=False, temperature=0.0)
        work = [
            asyncio.ensure_future(engine.generate(PROMPT, one, name=name))
            for name, one in (("cut", CUT), ("least", LEAST), ("plain", plain), ("greedy", greedy))
        ]
        tokens, sets = list[int](), list[int]()
        while not work[0].done():
            for one in engine.so_far("cut").values():
                assert one.kept is not None
                tokens.append(len(one.token_ids))
                sets.append(int((one.kept.counts > 0).sum()))
            await asyncio.sleep(0.002)
        cut, least, *others = [await one for one in work]
        # of all 100 tokens, as if they were as probable as the last of none: 32 are looked for
        flat = replace(CUT, n=1, temperature=2.0, top_p=1.0, top_k=0)
        lost = await engine.generate(PROMPT, flat)
        return cut, least, [*others[0], *others[1]], lost, tokens, sets
    finally:
        engine.close()


@pytest.fixture(scope="module")
def answers(directory: str) -> Answers:
    return asyncio.run(asyncio.wait_for(generated(directory), 100))


def reference_sets(
    model: torch.nn.Module, response: np.ndarray, sampling: Sampling
) -> list[list[int]]:
    """Top-k and min-p, then top-p of what is left: the fewest tokens that reach it."""
    ids = torch.tensor([PROMPT + response.tolist()])
    with torch.no_grad():
        logits = model(ids).logits[0, len(PROMPT) - 1 : -1].double() / TEMPERATURE
    found = []
    for row in logits:
        best = row.topk(TOP_K)
        likely = best.values.softmax(0) >= sampling.min_p * best.values.softmax(0).max()
        left = best.values[likely].softmax(0)
        kept = best.indices[likely][left.cumsum(0) - left < sampling.top_p]
        found.append(sorted(kept.tolist()))
    return found


def sets_of(one: Completion) -> list[list[int]]:
    assert one.kept is not None
    return [part.ids.tolist() for part in one.kept.split([1] * len(one.token_ids))]


@pytest.mark.parametrize(("place", "sampling"), [(0, CUT), (1, LEAST)], ids=["top-p", "min-p"])
def test_the_engines_sets_are_those_of_a_reference_implementation(
    directory: str, answers: Answers, place: int, sampling: Sampling
) -> None:
    cut = answers[place]
    model = AutoModelForCausalLM.from_pretrained(directory).float().eval()
    sizes, others = [], 0
    for one in cut:
        wanted = reference_sets(model, one.token_ids, sampling)
        found = sets_of(one)
        assert len(found) == len(one.token_ids) == TOKENS
        one.kept.check(one.token_ids)
        sizes += [len(each) for each in found]
        others += sum(a != b for a, b in zip(found, wanted, strict=True))
    assert others <= 1, "rounding at the bound of a set"
    assert min(sizes) == 1 and 3 < max(sizes) <= TOP_K, "some tokens were sure, some were not"
    assert len({*sizes}) > 4


@pytest.mark.parametrize("place", [0, 1], ids=["top-p", "min-p"])
def test_the_learners_log_probs_over_the_sets_are_the_engines(
    directory: str, answers: Answers, place: int
) -> None:
    cut = answers[place]
    policy = loaded(directory)
    assert isinstance(policy, PolicyModel)
    rows = [response_row(np.array(PROMPT), one.token_ids) for one in cut]
    packed = pack(rows, torch.device("cpu"))
    order = packed.order
    kept = joined([cut[at].kept for at in order], [TOKENS] * len(order))
    assert isinstance(kept, KeptSets)
    with torch.no_grad():
        sets = tuple(map(torch.from_numpy, kept.by_size()))
        given = replace(packed, kept=sets)
        found, entropy = policy(given, TEMPERATURE, True)
        whole, _ = policy(packed, TEMPERATURE, False)
    engine = np.concatenate([cut[at].logprobs for at in order])
    assert np.abs(found.numpy() - engine).max() < 1e-4
    alone = kept.counts == 1
    assert alone.any() and not found.numpy()[alone].any() and not entropy.numpy()[alone].any()
    assert np.abs(whole.numpy() - engine)[~alone].mean() > 0.01, "over all tokens they are not"


def test_responses_beside_them_are_sampled_from_all_tokens_and_carry_no_sets(
    directory: str, answers: Answers
) -> None:
    others = answers[2]
    model = AutoModelForCausalLM.from_pretrained(directory).float().eval()
    assert len(others) == 3
    for one, temperature in zip(others, (TEMPERATURE, TEMPERATURE, 1.0), strict=True):
        assert one.kept is None and len(one.token_ids) == TOKENS
        wanted = learner_logprobs(model, PROMPT, one.token_ids, temperature)
        assert np.abs(one.logprobs - wanted).max() < 1e-4


def test_a_response_under_way_has_as_many_sets_as_tokens(answers: Answers) -> None:
    *_, tokens, sets = answers
    assert tokens == sets and max(tokens) > 1


def test_a_token_from_more_tokens_than_are_looked_for_has_no_set(answers: Answers) -> None:
    [lost] = answers[3]
    assert lost.kept is not None and len(lost.kept.counts) == TOKENS
    assert (lost.kept.counts == 0).any()
