"""Tells a webhook the events of a run: Slack, Mattermost, Discord (with `/slack` behind its
address), or whatever reads JSON.

Runs in: the driver, and a thread that posts. Invariants: only the end waits for the address, a few
seconds; failures are told once, and the address, which is a secret, never.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from http.client import HTTPException
from queue import SimpleQueue
from typing import Any
from urllib.request import Request, urlopen

from async_grpo.run.callbacks.base import Callback
from async_grpo.runtime.text import one_line
from async_grpo.runtime.variables import hide, keep_secret, variables

EVENTS = ("start", "fault", "alarm", "restore", "evaluation", "end")
MOST_WAITING, POST_S, RETRY_S, END_S = 100, 10.0, 0.5, 5.0


def _tells(event: str) -> Callable[..., None]:
    return lambda self, trainer, *details: self._tell(trainer, event, *details)


class Webhook(Callback):
    """Posts `events` as JSON: text, run, event, step, and at the end the status."""

    on_start, on_fault, on_reward_alarm = _tells("start"), _tells("fault"), _tells("alarm")
    on_restore, on_evaluation = _tells("restore"), _tells("evaluation")

    def __init__(
        self, url_env: str, events: Sequence[str] = ("start", "fault", "alarm", "end")
    ) -> None:
        """Take the address, which no file may have, from the variable `url_env`. Raises ValueError
        or SetupError.
        """
        for one in set(events) - set(EVENTS):
            raise ValueError(f"there is no event {one}, only {', '.join(EVENTS)}")
        url = variables([url_env], "run.callbacks.webhook.url_env")[url_env]
        if not url.startswith(("http://", "https://")):
            raise ValueError("url_env is to be the variable that has the address, http(s)://...")
        keep_secret([url])
        self._url, self._events = url, events
        self._queue = SimpleQueue[tuple[bytes, Callable[[str], None]] | None]()
        self._thread: threading.Thread | None = None

    def on_end(self, trainer: Any, status: str) -> None:
        """Tell it, with the reason of a failure, and give what waits a few seconds."""
        self._tell(trainer, "end", status, *(trainer.ending or ())[1:], status=status)
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(END_S)

    def _tell(self, trainer: Any, event: str, *details: Any, **more: str) -> None:
        if event not in self._events or self._queue.qsize() >= MOST_WAITING:
            return
        run, step = trainer.config.run.name, trainer.steps_done
        text = hide(": ".join(filter(None, map(str, (run, event, *details)))))
        message = {"text": text, "run": run, "event": event, "step": step} | more
        self._queue.put((json.dumps(message).encode(), trainer.console.error))
        if self._thread is None:
            name = "async_grpo-webhook"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        failed = False
        while (item := self._queue.get()) is not None:
            if self._post(item[0]):
                time.sleep(RETRY_S)
                if (failure := self._post(item[0])) and not failed:
                    item[1](f"the webhook does not take events ({failure}); the run goes on")
                    failed = True

    def _post(self, body: bytes) -> str:
        """Return what went wrong."""
        try:
            request = Request(self._url, body, {"Content-Type": "application/json"})
            urlopen(request, timeout=POST_S).close()
        except (OSError, HTTPException, ValueError) as error:
            return hide(one_line(error))
        return ""
