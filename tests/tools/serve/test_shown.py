"""What is shown of an episode: its rows, tokens and mask, and what became of it."""

from __future__ import annotations

import asyncio
import json

from async_grpo.agents.endpoint.messages import parse
from async_grpo.agents.endpoint.served import ServedEpisode
from async_grpo.environments.pool import EnvironmentFailed
from async_grpo.tools.serve.shown import Shown
from tests.support.served_episodes import Policy, served


def text(ids: list[int]) -> str:
    return bytes(ids).decode()


def talked() -> ServedEpisode:
    """Two turns in a row, an edited history, and a turn that nobody reads."""
    episode = served(Policy("one", "two", "three", "four"))

    async def scenario() -> None:
        async def say(*messages: tuple[str, str], reads: bool = True) -> None:
            said = [{"role": role, "content": content} for role, content in messages]
            body = json.dumps({"model": "policy", "messages": said}).encode()
            request = parse(body, sampling="ignore", retried=False)
            reply = await episode.answer(request)
            if reads:
                reply.turn.read = True

        await say(("user", "a?"))
        await say(("user", "a?"), ("assistant", "one"), ("user", "b?"))
        await say(("user", "a?"), ("assistant", "won"), ("user", "c?"))
        await say(("user", "d?"), reads=False)
        await episode.close()

    asyncio.run(scenario())
    return episode


def test_rows_are_shown_with_their_tokens_and_their_mask() -> None:
    episode = talked()
    episode.episode.finish_reason, episode.episode.verdict = "env_done", 1.0
    lines = "\n".join(Shown(3, episode, 1.25).lines(text))
    assert "episode 3: env_done, rewards correct 0, correct: 1.0, 1.2 s" in lines
    assert "3 turns in 2 sequences, 14 sampled tokens" in lines
    assert "1 turn more that nobody read: not trained" in lines
    first, second = lines.split("  sequence 1, anew: edited")
    assert [line.split()[0] for line in first.splitlines()[4:] if line] == [
        "prompt",
        "sampled",
        "context",
        "sampled",
    ]
    assert "mask 1  'one\\x01'" in first and "mask 0  'b?'" in first
    assert "mask 1  'three\\x01'" in second and "'four" not in lines


def test_the_record_has_all_of_it() -> None:
    record = json.loads(json.dumps(Shown(1, talked(), 1.0).record(text)))
    assert (record["failed"], record["unread_turns"], len(record["sequences"])) == (None, 1, 2)
    for row in record["sequences"]:
        assert len(row["mask"]) == len(row["response_ids"])
        assert sum(row["mask"]) == len(row["logprobs"]) == row["versions"][-1][-1]
    first, second = record["sequences"]
    assert (first["begun"], second["begun"]) == ("", "edited")
    assert first["text"] == "a?one\x01b?two\x01"
    sampled = [one for one, mask in zip(first["response_ids"], first["mask"], strict=True) if mask]
    assert text(sampled) == "one\x01two\x01"


def test_a_failure_is_shown_with_its_reason_and_what_was_said_before() -> None:
    failed = EnvironmentFailed("exception", "exit status 3: Boom")
    shown = Shown(2, talked(), 0.5, failed)
    lines = list(shown.lines(text))
    assert lines[0] == "episode 2: failed after 0.5 s, exception: exit status 3: Boom"
    assert any("'one\\x01'" in line for line in lines)
    assert shown.record(text)["failed"] == {
        "reason": "exception",
        "detail": "exception: exit status 3: Boom",
    }


def test_an_episode_in_which_nobody_asked_has_no_rows() -> None:
    shown = Shown(1, served(Policy()), 0.1)
    assert "0 turns in 0 sequences" in "\n".join(shown.lines(text))
    assert shown.record(text)["sequences"] == []


def test_rows_are_shown_with_their_label_and_the_row_that_they_come_from() -> None:
    episode = served(Policy("one", "two", "three", "four"))

    async def scenario() -> None:
        async def say(label: str, *said: str) -> None:
            roles = ("user", "assistant")
            messages = [
                {"role": roles[at % 2], "content": content} for at, content in enumerate(said)
            ]
            body = json.dumps({"model": label, "messages": messages}).encode()
            reply = await episode.answer(parse(body, sampling="ignore"))
            reply.turn.read = True

        await say("solver", "a?")
        await say("judge", "b?")
        await say("judge", "b?", "two", "c?")
        await say("judge", "b?", "two", "d?")
        await episode.close()

    asyncio.run(scenario())
    shown = Shown(1, episode, 1.0)
    assert [line for line in shown.lines(text) if line.startswith("  sequence")] == [
        "  sequence 0, of 'solver'",
        "  sequence 1, of 'judge'",
        "  sequence 2, anew: branch after sequence 1, of 'judge'",
    ]
    rows = shown.record(text)["sequences"]
    assert [(row["label"], row["after_sequence"]) for row in rows] == [
        ("solver", None),
        ("judge", None),
        ("judge", 1),
    ]
