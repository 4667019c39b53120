"""The server-sent events of GET /events, one struct for each kind."""

from typing import TypeAlias

import msgspec

PING_S = 5.0
"""The server sends a comment after this many seconds without an event, so a connection that stays silent is dead."""


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The worker stream that an event is about."""

    stream: str
    """The stream's key in the log: tenant/model/worker/rank."""
    model_name: str
    routing_group: str
    instance_id: str
    dp_rank: int


class BatchApplied(StreamEvent, frozen=True, kw_only=True):
    """`event: batch`: one batch of a worker stream was applied. A heartbeat stores and removes nothing."""

    epoch: int
    seq: int
    stored: dict[str, int]
    """Medium -> pages stored by the batch, including those already held."""
    removed: dict[str, int]
    """Medium -> pages removed by the batch, including unknown ones."""
    cleared: bool
    """Whether the view was cleared: by an event of the batch, or because a new incarnation of the publisher began."""
    pages: dict[str, int]
    """Medium -> pages held after the batch."""
    state: str


class StateChanged(StreamEvent, frozen=True, kw_only=True):
    """`event: state`: the state of a view changed. A new listener first gets one of these for each view."""

    before: str | None
    """None: this listener did not know the view yet."""
    state: str
    """`live`, `syncing`, `stale` or `expired`; `forgotten`: the view no longer exists."""
    reason: str
    """Why the view is stale; empty otherwise."""


class ClientDropped(msgspec.Struct, frozen=True, kw_only=True):
    """`event: dropped`: the listener read too slowly. This is the last event of its connection."""

    lost: int
    """Events that were discarded."""


FeedEvent: TypeAlias = BatchApplied | StateChanged | ClientDropped

EVENT_NAMES: dict[type[FeedEvent], bytes] = {BatchApplied: b"batch", StateChanged: b"state", ClientDropped: b"dropped"}
