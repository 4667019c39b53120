"""What both clients share, without any I/O: the address, the headers, the verdict on each attempt, the retries."""

import logging
import math
import re
from base64 import b64encode
from collections.abc import Generator, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from itertools import count as count_from
from typing import Any, NamedTuple, TypeAlias, TypeVar

import httpx
import msgspec

from kv_events.errors import InvalidValueError, KvsightError, check_type
from kv_events.http.events import EVENT_NAMES, PING_S, FeedEvent
from kv_events.runtime import supervised
from kv_events.runtime.words import count, nearest
from kvsight import calls
from kvsight.calls import Call, decode
from kvsight.errors import ClientClosedError, KvsightConnectionError, UnexpectedAnswerError
from kvsight.prompts import given

logger = logging.getLogger("kvsight.client")

T = TypeVar("T")
AttemptResult: TypeAlias = httpx.Response | httpx.HTTPError
"""The outcome of one attempt."""

_HEADERS = {"Accept": "*/*", "Accept-Encoding": "gzip, deflate", "User-Agent": "kvsight"}
_MAX_WARNINGS = 20
_MAX_CHECKED_NAMES = 10_000
_CHECK_TIMEOUT_S = 0.5
_KEEPALIVE_S = 4.0  # the server closes idle connections after 5
_CREDENTIALS = re.compile(r"^(\w*:?//)?.*@", re.DOTALL)
_TOKEN = re.compile(r"[!-~]+")  # what a header can carry unchanged
_RETRY_LATER = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""No connection, or a broken one. A request that timed out is not repeated: the server may only be slow."""

MAX_EVENT_BYTES = 2**20
"""Limit on the data of one event and the line being read. Larger events are refused before they are complete."""

_KINDS = {name: kind for kind, name in EVENT_NAMES.items()}
_LONGEST_SILENCE_S = 3 * PING_S


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number of attempts and pauses between them. Pauses double; each is randomly shortened by up to half."""

    attempts: int = 3
    """Maximum number of attempts; 1 disables retries."""
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0
    """Also the longest Retry-After of a server that is honoured. A longer one ends the attempts."""

    def __post_init__(self) -> None:
        """Raises InvalidValueError."""
        check_type("attempts", self.attempts, int)
        if self.attempts < 1:
            raise InvalidValueError("attempts", self.attempts, "a positive integer")
        for field in ("first_pause_s", "longest_pause_s"):
            check_type(field, getattr(self, field), int | float)
            if not 0 <= getattr(self, field) < math.inf:
                raise InvalidValueError(field, getattr(self, field), "seconds, not negative")

    def pause(self, attempt: int, outcome: httpx.Response | httpx.HTTPError) -> float | None:
        """Seconds to wait before the next attempt; None if there is none. attempt: 0, 1, ..."""
        if attempt + 1 >= self.attempts:
            return None
        asked = 0.0
        if isinstance(outcome, httpx.Response):
            if outcome.status_code not in _RETRY_LATER:
                return None
            after = outcome.headers.get("retry-after", "")
            asked = float(after) if after.isascii() and after.isdecimal() else 0.0
        elif not isinstance(outcome, _BROKEN):
            return None
        pause_s = supervised.pause_s(attempt, self.first_pause_s, self.longest_pause_s)
        return None if asked > self.longest_pause_s else max(asked, pause_s)


class Attempt(NamedTuple):
    """One attempt: wait, then send."""

    pause_s: float
    request: httpx.Request


class BaseClient:
    """Everything but the I/O: the address, the headers, the verdict on each attempt."""

    _http: httpx.Client | httpx.AsyncClient

    def __init__(self, url: str, token: str | None, timeout_s: float, retry: RetryPolicy | None) -> None:
        self._address, authorization = address_and_authorization(url, token)
        check_type("timeout_s", timeout_s, int | float)
        if not 0 < timeout_s < math.inf:
            raise InvalidValueError("timeout_s", timeout_s, "seconds, above 0")
        check_type("retry", retry, RetryPolicy | None)
        self._shown_url = _shown(url)
        self._retry = retry or RetryPolicy()
        self._timeout_s = timeout_s
        self._checked_names: Set[str] = frozenset()  # of workers: known ones, and those that were warned of
        self._headers: dict[str | None, httpx.Headers] = {}  # by content type
        self._extensions = {"timeout": httpx.Timeout(timeout_s).as_dict()}
        self._options: dict[str, Any] = {
            "base_url": self._address,  # without a password, because httpx logs addresses
            "headers": authorization,
            "timeout": timeout_s,
            "limits": httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=_KEEPALIVE_S),
        }

    def _attempts(self, call: Call[T]) -> Generator[Attempt, AttemptResult, T]:
        """Yield each attempt, receive its outcome, and return the result of the last one, or raise its error."""
        self._check_open()
        request = self._request(call)
        outcome = yield Attempt(0.0, request)
        for attempt in count_from():
            pause_s = self._retry.pause(attempt, outcome) if call.may_repeat else None
            if pause_s is None:
                break
            outcome = yield Attempt(pause_s, request)
        result = self._result(call, outcome)
        if not call.candidates <= self._checked_names:
            unchecked = call.candidates - self._checked_names
            request = self._request(calls.workers())
            request.extensions = {"timeout": httpx.Timeout(min(_CHECK_TIMEOUT_S, self._timeout_s)).as_dict()}
            self._warn_of_unknown(unchecked, (yield Attempt(0.0, request)))
        return result

    def _warn_of_unknown(self, names: Set[str], outcome: AttemptResult) -> None:
        """Warn once of names that no worker has. A new worker may have one, so it is a candidate all the same."""
        known: set[str] = set()
        with suppress(KvsightError):  # another indexer, or a token that does not permit the list
            known = {worker.instance_id for worker in self._result(calls.workers(), outcome)}
            for name in sorted(names - known)[:_MAX_WARNINGS]:
                logger.warning(
                    "load: the service knows no worker %r; the nearest name is %s", name, nearest(name, known)
                )
        before = self._checked_names if len(self._checked_names) < _MAX_CHECKED_NAMES else frozenset()
        self._checked_names = before | names | known

    def _check_open(self) -> None:
        """Raises ClientClosedError."""
        if self._http.is_closed:
            raise ClientClosedError(f"{self._shown_url}: this client is closed; make a new one")

    def _request(self, call: Call[T]) -> httpx.Request:
        """Build a request. httpx would join the address and merge the headers anew each time."""
        url = _joined(self._address, call.path)
        params: dict[str, str | int] = given(call.params or {})
        return httpx.Request(
            call.method,
            url.copy_merge_params(params) if params else url,
            headers=self._headers_of(call.content_type),
            content=call.content,
            extensions=self._extensions,
        )

    def _headers_of(self, content_type: str | None) -> httpx.Headers:
        if content_type not in self._headers:
            more = {} if content_type is None else {"Content-Type": content_type}
            self._headers[content_type] = httpx.Headers(_HEADERS | self._options["headers"] | more)
        return self._headers[content_type]

    def _result(self, call: Call[T], outcome: AttemptResult) -> T:
        if isinstance(outcome, httpx.HTTPError):
            raise self._broken(call.path, outcome) from outcome
        return call.result(self._shown_url, outcome.status_code, outcome.content)

    def _broken(self, path: str, error: httpx.HTTPError) -> KvsightConnectionError:
        return KvsightConnectionError(f"{self._shown_url}{path}: {str(error) or type(error).__name__}")


@lru_cache(maxsize=256)
def _joined(base: str, path: str) -> httpx.URL:
    return httpx.URL(base + path)


def address_and_authorization(
    url: str, token: str | None, field: str = "url", credential_field: str = "token"
) -> tuple[str, dict[str, str]]:
    """Return a service's address without credentials, and the header that has them.

    Raises InvalidValueError, which names `field` or `credential_field`.
    """
    if not isinstance(url, str):  # a value of another type may contain a password as well, so it is not shown
        raise InvalidValueError(field, type(url).__name__, "text")
    expected = "an address such as http://HOST:PORT"
    try:
        parsed = httpx.URL(url)
        is_valid = parsed.scheme in ("http", "https") and bool(parsed.host)
    except (httpx.InvalidURL, UnicodeError):  # or what is no name of a host
        is_valid = False
    if not is_valid:
        raise InvalidValueError(field, _shown(url), expected)
    return str(parsed.copy_with(userinfo=b"")).rstrip("/"), _authorization(parsed, token, credential_field)


def _shown(url: str) -> str:
    return _CREDENTIALS.sub(r"\1...@", url).rstrip("/")


def _authorization(url: httpx.URL, token: str | None, field: str) -> dict[str, str]:
    """Errors do not contain the credentials."""
    if token is not None and not isinstance(token, str):
        raise InvalidValueError(field, type(token).__name__, "text")
    shown = count(len(token or ""), "character")
    if token and not _TOKEN.fullmatch(token):
        raise InvalidValueError(field, shown, "printable ASCII without spaces or line ends")
    if token and url.userinfo:
        raise InvalidValueError(field, shown, "no user in `url` besides: both are credentials")
    if token:
        return {"Authorization": f"Bearer {token}"}
    if url.userinfo:
        return {"Authorization": f"Basic {b64encode(f'{url.username}:{url.password}'.encode()).decode()}"}
    return {}


# --- GET /events ----------------------------------------------------------------------------------------------------


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
    return {
        "method": "GET",
        "url": "/events",
        "params": given({"worker": worker, "model": model, "tenant": tenant}),
        "headers": {"Accept": "text/event-stream", "Accept-Encoding": "identity"},
        "timeout": httpx.Timeout(timeout_s, read=max(timeout_s, _LONGEST_SILENCE_S)),
    }
