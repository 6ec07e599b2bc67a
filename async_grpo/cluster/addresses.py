"""Frozen models behind OpenAI-compatible addresses.

    rollout actor: Address.answer --few at once, repeated--> POST chat/completions

Runs in: rollout actors; made in the driver, which reads the key. Hides the client (`openai`), which
repeats what may pass (429, 5xx, no connection, no answer), after a while that it chooses.
Invariant: the key stands in no message, file or settings.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import Any

from async_grpo.config.frozen import FrozenModel
from async_grpo.config.schema import Config
from async_grpo.rollout.frozen import FrozenFailed, Question, TextRefused
from async_grpo.runtime.text import shortened
from async_grpo.runtime.variables import hide, keep_secret, variables

_LONGEST = 300
_OF_THE_TEXT = (400, 413, 422)
"""Statuses of a request that is too long, or that a filter refuses: another text may pass."""


def addresses(config: Config) -> dict[str, Address]:
    """Return the frozen models that are behind addresses, by name. Raises SetupError for a key that
    is not in the environment.
    """
    found = {}
    for name, model in config.frozen.items():
        if model.url is not None:
            named = [] if model.api_key_env is None else [model.api_key_env]
            keys = variables(named, f"frozen.{name}.api_key_env")
            found[name] = Address(name, model, "".join(keys.values()))
    return found


class Address:
    """A model for a rollout actor that answers: see `Answerer`."""

    def __init__(self, name: str, model: FrozenModel, key: str) -> None:
        self._name, self._model = name, model
        self._key = key

    async def answer(self, question: Question) -> str:
        """See `Answerer.answer`."""
        from openai import OpenAIError

        seconds = self._model.timeout_s
        async with self._places:
            try:
                async with asyncio.timeout(seconds):  # a client's own ends with every byte
                    return await self._asked(question)
            # the client's; or the answer is a page, or JSON of another kind
            except (OpenAIError, AttributeError, LookupError, TypeError, ValueError) as error:
                said = hide(f"{type(error).__name__}: {error}")
                short = f"{self._name}: {shortened(' '.join(said.split()), _LONGEST)}"
                if getattr(error, "status_code", 0) in _OF_THE_TEXT:
                    raise TextRefused(short) from None
                raise FrozenFailed(short) from None
            except TimeoutError:
                name = f"frozen.{self._name}.timeout_s"
                raise FrozenFailed(
                    f"{self._name}: no answer within {name} = {seconds:g} s"
                ) from None

    async def _asked(self, question: Question) -> str:
        form = {"name": "verdict", "schema": question.schema, "strict": True}
        done = await self._client.chat.completions.create(
            model=self._model.served_name,
            messages=question.messages,
            temperature=0.0,
            max_tokens=question.max_tokens,
            response_format={"type": "json_schema", "json_schema": form},
        )
        return str(done.choices[0].message.content or "")

    @cached_property
    def _places(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self._model.max_concurrency)

    @cached_property
    def _client(self) -> Any:
        from openai import AsyncOpenAI  # a second, and only where it is used

        keep_secret([self._key])
        return AsyncOpenAI(
            base_url=self._model.url,
            api_key=self._key or "none",
            timeout=self._model.timeout_s,
            max_retries=self._model.retries,
        )
