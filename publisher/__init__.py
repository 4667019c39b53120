"""Publishes the events of one worker's cache as records of a stream.

Owns the ledger of the pages that the worker holds, the bounded queue, batching, digests, resyncs and the sinks. Imports
`kv_events` only. Start at `publisher.EventPublisher`; then read `change_tracker` (the engine's side), `record_builder`
(the next records, without I/O) and `drain` (the tasks). The way of an event: `event_columns` -> `ledger` ->
`change_queue` -> `packing` -> `sinks`.
"""

from publisher.publisher import CloseReport as CloseReport
from publisher.publisher import EventPublisher as EventPublisher
from publisher.publisher import PublisherStateError as PublisherStateError
from publisher.publisher import PublisherStats as PublisherStats
from publisher.settings import PublisherSettings as PublisherSettings
from publisher.sinks.base import OutRecord as OutRecord
from publisher.sinks.base import Sink as Sink
from publisher.sinks.base import SinkError as SinkError
from publisher.sinks.base import SinkRejectedError as SinkRejectedError
from publisher.sinks.base import SinkUnavailableError as SinkUnavailableError
