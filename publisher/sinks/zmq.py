"""The ZMQ sink, for readers of the engines' own protocol such as the indexers of NVIDIA Dynamo and llm-d.

The protocol has no acknowledgements and no control channel. A reader that is absent or slow misses batches and can have
them replayed as long as they are kept.
"""

import logging
from collections.abc import AsyncIterator, Sequence

from kv_events.engine_wire import LOCAL_SCHEMES, endpoint_of_rank, has_wildcard
from kv_events.errors import InvalidValueError, RecordRejectedError, check_type
from kv_events.runtime.outages import Outage
from kv_events.schema import ResyncRequest
from publisher.settings import PublisherSettings
from publisher.sinks.base import OutRecord, SinkRejectedError, no_requests
from publisher.sinks.engine_events import EngineEvents
from publisher.sinks.zmq_socket import EventSocket, KeptBatches, ReplaySocket

logger = logging.getLogger(__name__)

_MAX_KEPT = 10_000
"""Batches kept for replay."""


class ZmqSink:
    """Publishes one stream as topic, sequence number and batch. The numbers start at 0 for each object.

    Needs `with_tokens`, because readers hash the tokens. Like engines, it binds an address with a wildcard host or an
    `ipc` or `inproc` address, and connects to any other address, which the reader must have bound.
    """

    def __init__(self, settings: PublisherSettings) -> None:
        """Raises InvalidValueError."""
        check_type("settings", settings, PublisherSettings)
        if settings.zmq is None:
            raise InvalidValueError("KVSIGHT_ZMQ", None, "an address to publish on, as tcp://*:5557")
        if not settings.with_tokens:
            raise InvalidValueError("KVSIGHT_WITH_TOKENS", False, "true: readers of KVSIGHT_ZMQ hash tokens")
        self.outage = Outage(logger, f"{settings.zmq} takes no records", f"{settings.zmq} takes records")
        self._key = settings.stream.key.encode()
        endpoint, topic = endpoint_of_rank(settings.zmq, settings.dp_rank, "KVSIGHT_ZMQ"), settings.zmq_topic
        kept, replay = KeptBatches(_MAX_KEPT), None
        if settings.zmq_replay is not None:
            replay_endpoint = endpoint_of_rank(settings.zmq_replay, settings.dp_rank, "KVSIGHT_ZMQ_REPLAY")
            replay = ReplaySocket(replay_endpoint, kept, topic, settings.zmq_replay_layout, settings.batch_bytes)
        binds = has_wildcard(endpoint) or endpoint.startswith(LOCAL_SCHEMES)
        self._socket = EventSocket(endpoint, topic, kept, replay, binds=binds)
        self._events = EngineEvents(settings.zmq_encoding)
        self._omitted_logged = 0

    async def start(self) -> None:
        await self._socket.start()

    async def send(self, records: Sequence[OutRecord]) -> None:
        """Send without waiting. A batch is sent when it is kept for replay and passed to ZMQ. Skips heartbeats."""
        self._socket.check_open()
        for record in records:
            if record.key != self._key:
                raise SinkRejectedError(f"record of {record.key!r}; this socket publishes {self._key!r}")
            try:
                payload = self._events.encode(record.payload)
            except RecordRejectedError as error:
                raise SinkRejectedError(f"not a kvsight record: {error}") from error
            if payload is not None:
                self._socket.send(payload)
        self._log_omitted()

    async def stop(self) -> None:
        await self._socket.stop()

    def requests(self) -> AsyncIterator[ResyncRequest | None]:
        return no_requests()

    def _log_omitted(self) -> None:
        """Log a warning whenever the number of omitted pages has doubled."""
        if self._events.num_omitted > 2 * self._omitted_logged:
            self._omitted_logged = self._events.num_omitted
            logger.warning(
                "%s: %d pages so far could not be sent to readers", self._socket.endpoint, self._omitted_logged
            )
