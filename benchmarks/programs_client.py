"""The client of `benchmarks.programs`: asks many episodes at the same time, over HTTP.

Runs in: a process of its own. A line of standard input says whom to ask; a line of standard output
says what came of it. It speaks HTTP by hand, since a client library would take more of the cores
that the engine needs than the endpoint does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 300.0


async def ask(asked: dict[str, Any]) -> dict[str, Any]:
    """Ask all at once; how many were answered, seconds, and CPU seconds of this process."""
    at = urlsplit(asked["url"])

    async def one(key: str, text: str) -> bool:
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]})
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        writer.write(
            f"POST {at.path}/chat/completions HTTP/1.1\r\nHost: {at.netloc}\r\n"
            f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n"
            f"Connection: close\r\n\r\n{body}".encode()
        )
        answer = await reader.read()
        writer.close()
        return answer.startswith(b"HTTP/1.1 200")

    began, cpu = time.perf_counter(), time.process_time()
    async with asyncio.timeout(TIMEOUT_S):
        answered = await asyncio.gather(
            *[
                one(key, text)
                for key, texts in zip(asked["keys"], asked["texts"], strict=True)
                for text in texts
            ]
        )
    return {
        "answered": sum(answered),
        "seconds": time.perf_counter() - began,
        "cpu": time.process_time() - cpu,
    }


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asyncio.run(ask(json.loads(line)))), flush=True)
