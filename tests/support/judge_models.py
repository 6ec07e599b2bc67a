"""Models for judges: tiny and random ones, and an OpenAI-compatible server with given answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from tests.support.models import write_model

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def write_judge(path: Path, *, positions: int = 2048) -> str:
    """A random causal LM with a chat template."""
    model = write_model(path, positions=positions, seed=2)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    return model


def write_reward_model(path: Path, *, labels: int = 1) -> str:
    """A random sequence classifier with scores of some size."""
    base = write_model(path / "base")
    config = Qwen2Config.from_pretrained(base, num_labels=labels, pad_token_id=0)
    torch.manual_seed(3)
    model = Qwen2ForSequenceClassification(config)
    with torch.no_grad():
        model.score.weight.normal_(0, 1)
    model.save_pretrained(path / "reward")
    AutoTokenizer.from_pretrained(base).save_pretrained(path / "reward")
    return str(path / "reward")


Reply = tuple[int, str, bytes]
"""Status, content type and body."""


def completion(content: str) -> Reply:
    """What an address says where all is well."""
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    body = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    return 200, "application/json", json.dumps(body).encode()


@contextmanager
def judge_server(reply: Callable[[dict[str, Any]], Reply]) -> Iterator[tuple[str, list[Any]]]:
    """Serve `reply(request)` to every request; its address, and (authorization, request) of all."""
    seen: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.headers.get("Authorization"), asked))
            status, kind, body = reply(asked)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
