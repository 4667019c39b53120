"""The ZMQ sink, for readers of the engines' own protocol such as the indexers of NVIDIA Dynamo and llm-d.

The protocol has no acknowledgements and no control channel. A reader that is absent or slow misses batches and can have
them replayed as long as they are kept.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import zmq

from kv_events.engine_wire import LOCAL_SCHEMES, endpoint_of_rank, has_wildcard, is_ipv6, seq_frame
from kv_events.errors import InvalidValueError, RecordRejectedError, check_type
from kv_events.runtime.outages import Outage
from kv_events.schema import ResyncRequest
from publisher.settings import PublisherSettings
from publisher.sinks.base import OutRecord, SinkRejectedError, SinkUnavailableError, no_requests
from publisher.sinks.engine_events import EngineEvents
from publisher.sinks.zmq_replay import KeptBatches, ReplaySocket

logger = logging.getLogger(__name__)

_LINGER_MS = 500
_MAX_KEPT = 10_000
"""Batches kept for replay."""
_MAX_UNREAD = 100_000
"""Batches that may wait for a slow reader. It misses later ones and can request a replay."""


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
        self._endpoint = endpoint_of_rank(settings.zmq, settings.dp_rank, "KVSIGHT_ZMQ")
        self._kept = KeptBatches(_MAX_KEPT)
        self._replay: ReplaySocket | None = None
        if settings.zmq_replay is not None:
            endpoint = endpoint_of_rank(settings.zmq_replay, settings.dp_rank, "KVSIGHT_ZMQ_REPLAY")
            self._replay = ReplaySocket(settings, endpoint, self._kept)
        self._topic = settings.zmq_topic.encode()
        self._events = EngineEvents(settings.zmq_encoding)
        self._omitted_logged = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._live: zmq.Socket[bytes] | None = None

    async def start(self) -> None:
        """Open both sockets. An address in use counts as unavailable."""
        self._context = zmq.Context()
        try:
            self._live = self._context.socket(zmq.PUB)
            self._live.setsockopt(zmq.LINGER, _LINGER_MS)  # now: readers may leave before close
            self._live.setsockopt(zmq.SNDHWM, _MAX_UNREAD)
            self._live.setsockopt(zmq.IPV6, is_ipv6(self._endpoint))
            if has_wildcard(self._endpoint) or self._endpoint.startswith(LOCAL_SCHEMES):
                self._live.bind(self._endpoint)
            else:
                self._live.connect(self._endpoint)
            if self._replay is not None:
                self._replay.start(self._context)
        except zmq.ZMQError as error:
            await self.stop()
            replay = "none" if self._replay is None else self._replay.endpoint
            raise SinkUnavailableError(f"{self._endpoint}, replay {replay}: {error}") from error

    async def send(self, records: Sequence[OutRecord]) -> None:
        """Send without waiting. A batch is sent when it is kept for replay and passed to ZMQ. Skips heartbeats."""
        if self._live is None:
            raise SinkUnavailableError(f"{self._endpoint} is not open")
        for record in records:
            if record.key != self._key:
                raise SinkRejectedError(f"record of {record.key!r}; this socket publishes {self._key!r}")
            try:
                payload = self._events.encode(record.payload)
            except RecordRejectedError as error:
                raise SinkRejectedError(f"not a kvsight record: {error}") from error
            if payload is not None:
                seq = seq_frame(self._kept.keep(payload))
                self._live.send_multipart([self._topic, seq, payload])
        self._log_omitted()

    async def stop(self) -> None:
        """Allow half a second to transmit what was sent, then close."""
        if self._replay is not None:
            await self._replay.stop()
        if self._live is not None:
            self._live.close()
        context, self._context, self._live = self._context, None, None
        if context is not None:
            await asyncio.to_thread(context.term)

    def requests(self) -> AsyncIterator[ResyncRequest | None]:
        return no_requests()

    def _log_omitted(self) -> None:
        """Log a warning whenever the number of omitted pages has doubled."""
        if self._events.num_omitted > 2 * self._omitted_logged:
            self._omitted_logged = self._events.num_omitted
            logger.warning("%s: %d pages so far could not be sent to readers", self._endpoint, self._omitted_logged)
