"""The webhook: what arrives there, and that nobody waits for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.errors import SetupError
from async_grpo.run.callbacks import webhook
from async_grpo.run.callbacks.base import Callbacks
from async_grpo.run.callbacks.registry import make_callbacks

SECRET = "services/T0/B0/very-secret"
SOON_S = 2.0
"""Far more than a call takes that waits for nobody, far less than a post's deadline."""


class Hook:
    """Keeps what is posted; fails as often as `fails` says, or hangs."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.fails, self.hangs = 0, False
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if outer.hangs:
                    outer.released.wait()
                    return
                outer.heard.append(json.loads(body))
                outer.fails -= 1
                self.send_response(500 if outer.fails >= 0 else 200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/{SECRET}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    made = Hook()
    monkeypatch.setenv("HOOK_URL", made.url)
    monkeypatch.setattr(webhook, "RETRY_S", 0.01)
    yield made
    made.released.set()
    made.server.shutdown()
    made.server.server_close()


class Run:
    """A trainer as far as callbacks are told of it."""

    def __init__(self, **arguments: Any) -> None:
        self.config = SimpleNamespace(run=SimpleNamespace(name="adder"))
        self.steps_done, self.ending = 3, (14, "a learner step takes longer than 60 s")
        self.lines: list[str] = []
        self.console = SimpleNamespace(error=self.lines.append)
        given = arguments or {"url_env": "HOOK_URL"}
        self._callbacks = Callbacks(make_callbacks({"webhook": given}))

    def tell(self, event: str, *details: Any) -> float:
        """Tell the callbacks, and say how long that took."""
        begun = time.monotonic()
        self._callbacks.tell(event, *details)
        self._callbacks.deliver(self)
        return time.monotonic() - begun


def test_events_arrive_in_order_and_the_end_says_why(hook: Hook) -> None:
    run = Run()
    run.tell("on_start")
    run.tell("on_step", {"training_iteration": 1})
    run.tell("on_fault", "rollout actor 0 died")
    run.tell("on_restore", 2)
    run.tell("on_reward_alarm", "step 3: all the same")
    run.tell("on_end", "FAILED")
    assert [one["text"] for one in hook.heard] == [
        "adder: start",
        "adder: fault: rollout actor 0 died",
        "adder: alarm: step 3: all the same",
        "adder: end: FAILED: a learner step takes longer than 60 s",
    ]
    assert hook.heard[1] | {"text": ""} == {"text": "", "run": "adder", "event": "fault", "step": 3}
    assert hook.heard[-1]["status"] == "FAILED" and run.lines == []


def test_an_end_without_a_reason_has_none(hook: Hook) -> None:
    run = Run()
    run.ending = (0, "")
    run.tell("on_end", "FINISHED")
    assert [one["text"] for one in hook.heard] == ["adder: end: FINISHED"]


def test_events_that_are_asked_for_are_told(hook: Hook) -> None:
    run = Run(url_env="HOOK_URL", events=["restore", "evaluation"])
    run.tell("on_start")
    run.tell("on_restore", 0)
    run.tell("on_evaluation", 3, {"eval/accuracy": 0.5})
    run.tell("on_end", "FINISHED")
    assert [one["text"] for one in hook.heard] == [
        "adder: restore: 0",
        "adder: evaluation: 3: {'eval/accuracy': 0.5}",
    ]


def test_an_address_that_hangs_delays_nothing(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "END_S", 0.2)
    hook.hangs = True
    run = Run()
    spent = [run.tell("on_fault", str(number)) for number in range(2 * webhook.MOST_WAITING)]
    assert sum(spent) < SOON_S
    assert 0.2 <= run.tell("on_end", "FINISHED") < SOON_S
    assert hook.heard == []


def test_a_failure_is_tried_once_more(hook: Hook) -> None:
    hook.fails = 1
    run = Run()
    run.tell("on_start")
    run.tell("on_end", "FINISHED")
    assert [one["event"] for one in hook.heard] == ["start", "start", "end"]
    assert run.lines == []


def test_failures_are_told_once_without_the_address(hook: Hook) -> None:
    hook.fails = 100
    run = Run()
    run.tell("on_start")
    run.tell("on_fault", f"no answer from {hook.url}")
    run.tell("on_end", "FINISHED")
    assert len(hook.heard) == 6, "each is tried twice"
    [line] = run.lines
    assert line.startswith("the webhook does not take events (HTTP Error 500")
    assert SECRET not in line and SECRET not in str(hook.heard)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url_env": "HOOK_URL", "events": ["stat"]}, "no event stat, only start, fault"),
        ({"url_env": "FTP_URL"}, "url_env is to be the variable"),
        ({"url_env": "NOT_THERE"}, "url_env is NOT_THERE, which is not set"),
    ],
)
def test_what_cannot_work_is_refused(
    hook: Hook, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv("FTP_URL", f"ftp://a/{SECRET}")
    with pytest.raises(SetupError, match=said) as caught:
        make_callbacks({"webhook": given})
    assert SECRET not in str(caught.value)
