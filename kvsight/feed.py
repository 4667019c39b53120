"""GET /events from the client's side: bytes of server-sent events -> typed events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec

from kvsight.decoding import decode
from kvsight.errors import UnexpectedAnswerError
from kvsight.schemas.events import EVENT_NAMES, PING_S, FeedEvent

MAX_EVENT_BYTES = 2**20
"""Of an event's data and the line that is being read; more is refused before it is whole."""

_KINDS = {name: kind for kind, name in EVENT_NAMES.items()}
_LONGEST_SILENCE_S = 3 * PING_S


class FeedReader:
    """Reads one stream as the HTML Living Standard (section 9.2) has it, but for lines that end with CR alone. Kinds
    that it does not know, and comments, are passed over.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._line = bytearray()  # begun, not ended
        self._name = b""
        self._data = bytearray()  # of the event that is being read, each line with its end

    def take(self, received: bytes) -> Iterator[FeedEvent]:
        """Events that these bytes end; each is given before the next is looked at. Raises UnexpectedAnswerError."""
        *ended, begun = received.split(b"\n")
        for part in ended:
            self._grow(part)
            line, self._line = bytes(self._line.removesuffix(b"\r")), bytearray()
            if (event := self._take_line(line)) is not None:
                yield event
        self._grow(begun)

    def _grow(self, part: bytes) -> None:
        if len(self._data) + len(self._line) + len(part) > MAX_EVENT_BYTES:
            raise UnexpectedAnswerError(f"{self._where}: an event of more than {MAX_EVENT_BYTES} bytes")
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
            raise UnexpectedAnswerError(f"{self._where}: no event of kvsight's: {error}") from error


def feed_request(worker: str | None, model: str | None, tenant: str | None, timeout_s: float) -> dict[str, Any]:
    """Arguments for httpx. A connection that says nothing for three times the server's pause is given up.

    The bytes are read as they come: what a compressed answer unpacks to would have no bound.
    """
    given = {"worker": worker, "model": model, "tenant": tenant}
    return {
        "method": "GET",
        "url": "/events",
        "params": {name: value for name, value in given.items() if value is not None},
        "headers": {"Accept": "text/event-stream", "Accept-Encoding": "identity"},
        "timeout": httpx.Timeout(timeout_s, read=max(timeout_s, _LONGEST_SILENCE_S)),
    }
