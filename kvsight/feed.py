"""GET /events from the client's side: lines of server-sent events -> typed events."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

from api.feed_events import EVENT_NAMES, PING_S, FeedEvent
from kvsight.errors import UnexpectedAnswerError

_KINDS = {name.decode(): kind for kind, name in EVENT_NAMES.items()}
_LONGEST_SILENCE_S = 3 * PING_S
MAX_LINE_LENGTH = 2**20


class FeedReader:
    """Reads one stream line by line, as the HTML Living Standard (section 9.2) has it; kinds it does not know, and
    comments, are passed over.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._name = ""
        self._data: list[str] = []

    def take(self, line: str) -> FeedEvent | None:
        """The event that a line ends, if it ends one. Raises UnexpectedAnswerError."""
        if len(line) > MAX_LINE_LENGTH:
            raise UnexpectedAnswerError(f"{self._where}: a line of {len(line)} characters")
        if line:
            field, _, value = line.partition(":")
            if field == "event":
                self._name = value.removeprefix(" ")
            elif field == "data":
                self._data.append(value.removeprefix(" "))
            return None
        name, data = self._name, "\n".join(self._data)
        self._name, self._data = "", []
        kind = _KINDS.get(name)
        return self._decoded(kind, data) if kind is not None and data else None

    def _decoded(self, kind: type[FeedEvent], data: str) -> FeedEvent:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            raise UnexpectedAnswerError(f"{self._where}: no event of kvsight's: {error}") from error


def feed_request(worker: str | None, model: str | None, tenant: str | None, timeout_s: float) -> dict[str, Any]:
    """Arguments for httpx. A connection that says nothing for three times the server's pause is given up."""
    given = {"worker": worker, "model": model, "tenant": tenant}
    return {
        "method": "GET",
        "url": "/events",
        "params": {name: value for name, value in given.items() if value is not None},
        "timeout": httpx.Timeout(timeout_s, read=max(timeout_s, _LONGEST_SILENCE_S)),
    }
