"""Publishes the events of one worker's cache as records of a stream.

Owns the ledger of the pages that the worker holds, the bounded queue, batching, digests, resyncs and the sinks. Imports
`kv_events` only. Start at `publisher.EventPublisher`; then read `change_tracker` (the engine's side), `record_builder`
(the next records, without I/O) and `drain` (the tasks). The way of an event: `event_columns` -> `ledger` ->
`change_queue` -> `packing` -> `sinks`.
"""

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
