"""The API from Python: `Client` for threads, `AsyncClient` for coroutines, with the same methods.

Prompts travel as msgpack with packed numbers, the fastest form. Calls that change nothing, or nothing twice, are tried
again after a broken connection, a 429 and a 503 (`RetryPolicy`). What is sent, and what answers mean, is in `calls`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar

import httpx

from kv_events.errors import InvalidValueError
from kvsight import calls
from kvsight.calls import Call
from kvsight.errors import KvsightConnectionError
from kvsight.feed import FeedReader, feed_request
from kvsight.retrying import RetryPolicy
from kvsight.schemas.events import FeedEvent

P = ParamSpec("P")
T = TypeVar("T")
Outcome: TypeAlias = httpx.Response | httpx.HTTPError
"""Of one attempt."""

DEFAULT_URL = "http://127.0.0.1:8000"

_KEEPALIVE_S = 4.0  # the server hangs up after 5
_CREDENTIALS = re.compile(r"^(\w*:?//)?.*@", re.DOTALL)
_TOKEN = re.compile(r"[!-~]+")  # what a header carries as it is


class _Side:
    """What both clients share: the address, the headers, the verdict on each attempt."""

    def __init__(self, url: str, token: str | None, timeout_s: float, retry: RetryPolicy | None) -> None:
        self._shown_url = _CREDENTIALS.sub(r"\1...@", url).rstrip("/")
        self._retry = retry or RetryPolicy()
        self._timeout_s = timeout_s
        base_url = _checked(url, self._shown_url)
        self._options: dict[str, Any] = {
            "base_url": base_url.copy_with(userinfo=b""),  # httpx logs addresses
            **_authorization(base_url, token),
            "timeout": timeout_s,
            "limits": httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=_KEEPALIVE_S),
        }

    def _request(self, call: Call[T]) -> dict[str, Any]:
        """Arguments for httpx."""
        return {
            "method": call.method,
            "url": call.path,
            "params": {name: value for name, value in (call.params or {}).items() if value is not None},
            "content": call.content,
            "headers": {"Content-Type": call.content_type} if call.content_type else {},
        }

    def _pause(self, call: Call[T], attempt: int, outcome: Outcome) -> float | None:
        return self._retry.pause(attempt, outcome) if call.may_repeat else None

    def _result(self, call: Call[T], outcome: Outcome) -> T:
        if isinstance(outcome, httpx.HTTPError):
            raise self._broken(call.path, outcome) from outcome
        return call.result(self._shown_url, outcome.status_code, outcome.content)

    def _broken(self, path: str, error: httpx.HTTPError) -> KvsightConnectionError:
        return KvsightConnectionError(f"{self._shown_url}{path}: {str(error) or type(error).__name__}")

    def _feed(self) -> FeedReader:
        return FeedReader(f"{self._shown_url}/events")

    def _check_feed(self, response: httpx.Response) -> None:
        """response: read, where it is a refusal."""
        if not response.is_success:
            self._result(calls.events(), response)


def _checked(url: str, shown: str) -> httpx.URL:
    expected = "an address such as http://HOST:PORT"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        raise InvalidValueError("url", shown, expected) from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidValueError("url", shown, expected)
    return parsed


def _authorization(url: httpx.URL, token: str | None) -> dict[str, Any]:
    """Arguments for httpx; no error shows them."""
    if token and not _TOKEN.fullmatch(token):
        raise InvalidValueError("token", f"{len(token)} characters", "printable ASCII without spaces or line ends")
    if token and url.userinfo:
        raise InvalidValueError("token", f"{len(token)} characters", "no user in `url` beside it: both are credentials")
    if token:
        return {"headers": {"Authorization": f"Bearer {token}"}}
    return {"auth": (url.username, url.password)} if url.userinfo else {}


def _waits(make: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """A call as a method of `Client`."""

    def send(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(make(*args, **kwargs))

    return _named_after(make, send)


def _awaits(make: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """A call as a method of `AsyncClient`."""

    async def send(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(make(*args, **kwargs))

    return _named_after(make, send)


def _named_after(make: Callable[..., Any], method: T) -> T:
    for attribute in ("__name__", "__doc__"):
        setattr(method, attribute, getattr(make, attribute))
    return method


class Client(_Side):
    """Asks one address of the API. Threads may share one.

    Every method raises KvsightHttpError where the API refuses, KvsightConnectionError where nobody answers,
    UnexpectedAnswerError where somebody else does, and InvalidValueError for arguments that could not be sent.

    url: a user and a password in it are sent as such, in place of a token; no error and no log line shows either.
    timeout_s: of each of connecting, sending and receiving, in every attempt. transport: in place of the network's.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        timeout_s: float = 5.0,
        retry: RetryPolicy | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(url, token, timeout_s, retry)
        self._http = httpx.Client(transport=transport, **self._options)

    query = _waits(calls.query)
    query_by_hash = _waits(calls.query_by_hash)
    query_batch = _waits(calls.query_batch)
    query_raw = _waits(calls.query_raw)
    best_worker = _waits(calls.best_worker)
    workers = _waits(calls.workers)
    view = _waits(calls.view)
    resync = _waits(calls.resync)
    dump = _waits(calls.dump)
    register = _waits(calls.register)
    unregister = _waits(calls.unregister)
    health = _waits(calls.health)
    ready = _waits(calls.ready)

    def send(self, call: Call[T]) -> T:
        """Make a call of `kvsight.calls`."""
        request, attempt = self._request(call), 0
        while True:
            outcome: Outcome
            try:
                outcome = self._http.request(**request)
            except httpx.HTTPError as error:
                outcome = error
            pause_s = self._pause(call, attempt, outcome)
            if pause_s is None:
                return self._result(call, outcome)
            time.sleep(pause_s)
            attempt += 1

    def events(
        self, *, worker: str | None = None, model: str | None = None, tenant: str | None = None
    ) -> Iterator[FeedEvent]:
        """What happens to views, as it happens: first the state of each, then batches and changes of states.

        Ends when the server stops, or after `ClientDropped`, which says that this side read too slowly. What happens
        between two calls is missed. Closing the iterator hangs up.
        """
        reader = self._feed()
        try:
            with self._http.stream(**feed_request(worker, model, tenant, self._timeout_s)) as response:
                if not response.is_success:
                    response.read()
                self._check_feed(response)
                for received in response.iter_raw():
                    yield from reader.take(received)
        except httpx.HTTPError as error:
            raise self._broken("/events", error) from error

    def close(self) -> None:
        """Hang up."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_Side):
    """`Client` for coroutines: the same methods, to be awaited."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        timeout_s: float = 5.0,
        retry: RetryPolicy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, token, timeout_s, retry)
        self._http = httpx.AsyncClient(transport=transport, **self._options)

    query = _awaits(calls.query)
    query_by_hash = _awaits(calls.query_by_hash)
    query_batch = _awaits(calls.query_batch)
    query_raw = _awaits(calls.query_raw)
    best_worker = _awaits(calls.best_worker)
    workers = _awaits(calls.workers)
    view = _awaits(calls.view)
    resync = _awaits(calls.resync)
    dump = _awaits(calls.dump)
    register = _awaits(calls.register)
    unregister = _awaits(calls.unregister)
    health = _awaits(calls.health)
    ready = _awaits(calls.ready)

    async def send(self, call: Call[T]) -> T:
        """Make a call of `kvsight.calls`."""
        request, attempt = self._request(call), 0
        while True:
            outcome: Outcome
            try:
                outcome = await self._http.request(**request)
            except httpx.HTTPError as error:
                outcome = error
            pause_s = self._pause(call, attempt, outcome)
            if pause_s is None:
                return self._result(call, outcome)
            await asyncio.sleep(pause_s)
            attempt += 1

    async def events(
        self, *, worker: str | None = None, model: str | None = None, tenant: str | None = None
    ) -> AsyncGenerator[FeedEvent, None]:
        """See `Client.events`."""
        reader = self._feed()
        try:
            async with self._http.stream(**feed_request(worker, model, tenant, self._timeout_s)) as response:
                if not response.is_success:
                    await response.aread()
                self._check_feed(response)
                async for received in response.aiter_raw():
                    for event in reader.take(received):
                        yield event
        except httpx.HTTPError as error:
            raise self._broken("/events", error) from error

    async def aclose(self) -> None:
        """Hang up."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()
