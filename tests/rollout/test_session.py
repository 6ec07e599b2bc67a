"""The tokens of an episode: append-only, each with its log-prob and version, in rows that come
apart where a template would change what stands.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Tokenizer

from async_grpo.learner.rows import routes_of
from async_grpo.rollout.chat_format import Said, TemplateFormat
from async_grpo.rollout.conversation import ContentError, Conversation
from async_grpo.rollout.engine.base import Completion, EngineError
from async_grpo.rollout.episodes import Episode, as_rows, routes_plane
from async_grpo.rollout.session import Session
from async_grpo.wire.codec import Group, decode_group, encode_group
from async_grpo.wire.kept import KeptSets, joined
from tests.support.chat_templates import TEMPLATES, tokenizer_of

moves = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(0, 4)),
        st.tuples(
            st.just("take"), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1)
        ),
        st.tuples(st.just("fork"), st.integers(1, 4)),
    ),
    max_size=12,
)


def completion(spans: list[tuple[int, int]], *, first: int) -> Completion:
    """A turn of these (version, tokens), whose ids and log-probs count from `first`."""
    labels, at = [], 0
    for version, count in spans:
        labels.append((f"v0.{version}", at, at + count))
        at += count
    ids = np.arange(first, first + at, dtype=np.int32)
    return Completion(ids, -ids.astype(np.float32), labels, "stop", 1.0)


@given(moves=moves)
@settings(max_examples=200)
def test_a_session_is_append_only_and_its_rows_say_what_was_done(
    moves: list[tuple[str, Any]],
) -> None:
    session, number = Session([1, 2, 3]), 100
    rows: list[dict[str, Any]] = [{"prompt": [1, 2, 3], "all": [], "sampled": [], "versions": []}]
    for kind, what in moves:
        before, row = session.tokens, rows[-1]
        if kind == "feed":
            session.feed(list(range(what)))
            row["all"] += [(token, None) for token in range(what)]
        elif kind == "take":
            done = completion(what, first=number)
            session.take(done)
            versions = [version for version, count in what for _ in range(count)]
            row["all"] += [
                (token, version)
                for token, version in zip(done.token_ids.tolist(), versions, strict=True)
            ]
            number += len(versions)
        else:
            session.fork([9] * what)
            rows.append({"prompt": [9] * what, "all": [], "sampled": [], "versions": []})
            continue
        assert session.tokens[: len(before)] == before
        assert session.length == len(session.tokens)
    wanted = [row for row in rows if any(version is not None for _, version in row["all"])]
    assert len(session.rows) == len(wanted)
    assert session.sampled == sum(
        version is not None for row in wanted for _, version in row["all"]
    )
    for row, expected in zip(session.rows, wanted, strict=True):
        everything = list(expected["all"])
        while everything[-1][1] is None:  # context that nothing follows
            everything.pop()
        sampled = [(token, version) for token, version in everything if version is not None]
        assert row.prompt == expected["prompt"]
        assert row.response_ids.tolist() == [token for token, _ in everything]
        assert row.behavior_logprobs.tolist() == [-float(token) for token, _ in sampled]
        assert [
            span.policy_version for span in row.versions for _ in range(span.start, span.end)
        ] == [version for _, version in sampled]
        assert all(
            one.policy_version != other.policy_version
            for one, other in zip(row.versions, row.versions[1:], strict=False)
        )
        assert all(count >= 1 for _, count in row.segments)


def episode(session: Session, *, rewards: list[float] | None = None) -> Episode:
    turns = [{"a": value} for value in rewards or []]
    return Episode(session, {"a": 1.0}, 1.0, "env_done", turn_rewards=turns)


def group_of(episodes: list[Episode], *, trained: int) -> Group:
    prompts, rows = as_rows(episodes, trained=trained, weights={"a": 2.0})
    return decode_group(encode_group(Group(0, 1, 0, "a", prompts, rows)))


def test_sessions_become_rows_of_a_group() -> None:
    one, two, three = Session([1, 2]), Session([1, 2]), Session([1, 2, 3])
    one.take(completion([(0, 2)], first=10))
    one.feed([5, 6])
    one.take(completion([(1, 1)], first=20))
    one.feed([7])
    two.take(completion([(0, 1)], first=30))
    two.fork([4, 4, 4])
    two.feed([8])
    two.take(completion([(2, 2)], first=40))
    three.take(completion([(0, 3)], first=50))
    episodes = [
        episode(one, rewards=[0.0, 0.5]),
        episode(two, rewards=[0.25, 1.0]),
        episode(three, rewards=[1.0]),
    ]
    group = group_of(episodes, trained=2)
    assert [prompt.tolist() for prompt in group.prompts] == [[1, 2], [4, 4, 4], [1, 2, 3]]
    assert [(row.prompt, row.episode, row.role) for row in group.rows] == [
        (0, 0, "train"),
        (0, 1, "train"),
        (1, 1, "train"),
        (2, 2, "baseline"),
    ]
    assert [row.segments for row in group.rows] == [[(0, 2), (2, 1)], [(0, 1)], [(1, 2)], [(0, 3)]]
    assert [row.turn_rewards for row in group.rows] == [[0.0, 1.0], [0.5], [2.0], [2.0]]
    assert group.rows[0].response_ids.tolist() == [10, 11, 5, 6, 20]


def routed(session: Session, said: Completion, number: int) -> Completion:
    """The completion, with routes whose values say which turn they are of."""
    length = session.length + len(said.token_ids) - 1
    return replace(said, routes=np.full((length, 2), number, np.uint8))


def test_routes_are_those_of_the_turn_that_first_computed_a_token() -> None:
    one, two, three = Session([1, 2]), Session([1, 2]), Session([1, 2, 3])
    one.take(routed(one, completion([(0, 2)], first=10), 1))
    one.feed([5, 6])
    one.take(routed(one, completion([(1, 2)], first=20), 2))
    one.feed([7])
    two.take(completion([(0, 2)], first=30))
    three.take(routed(three, completion([(0, 1)], first=50), 3))
    three.feed([8])
    three.take(routed(three, completion([(0, 1)], first=60), 4))
    three.forget(0)
    episodes = [episode(session) for session in (two, one, three)]
    prompts, rows = as_rows(episodes, trained=3, weights={"a": 1.0})
    parts = [row.routes for one in episodes for row in one.session.rows]
    given = replace(rows[0], response_ids=np.arange(2, dtype=np.int32))
    planes = routes_plane(prompts, [*rows, given], parts)
    group = decode_group(encode_group(Group(0, 1, 0, "a", prompts, [*rows, given], planes=planes)))
    none = [255, 255]
    assert group.planes["routes"].tolist() == [
        *([[1, 1]] * 2),  # the prompt of two rows, of which one has routes
        *([[3, 3]] * 3),
        *(none, none),
        *([1, 1], *[[2, 2]] * 4, none),
        none,
        *(none, none),
    ]
    found = routes_of(group)
    assert [len(routes) for routes in found if routes is not None] == [3, 7, 3, 3]
    assert routes_plane(prompts, rows, [two.rows[0].routes] * 3) == {}


def test_many_experts_have_wider_routes() -> None:
    session = Session([1, 2])
    said = completion([(0, 2)], first=10)
    session.take(replace(said, routes=np.full((3, 1), 255, np.uint8)))
    prompts, rows = as_rows([episode(session)], trained=1, weights={"a": 1.0})
    plane = routes_plane(prompts, rows, [session.rows[0].routes])["routes"]
    assert plane.dtype == np.uint16 and plane[:, 0].tolist() == [255, 255, 255, 65_535]


def test_routes_of_other_tokens_are_refused() -> None:
    session, said = Session([1, 2]), completion([(0, 2)], first=10)
    with pytest.raises(EngineError, match="4 tokens came with routes of 4"):
        session.take(replace(said, routes=np.zeros((4, 1), np.uint8)))


def test_plain_responses_are_rows_without_turns_of_their_own() -> None:
    sessions = [Session([1, 2]) for _ in range(2)]
    for number, session in enumerate(sessions):
        session.take(completion([(0, 2)], first=10 * number))
    group = group_of([episode(session) for session in sessions], trained=2)
    assert len(group.prompts) == 1
    assert [(row.episode, row.turn_rewards, row.segments) for row in group.rows] == [
        (None, None, [(0, 2)])
    ] * 2


# ---- conversations ----

WORDS = ["a", "turn", "with <tags>", "  spaces  ", "line\nbreak", "{braces}", "unicode é", ""]
contents = st.lists(
    st.builds(
        lambda role, text: {"role": role, "content": text},
        st.sampled_from(["user", "user", "tool"]),
        st.sampled_from(WORDS[:-1]),
    ),
    min_size=1,
    max_size=2,
)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@given(
    said=st.lists(st.sampled_from(WORDS), min_size=1, max_size=4),
    answers=st.lists(contents, min_size=4, max_size=4),
    ended=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_what_was_said_is_a_prefix_of_the_next_request_or_a_row_begins(
    name: str, said: list[str], answers: list[list[dict[str, str]]], ended: bool
) -> None:
    tokenizer = tokenizer_of(name)
    roles = TEMPLATES[name].roles
    asked = [{"role": "user", "content": "question"}]
    talk = talk_of(tokenizer, asked)
    session, messages = Session(talk.prompt_ids), list(asked)
    assert talk.prompt_ids == ids_of(tokenizer, asked)
    for text, answer in zip(said, answers, strict=False):
        answer = [message for message in answer if message["role"] in roles] or [
            {"role": "user", "content": "go on"}
        ]
        sampled = tokenizer(text, add_special_tokens=False)["input_ids"]
        sampled += [tokenizer.eos_token_id] * (ended or not sampled)
        before = session.tokens
        session.take(
            Completion(np.array(sampled, np.int32), np.zeros(len(sampled)), [], "stop", 0.0)
        )
        messages += [{"role": "assistant", "content": text}, *answer]
        more = talk.follow(before, sampled, Said(text), answer)
        if more is None:
            session.fork(talk.whole())
            assert session.tokens == ids_of(tokenizer, messages)
            continue
        session.feed(more)
        assert session.tokens[: len(before) + len(sampled)] == before + sampled
        plain = all(turn == turn.strip() for turn in said)
        if TEMPLATES[name].keeps and ended and plain:
            # nothing was rendered again, and yet it reads as if it had been
            assert tokenizer.decode(session.tokens) == tokenizer.decode(ids_of(tokenizer, messages))


def talk_of(tokenizer: Qwen2Tokenizer, prompt: Any, first: Any = "") -> Conversation:
    return Conversation(tokenizer, prompt, first, chat=TemplateFormat(tokenizer))


def ids_of(tokenizer: Qwen2Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    return list(
        tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )


def test_a_template_that_takes_thoughts_away_is_seen() -> None:
    """It keeps every turn as it is but the ones that have thoughts."""
    tokenizer = tokenizer_of("strips_thoughts")
    asked = [{"role": "user", "content": "question"}]
    for text, forks in (("plain", False), ("<think>hm</think>plain", True)):
        talk, end = talk_of(tokenizer, asked), tokenizer.eos_token_id
        found = talk.follow([], [end], Said(text), [{"role": "user", "content": "and?"}])
        assert (found is None) is forks
        if forks:
            assert "hm" not in tokenizer.decode(talk.whole())


def test_a_turn_that_was_cut_off_gets_its_end_as_context() -> None:
    tokenizer = tokenizer_of("chatml")
    asked = [{"role": "user", "content": "question"}]
    ids = tokenizer("cut", add_special_tokens=False)["input_ids"]
    cut = talk_of(tokenizer, asked).follow([], ids, Said("cut"), "and?")
    ended = [*ids, tokenizer.eos_token_id]
    whole = talk_of(tokenizer, asked).follow([], ended, Said("cut"), "and?")
    assert cut == [tokenizer.eos_token_id, *whole]


def test_text_is_appended_as_it_is_and_messages_do_not_follow_it() -> None:
    tokenizer = tokenizer_of("chatml")
    talk, turn = talk_of(tokenizer, "2:7>", "first "), ([], [5], Said("g7"))
    assert talk.prompt_ids == tokenizer("2:7>first ")["input_ids"]
    assert talk.follow(*turn, "4>") == tokenizer("4>")["input_ids"]
    assert talk.follow(*turn, [3, 4]) == [3, 4]
    assert talk.follow(*turn, "") == []
    with pytest.raises(ContentError, match="chat messages"):
        talk.follow(*turn, [{"role": "user", "content": "x"}])
    assert talk_of(tokenizer, "ab", [3, 4]).prompt_ids == [*tokenizer("ab")["input_ids"], 3, 4]


def test_ids_may_follow_a_turn_of_a_chat_and_not_begin_one() -> None:
    tokenizer = tokenizer_of("chatml")
    asked = [{"role": "user", "content": "question"}]
    assert talk_of(tokenizer, asked).follow([], [5], Said("a"), [3, 4]) == [3, 4]
    with pytest.raises(ContentError, match="token ids before"):
        talk_of(tokenizer, asked, [3, 4])


# ---- sets of which tokens were sampled ----


def with_sets(done: Completion) -> Completion:
    """Each token with the one that is 100 more."""
    sets = [[token, 100 + token] for token in done.token_ids.tolist()]
    return replace(done, kept=KeptSets.of(sets))


def test_sets_go_with_their_turns_through_forks_and_are_taken_out_with_them() -> None:
    session = Session([1, 2])
    session.take(with_sets(completion([(0, 2)], first=10)))
    session.feed([5, 6])
    session.take(completion([(0, 1)], first=20))  # greedy
    session.fork([3, 4])
    session.feed([7])
    session.take(with_sets(completion([(1, 1)], first=30)))
    session.take(with_sets(completion([(1, 2)], first=40)))
    session.forget(1)
    first, second = session.rows
    lengths = [[len(values) for values in row.logprobs] for row in (first, second)]
    assert lengths == [[2, 1], [1]]
    kept = joined([*first.kept, *second.kept], [2, 1, 1])
    assert kept is not None
    assert kept.counts.tolist() == [2, 2, 0, 2]
    assert kept.ids.tolist() == [10, 110, 11, 111, 30, 130]
    places = [np.repeat([0, 1] * len(row.segments), np.ravel(row.segments)) for row in session.rows]
    pairs = zip(session.rows, places, strict=True)
    kept.check(np.concatenate([row.response_ids[place == 1] for row, place in pairs]))
