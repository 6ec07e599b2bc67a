"""Settings of the chat interface through which programs play episodes.

Runs in: any process. Hides nothing; `schema` puts the section into a `Config`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from async_grpo.config.section import FREE, Positive, Section, warn


class EndpointConfig(Section):
    """Serve the policy as an OpenAI-compatible endpoint; of tasks that are programs alone."""

    on_resume = FREE
    host: str = "127.0.0.1"
    """Interface that each rollout actor listens on. Anything but loopback lets others reach it, who
    need an episode's key (docs/explanation/security.md).
    """
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of each rollout actor; 0 takes a free one, as several actors on a machine need it."""
    advertise: str | None = None
    """Name under which programs reach a rollout actor, if not by `host`: in containers, say."""
    sampling: Annotated[
        Literal["ignore", "refuse"], warn("what a client may set that the run decides")
    ] = "ignore"
    """What happens to a client's `temperature`, `top_p`, penalties, `seed` and the like: the run's
    own count instead, or the request is refused.
    """
    requests: Positive = 64
    """Most requests of one episode that are open at the same time."""
    per_minute: Positive = 6_000
    """Most requests of one episode in a minute."""
    body_mb: Annotated[float, Field(gt=0)] = 8.0
    """Largest request in MiB."""
