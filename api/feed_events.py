"""What GET /events says: one struct for each kind of server-sent event."""

from __future__ import annotations

from typing import Any, Self, TypeAlias

import msgspec

from kv_events.streams import StreamId

PING_S = 5.0
"""A comment is sent after so long without an event, so that a silent connection is a dead one."""


class _OfStream(msgspec.Struct, frozen=True, kw_only=True):
    """Whose view it is about."""

    stream: str
    """Key of the stream on the log: tenant/model/worker/rank."""
    model_name: str
    routing_group: str
    instance_id: str
    dp_rank: int

    @classmethod
    def of(cls, stream: StreamId, **fields: Any) -> Self:
        """An event about a stream."""
        return cls(
            stream=stream.key,
            model_name=stream.model,
            routing_group=stream.tenant,
            instance_id=stream.worker,
            dp_rank=stream.dp_rank,
            **fields,
        )


class BatchApplied(_OfStream, frozen=True, kw_only=True):
    """`event: batch`: one batch of a worker stream was applied; a heartbeat stores and removes nothing."""

    epoch: int
    seq: int
    stored: dict[str, int]
    """Medium -> pages that the batch stores, known ones among them."""
    removed: dict[str, int]
    """Medium -> pages that the batch removes, unknown ones among them."""
    cleared: bool
    """Whether what was held before is gone: by an event, or because an incarnation begins."""
    pages: dict[str, int]
    """Medium -> pages held after it."""
    state: str


class StateChanged(_OfStream, frozen=True, kw_only=True):
    """`event: state`: a view's state is another one. Who begins to listen first gets one for each view."""

    before: str | None
    """None: not known to this client yet."""
    state: str
    """`live`, `syncing`, `stale` or `expired`; `forgotten`: the view is gone."""
    reason: str
    """Why it is stale; "" otherwise."""


class ClientDropped(msgspec.Struct, frozen=True, kw_only=True):
    """`event: dropped`: the client read too slowly. The last event of its connection."""

    lost: int
    """Events that were thrown away."""


FeedEvent: TypeAlias = BatchApplied | StateChanged | ClientDropped

EVENT_NAMES: dict[type[FeedEvent], bytes] = {BatchApplied: b"batch", StateChanged: b"state", ClientDropped: b"dropped"}
