"""The connections of one server and the bodies that it holds: which of them make room when there are too many."""

import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import NamedTuple, Protocol

from starlette.types import ASGIApp, Scope

from api.access.guard import PROBES, Guard
from api.problems import ProblemError, ProblemKind
from kv_events.runtime.outages import RateLimitedLogger

HEAD_S = 10.0
"""Time after which a connection must have sent a complete head, or finished its TLS handshake."""
RESERVED = 64
"""Connections beyond the limit. Only probes are answered on them."""

SMALL_BYTES = 2**16
"""Smaller bodies are not counted: most requests have room at any time."""
BODIES = 8
"""Bodies of the largest size that have room at once."""

_PART = 16  # a sixteenth of the connections lose their place at once, so that it is rarely decided
_PAUSE_S = 0.1  # before it is decided again, if most are being answered

logger = logging.getLogger(__name__)


class Waiting(NamedTuple):
    """A connection without a complete request."""

    is_new: bool
    """It has sent none yet, or one is arriving."""
    since: float


class Connection(Protocol):
    """One connection."""

    def waiting(self) -> Waiting | None:
        """Return since when it has no complete request. None: an answer is being made, and the caller reads it."""

    def abort(self) -> None:
        """Close it at once."""


class ConnectionLimit:
    """Lets a new connection have the place of one that waits, so that nobody keeps others out by holding connections.

    New connections lose their place first, unless they are few, and then idle ones. Of each kind, those of the address
    with the most connections lose theirs first, and of these the ones that wait the longest. Networks of IPv6 with 64
    bits count as one address. If all connections are being answered, a few more are accepted for probes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._batch = max(1, most // _PART)
        self._addresses: dict[Connection, str] = {}
        self._pause_until = 0.0
        self._limited_logger = RateLimitedLogger(logger, "connections")

    def enter(self, connection: Connection, host: str) -> bool:
        """Add a new connection. Returns False if it is beyond the limit. It is closed if it is far beyond."""
        if len(self._addresses) >= self._most and (time.monotonic() >= self._pause_until or self._is_nearly_full()):
            self._make_room()
        self._addresses[connection] = _address(host)
        if len(self._addresses) > self._most + RESERVED:
            connection.abort()
        return len(self._addresses) <= self._most

    def leave(self, connection: Connection) -> None:
        """Remove a connection, if it is still there."""
        self._addresses.pop(connection, None)

    def for_probes(self, app: ASGIApp) -> ASGIApp:
        """Return what answers requests of a connection beyond the limit."""
        return Guard(app, [self._check_probe])

    def _check_probe(self, scope: Scope) -> ProblemError | None:
        if scope["path"] in PROBES:
            return None
        detail = f"more than {self._most} connections are open (--max-connections)"
        return ProblemError(503, ProblemKind.OVERLOADED, detail, retry_after_s=1)

    def _is_nearly_full(self) -> bool:
        return len(self._addresses) >= self._most + RESERVED // 2

    def _make_room(self) -> None:
        losers = self._losers()
        for connection in losers:
            del self._addresses[connection]
            connection.abort()
        if len(losers) < self._batch:
            self._pause_until = time.monotonic() + _PAUSE_S
        self._limited_logger.warning(
            "%d connections are open, as many as may be (--max-connections): %d idle ones are closed",
            *(self._most, len(losers)),
        )

    def _losers(self) -> list[Connection]:
        new: list[tuple[float, str, Connection]] = []
        idle: list[tuple[float, str, Connection]] = []
        busy = Counter[str]()
        for connection, address in self._addresses.items():
            waiting = connection.waiting()
            if waiting is None:
                busy[address] += 1
            else:
                (new if waiting.is_new else idle).append((waiting.since, address, connection))
        first, last = _in_order(new, {}), _in_order(idle, busy)
        if len(new) <= 2 * self._batch:  # callers that come now need a moment
            first, last = last, first[: len(new) // 2] if self._is_nearly_full() else []
        return [*first, *last][: self._batch]


class BodyLimit:
    """Counts the bytes of large bodies, from their arrival until the requests are answered.

    If there are too many, those that have been arriving for the longest time are refused.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._most = BODIES * max_body_bytes
        self._held = 0
        self._bytes: dict[object, int] = {}  # by request
        self._arriving: dict[object, Callable[[ProblemError], None]] = {}  # the oldest first

    def note(self, request: object, num_bytes: int, refuse: Callable[[ProblemError], None]) -> None:
        """Note how much of a body has arrived. refuse: refuses this request."""
        if num_bytes <= SMALL_BYTES:
            return
        self._arriving.setdefault(request, refuse)
        self._held += num_bytes - self._bytes.get(request, 0)
        self._bytes[request] = num_bytes
        while self._held > self._most and self._arriving:
            oldest, refuse_oldest = next(iter(self._arriving.items()))
            self.release(oldest)
            detail = f"body: large bodies that arrive or wait for an answer have more than {self._most} bytes together"
            refuse_oldest(ProblemError(503, ProblemKind.OVERLOADED, detail, "body", retry_after_s=1))

    def complete(self, request: object) -> None:
        """Note that a body has arrived completely."""
        self._arriving.pop(request, None)

    def release(self, request: object) -> None:
        """Note that a request is answered, or gone."""
        self._arriving.pop(request, None)
        self._held -= self._bytes.pop(request, 0)


def _in_order(waiting: Iterable[tuple[float, str, Connection]], busy: Mapping[str, int]) -> list[Connection]:
    """Return connections in the order in which they lose their place. busy: address -> further connections of it."""
    numbers, ranks = Counter(busy), []
    for since, address, connection in sorted(waiting, key=itemgetter(0), reverse=True):
        numbers[address] += 1
        ranks.append((-numbers[address], since, connection))
    return [connection for *_, connection in sorted(ranks, key=itemgetter(0, 1))]


def _address(host: str) -> str:
    return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False)) if ":" in host else host
