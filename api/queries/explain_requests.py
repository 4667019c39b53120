"""The request of POST /explain, as a msgspec struct. Unknown fields are ignored."""

from __future__ import annotations

import msgspec


class ExplainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a request has besides the fields of a query, in either dialect."""

    worker: str | None = None
    """The only worker to explain. Default: `instance_id` in the RFC's dialect, otherwise all workers."""
    at: float | None = None
    """The moment in seconds since 1970. Default: the end of the log."""
