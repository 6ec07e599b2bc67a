"""The chat interface over HTTP: one server per rollout actor, one secret per episode.

Runs in: rollout actors, on their event loop. Hides starlette and uvicorn, and the limits:

    Authorization: Bearer SECRET -> the episode, else 401    (the secret dies with its episode)
    body over `endpoint.body_mb` -> 413, before it is read whole
    more than `endpoint.requests` open, or `endpoint.per_minute` in a minute -> 429
    /v1/work/... -> `work`, where episodes are played elsewhere

Invariants: nothing of a request is logged; what a client does ends at most its own request; a
request is open from its head to the end of its answer, also while its body comes; the answer to a
client that went away is kept for when it asks again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from async_grpo.agents.endpoint import dialects
from async_grpo.agents.endpoint.dialects import CHAT, Dialect
from async_grpo.agents.endpoint.messages import ChatRequest, RequestError, hasher, parse, read
from async_grpo.agents.endpoint.messages_api import MESSAGES
from async_grpo.agents.endpoint.responses_api import RESPONSES
from async_grpo.agents.endpoint.served import ServedEpisode, ServedTurn
from async_grpo.agents.endpoint.work import Work
from async_grpo.config.endpoint import EndpointConfig
from async_grpo.environments.pool import EnvironmentFailed
from async_grpo.rollout.engine.base import EngineError

START_S, STOP_S, KEEP_ALIVE_S = 10.0, 2, 60
MINUTE_S = 60.0
_T = TypeVar("_T")
_Handler = Callable[[Request], Awaitable[Response]]
_log = logging.getLogger(__name__)
_OUTSIDE = {socket.AF_INET: ("192.0.2.1", 9), socket.AF_INET6: ("2001:db8::1", 9)}
"""Addresses that are nobody's (RFC 5737, RFC 3849)."""
HEAD_S = 30.0
"""Longest time a client may take to send a body."""


@dataclass(eq=False)
class _Open:
    episode: ServedEpisode
    requests: int = 0
    """Those that are open."""
    came: deque[float] = field(default_factory=deque)
    """When its requests of the last minute came."""
    said: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Messages up to a reply, by its id, for who goes on from it by `previous_response_id`."""


class Endpoint:
    """Serves episodes. `counts`: where requests are counted by what became of them."""

    def __init__(
        self,
        settings: EndpointConfig,
        *,
        words: Callable[[Sequence[int]], str],
        counts: Counter[str],
        work: Work | None = None,
    ) -> None:
        """words: the text of token ids, special ones included. work: for episodes that are played
        elsewhere.
        """
        self._settings, self._words = settings, words
        self._work = work
        self._counts = counts
        self._open: dict[str, _Open] = {}
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.url = ""
        """Where it is reached, for `OPENAI_BASE_URL`."""

    async def start(self) -> None:
        """Begin to listen. Raises OSError, TimeoutError."""
        app = Starlette(routes=self._routes(), exception_handlers={HTTPException: self._no_route})
        host, port = self._settings.host, self._settings.port
        name = self._settings.advertise or _reached_by(host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=STOP_S,
            )
        )
        self._serving = asyncio.create_task(self._server.serve([listening]))
        async with asyncio.timeout(START_S):
            while not self._server.started and not self._serving.done():
                await asyncio.sleep(0.01)
        if self._serving.done():
            self._serving.result()
        self.url = f"http://{name}:{listening.getsockname()[1]}/v1"

    def _routes(self) -> list[Route]:
        asked = [
            Route(
                dialect.path,
                self._guarded(partial(self._answer, dialect), dialect),
                methods=["POST"],
            )
            for dialect in (CHAT, RESPONSES, MESSAGES)
        ]
        asked.append(Route("/v1/models", self._guarded(self._models), methods=["GET"]))
        if self._work is None:
            return asked
        work = {"lease": self._lease, "heartbeat": self._heartbeat, "result": self._result}
        return asked + [
            Route(f"/v1/work/{name}", self._guarded(answer), methods=["POST"])
            for name, answer in work.items()
        ]

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        said = f"there is no {request.method} {request.url.path} here"
        return self._refused(RequestError(error.status_code, said, code="not_found"))

    def _guarded(self, answer: _Handler, dialect: Dialect = CHAT) -> _Handler:
        """Answer refusals, clients that have gone, and what nobody has foreseen with 500. Only the
        error's type is logged: its text and its traceback may say what was asked.
        """

        async def guarded(request: Request) -> Response:
            try:
                return await answer(request)
            except RequestError as error:
                return self._refused(error, dialect)
            except (ClientDisconnect, asyncio.CancelledError):
                return Response(status_code=499)
            except Exception as error:  # noqa: BLE001 - counted, and told to the client
                kind = type(error).__name__
                _log.error("the endpoint answered a request with 500: %s", kind)
                return self._refused(RequestError(500, f"{kind} in the endpoint"), dialect)

        return guarded

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        self._open.clear()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    @asynccontextmanager
    async def serving(self, episode: ServedEpisode) -> AsyncIterator[str]:
        """Serve an episode inside; its secret."""
        key = secrets.token_urlsafe(24)
        self._open[key] = _Open(episode)
        try:
            yield key
        finally:
            self._open.pop(key, None)
            await episode.close()

    async def _models(self, request: Request) -> Response:
        self._admitted(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "async_grpo"}
        return _json({"object": "list", "data": [model]})

    async def _answer(self, dialect: Dialect, request: Request) -> Response:
        again = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        try:
            found = self._admitted(request)
            async with self._counted(found, request, again):
                asked, wanted = await self._wanted(dialect, request, found, again)
                reply = await self._while_connected(request, found.episode.answer(wanted))
        except (ClientDisconnect, asyncio.CancelledError):
            self._counts["requests_left"] += 1
            raise
        except (EngineError, EnvironmentFailed) as error:  # nothing of the episode is scored
            raise RequestError(503, f"the engine failed: {error}", code="engine") from error
        finally:
            if self._work is not None:
                self._work.heard(_key(request))
        done = dialects.completion(wanted, reply, str(reply.turn.number), self._words)
        whole = dialect.whole(done)
        if dialect is RESPONSES:
            found.said[whole["id"]] = [*asked["messages"], done["choices"][0]["message"]]
        self._counts["requests_answered"] += 1
        read_it = BackgroundTask(_has, reply.turn)
        if wanted.stream:  # whole by now, so that no error can come between its events
            events = b"".join(dialect.events(wanted, done))
            return Response(events, media_type="text/event-stream", background=read_it)
        return _json(whole, background=read_it)

    async def _wanted(
        self, dialect: Dialect, request: Request, found: _Open, again: bool
    ) -> tuple[dict[str, Any], ChatRequest]:
        """Read a request: as a chat request, and what it wants. Raises RequestError."""
        body = await self._body(request)
        try:
            asked = _asked(dialect, read(body), found.said)
            wanted = parse(body, sampling=self._settings.sampling, retried=again, asked=asked)
        except RecursionError as error:
            raise RequestError(400, "the request is nested too deeply") from error
        if wanted.changed:
            self._counts["requests_overridden"] += 1
        return asked, wanted

    async def _lease(self, request: Request) -> Response:
        assert self._work is not None
        if not secrets.compare_digest(_key(request).encode(), self._work.key.encode()):
            raise RequestError(401, "this is not the key of workers", code="key")
        wait_s = _seconds(await self._body(request))
        found = await self._while_connected(request, self._work.lease(wait_s))
        return Response(status_code=204) if found is None else _json(found)

    async def _heartbeat(self, request: Request) -> Response:
        assert self._work is not None
        self._work.beat(_key(request))
        return _json({})

    async def _result(self, request: Request) -> Response:
        assert self._work is not None
        self._work.beat(_key(request))  # before its body is read
        self._work.finish(_key(request), await self._body(request))
        return _json({})

    def _admitted(self, request: Request) -> _Open:
        key = _key(request)
        found = self._open.get(key)
        if found is None:
            raise RequestError(
                401, "this key belongs to no episode, or its episode has ended", code="key"
            )
        if self._work is not None:
            self._work.heard(key)
        return found

    @asynccontextmanager
    async def _counted(self, found: _Open, request: Request, again: bool) -> AsyncIterator[None]:
        """Hold one of the places of an episode inside. Raises RequestError where there is none, and
        the episode knows then which body was refused, of which nothing else is kept.
        """
        try:
            self._limit(found)
        except RequestError:
            digest = hasher()
            async for part in self._parts(request):
                digest.update(part)
            found.episode.note_refused(digest.digest(), retried=again)
            raise
        found.requests += 1
        try:
            yield
        finally:
            found.requests -= 1

    def _limit(self, found: _Open) -> None:
        now, settings = time.monotonic(), self._settings
        while found.came and now - found.came[0] > MINUTE_S:
            found.came.popleft()
        if found.requests >= settings.requests:
            raise RequestError(
                429, f"{settings.requests} requests of this episode are open", code="rate_limit"
            )
        if len(found.came) >= settings.per_minute:
            raise RequestError(
                429,
                f"this episode had {settings.per_minute} requests in a minute",
                code="rate_limit",
            )
        found.came.append(now)

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for part in self._parts(request):
            body += part
        return bytes(body)

    async def _parts(self, request: Request) -> AsyncIterator[bytes]:
        """Read a body part by part. Raises RequestError where it is too large, or too slow."""
        most, size = round(self._settings.body_mb * 2**20), 0
        try:
            async with asyncio.timeout(HEAD_S):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise RequestError(
                            413,
                            f"the request is larger than endpoint.body_mb = "
                            f"{self._settings.body_mb:g}",
                            code="too_large",
                        )
                    yield part
        except TimeoutError as error:
            raise RequestError(408, f"no body within {HEAD_S:g} s", code="timeout") from error

    async def _while_connected(self, request: Request, answer: Coroutine[Any, Any, _T]) -> _T:
        """Await an answer; raise ClientDisconnect where its client has gone."""
        work = asyncio.ensure_future(answer)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            return work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    def _refused(self, error: RequestError, dialect: Dialect = CHAT) -> Response:
        self._counts[f"requests_{error.status}"] += 1
        return _json(dialect.failure(error), status=error.status)


def _asked(
    dialect: Dialect, found: dict[str, Any], said: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Write a body over into a chat request. Raises RequestError."""
    previous = found.get("previous_response_id")
    if previous is None:
        return dialect.asked(found, [])
    if not isinstance(previous, str) or previous not in said:
        raise RequestError(400, "`previous_response_id` is no reply of this episode")
    return dialect.asked(found, said[previous])


async def _has(turn: ServedTurn) -> None:
    turn.read = True  # at once: a plain function would wait for a thread, and its client has it


def _json(
    value: dict[str, Any], *, status: int = 200, background: BackgroundTask | None = None
) -> Response:
    # in ASCII: half a surrogate pair, which the policy may say, has no other form
    body = json.dumps(value).encode()
    return Response(body, status, media_type="application/json", background=background)


def _key(request: Request) -> str:
    """Return the secret of a request; "" where there is none."""
    if "x-api-key" in request.headers:  # as Anthropic's clients send it
        return request.headers["x-api-key"]
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _seconds(body: bytes) -> float:
    """Read how long a worker waits for work. Raises RequestError."""
    try:
        found = json.loads(body or b"{}")
        wait_s = float(found.get("wait_s", 0.0))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError(400, 'say {"wait_s": seconds}', code="lease") from error
    if not 0 <= wait_s < math.inf:
        raise RequestError(400, "wait_s must be a number of seconds from 0 on", code="lease")
    return wait_s


def _reached_by(host: str) -> str:
    """Return what others call this interface in an address; of all interfaces, the one that leads
    out.
    """
    if host in ("0.0.0.0", "::"):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(_OUTSIDE[family])  # nothing is sent
            host = probe.getsockname()[0]
    return f"[{host}]" if ":" in host else host


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Server(uvicorn.Server):
    """A server that leaves the signals of this process alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
