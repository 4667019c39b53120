"""What a router reports with `Client.decided`: what it chose for a request, and what the engine really reused."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_events.errors import check_type
from kvsight.choice import WorkerChoice
from kvsight.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Decision:
    """What a router chose for one request."""

    request_id: str
    """Any id of at most 256 bytes that no other request has. The outcome has the same."""
    prompt: Prompt
    """The prompt with its model, tenant, adapter and salt, as in the query. The service keeps its hashes, no tokens."""
    worker: str
    """The worker that was chosen."""
    dp_rank: int | None = None
    predicted_tokens: int | None = None
    """Tokens that the worker held according to the answer. None: the router did not ask, or got no answer."""
    candidates: Sequence[WorkerChoice] = ()
    """All workers among which the router chose, such as the result of `rank_workers`. At most 1024."""
    timestamp: float = field(default_factory=time.time)
    """Time of the choice, in seconds since 1970."""

    def body(self) -> dict[str, object]:
        """The fields of the request. Raises InvalidValueError."""
        check_type("prompt", self.prompt, Prompt)
        return {
            **self.prompt.body(),
            "request_id": self.request_id,
            "worker": self.worker,
            "dp_rank": self.dp_rank,
            "predicted_tokens": self.predicted_tokens,
            "candidates": [choice._asdict() for choice in self.candidates],
            "timestamp": self.timestamp,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the engine reused for a request."""

    request_id: str
    cached_tokens: int
    """`usage.prompt_tokens_details.cached_tokens` of the engine's answer."""
    timestamp: float = field(default_factory=time.time)
    """Time of the answer's first token, in seconds since 1970."""

    def body(self) -> dict[str, object]:
        """The fields of the request."""
        return {"request_id": self.request_id, "cached_tokens": self.cached_tokens, "timestamp": self.timestamp}
