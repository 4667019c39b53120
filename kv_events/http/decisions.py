"""Answer of POST /decisions."""

from __future__ import annotations

import msgspec


class DecisionsAccepted(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the decisions and outcomes of a request."""

    accepted: int
    """Records that were queued to be written."""
    dropped: int
    """Records that were dropped, because the queue is full or the service keeps no log."""
