"""The client side of GET /events: decodes server-sent events into typed events."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec

from kv_events.http.events import EVENT_NAMES, PING_S, FeedEvent
from kvsight.calls import decode
from kvsight.errors import UnexpectedAnswerError

MAX_EVENT_BYTES = 2**20
"""Limit on the data of one event and the line being read. Larger events are refused before they are complete."""

_KINDS = {name: kind for kind, name in EVENT_NAMES.items()}
_LONGEST_SILENCE_S = 3 * PING_S


class EventReader:
    """Parses one stream of server-sent events (HTML Living Standard, section 9.2). Skips comments and unknown kinds.

    Lines that end with a lone CR are not supported.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._line = bytearray()  # the incomplete line
        self._name = b""
        self._data = bytearray()  # data lines of the current event, with their line ends

    def take(self, received: bytes) -> Iterator[FeedEvent]:
        """Yield the events that these bytes complete. Raises UnexpectedAnswerError for data that is not an event."""
        *ended, begun = received.split(b"\n")
        for part in ended:
            self._grow(part)
            line, self._line = bytes(self._line.removesuffix(b"\r")), bytearray()
            if (event := self._take_line(line)) is not None:
                yield event
        self._grow(begun)

    def _grow(self, part: bytes) -> None:
        if len(self._data) + len(self._line) + len(part) > MAX_EVENT_BYTES:
            raise UnexpectedAnswerError(f"{self._where}: an event is larger than {MAX_EVENT_BYTES} bytes")
        self._line += part

    def _take_line(self, line: bytes) -> FeedEvent | None:
        if line:
            field, _, value = line.partition(b":")
            if field == b"event":
                self._name = value.removeprefix(b" ")
            elif field == b"data":
                self._data += value.removeprefix(b" ") + b"\n"
            return None
        kind, data = _KINDS.get(self._name), bytes(self._data)
        self._name, self._data = b"", bytearray()
        return self._decoded(kind, data) if kind is not None and data else None

    def _decoded(self, kind: type[FeedEvent], data: bytes) -> FeedEvent:
        try:
            return decode(kind, data)
        except msgspec.DecodeError as error:
            raise UnexpectedAnswerError(f"{self._where}: not an event of a kvsight API: {error}") from error


def stream_request(worker: str | None, model: str | None, tenant: str | None, timeout_s: float) -> dict[str, Any]:
    """Arguments for httpx. A connection that is silent for three times the server's ping interval times out.

    Compression is refused, because the size of a decompressed answer has no bound.
    """
    given = {"worker": worker, "model": model, "tenant": tenant}
    return {
        "method": "GET",
        "url": "/events",
        "params": {name: value for name, value in given.items() if value is not None},
        "headers": {"Accept": "text/event-stream", "Accept-Encoding": "identity"},
        "timeout": httpx.Timeout(timeout_s, read=max(timeout_s, _LONGEST_SILENCE_S)),
    }
