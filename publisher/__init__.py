"""Engine events in, records of one worker's stream out, to a sink.

Owns the ledger of what the worker holds, the bounded queue, batching, digests, snapshots and the sinks. Imports
`kv_events` only. Start at `publisher.EventPublisher`; then `tracker` (the engine's side), `builder` (what goes out
next, no I/O) and `drain` (the tasks). An event's way: `intake` -> `ledger` -> `change_queue` -> `packing` -> `sinks`.
"""

from __future__ import annotations

from publisher.publisher import CloseReport, EventPublisher, PublisherStateError, PublisherStats
from publisher.settings import PublisherSettings
from publisher.sinks.base import OutRecord, Sink, SinkError, SinkRejectedError, SinkUnavailableError

__all__ = [
    "CloseReport",
    "EventPublisher",
    "OutRecord",
    "PublisherSettings",
    "PublisherStateError",
    "PublisherStats",
    "Sink",
    "SinkError",
    "SinkRejectedError",
    "SinkUnavailableError",
]
