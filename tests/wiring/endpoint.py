"""Settings of the endpoint: where it listens, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import httpx

from async_grpo.agents.endpoint.server import Endpoint
from async_grpo.config.schema import Config
from tests.support.processes import free_port
from tests.support.scripted_policy import Letters
from tests.support.served_episodes import Policy, served
from tests.support.wiring import Wire

PORT = free_port()
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a?"}]}


def listening(config: Config) -> tuple[str, bool, list[int]]:
    """Return the host, whether it is that port, and the answers to requests of all kinds."""
    return asyncio.run(asyncio.wait_for(_listening(config), 30))


async def _listening(config: Config) -> tuple[str, bool, list[int]]:
    endpoint = Endpoint(config.endpoint, words=Letters().decode, counts=Counter())
    await endpoint.start()
    url = httpx.URL(endpoint.url)
    policy = Policy()
    try:
        async with endpoint.serving(served(policy)) as key, httpx.AsyncClient() as client:
            # a name of `advertise` need not lead here
            at = f"http://{config.endpoint.host}:{url.port}/v1/chat/completions"

            async def post(**more: Any) -> int:
                head = {"Authorization": f"Bearer {key}"}
                body = json.dumps(ASK | more)
                return (await client.post(at, content=body, headers=head, timeout=20)).status_code

            codes = [await post(temperature=0.5), await post(user="x" * 2_000)]
            policy.hold.clear()
            held = [asyncio.ensure_future(post(user=str(number))) for number in range(2)]
            await asyncio.sleep(0.1)
            policy.hold.set()
            codes += sorted(await asyncio.gather(*held))
    finally:
        await endpoint.close()
    return url.host, url.port == PORT, codes


WIRES = [
    Wire("endpoint.host", "127.0.0.2", listening),
    Wire("endpoint.port", PORT, listening),
    Wire("endpoint.advertise", "elsewhere", listening),
    Wire("endpoint.sampling", "refuse", listening),
    Wire("endpoint.requests", 1, listening),
    Wire("endpoint.per_minute", 3, listening),
    Wire("endpoint.body_mb", 0.001, listening),
]
