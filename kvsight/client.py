"""Clients of the API: `Client` blocks, `AsyncClient` has the same methods as coroutines.

Prompts are sent as msgpack with packed numbers, the fastest form. Requests that can be repeated safely are retried
after a broken connection, a 429 and a 503 (`RetryPolicy`). `calls` defines the requests and how answers are read.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import wraps
from itertools import count
from types import TracebackType
from typing import Any, Generic, NamedTuple, ParamSpec, Self, TypeAlias, TypeVar, overload

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
"""The outcome of one attempt."""

DEFAULT_URL = "http://127.0.0.1:8000"

_KEEPALIVE_S = 4.0  # the server closes idle connections after 5
_CREDENTIALS = re.compile(r"^(\w*:?//)?.*@", re.DOTALL)
_TOKEN = re.compile(r"[!-~]+")  # what a header can carry unchanged


class _Attempt(NamedTuple):
    """One attempt: wait, then send."""

    pause_s: float
    request: dict[str, Any]
    """Arguments for httpx."""


class _Method(Generic[P, T]):
    """A call of `kvsight.calls` as a method: it blocks in `Client` and is a coroutine in `AsyncClient`."""

    def __init__(self, make: Callable[P, Call[T]]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> Callable[P, Call[T]]: ...
    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, client: Client | AsyncClient | None, owner: type) -> Callable[P, Any]:
        if client is None:
            return self._make

        @wraps(self._make)
        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client._call(self._make, args, kwargs)

        return method


class _BaseClient:
    """Everything but the I/O: the methods, the address, the headers, the verdict on each attempt."""

    query = _Method(calls.query)
    query_by_hash = _Method(calls.query_by_hash)
    query_batch = _Method(calls.query_batch)
    query_raw = _Method(calls.query_raw)
    best_worker = _Method(calls.best_worker)
    workers = _Method(calls.workers)
    view = _Method(calls.view)
    resync = _Method(calls.resync)
    dump = _Method(calls.dump)
    register = _Method(calls.register)
    unregister = _Method(calls.unregister)
    health = _Method(calls.health)
    ready = _Method(calls.ready)

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

    def _attempts(self, call: Call[T]) -> Generator[_Attempt, Outcome, T]:
        """Yield each attempt, receive its outcome, and return the result of the last one, or raise its error."""
        request = _request(call)
        outcome = yield _Attempt(0.0, request)
        for attempt in count():
            pause_s = self._retry.pause(attempt, outcome) if call.may_repeat else None
            if pause_s is None:
                break
            outcome = yield _Attempt(pause_s, request)
        return self._result(call, outcome)

    def _result(self, call: Call[T], outcome: Outcome) -> T:
        if isinstance(outcome, httpx.HTTPError):
            raise self._broken(call.path, outcome) from outcome
        return call.result(self._shown_url, outcome.status_code, outcome.content)

    def _broken(self, path: str, error: httpx.HTTPError) -> KvsightConnectionError:
        return KvsightConnectionError(f"{self._shown_url}{path}: {str(error) or type(error).__name__}")

    def _feed(self) -> FeedReader:
        return FeedReader(f"{self._shown_url}/events")

    def _check_feed(self, response: httpx.Response) -> None:
        """Raise the error of a refused event stream. The body of a refusal has been read."""
        if not response.is_success:
            self._result(calls.events(), response)


class Client(_BaseClient):
    """A blocking client of one API address. Threads may share it.

    Every method raises KvsightHttpError if the API refuses the request, KvsightConnectionError if the server does not
    answer, UnexpectedAnswerError if the answer is not from a kvsight API, and InvalidValueError for invalid arguments.

    url: may contain a user and a password, which are sent instead of a token. Errors and log lines show neither.
    timeout_s: for each of connecting, sending and receiving, in every attempt. transport: replaces the network.
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

    def send(self, call: Call[T]) -> T:
        """Send a call of `kvsight.calls`."""
        attempts = self._attempts(call)
        try:
            attempt = next(attempts)
            while True:
                if attempt.pause_s:
                    time.sleep(attempt.pause_s)
                attempt = attempts.send(self._outcome(attempt.request))
        except StopIteration as end:
            result: T = end.value
            return result

    def events(
        self, *, worker: str | None = None, model: str | None = None, tenant: str | None = None
    ) -> Generator[FeedEvent]:
        """Iterate over what happens to the views: first the state of each, then batches and state changes.

        The iterator ends when the server stops, or after `ClientDropped`, which reports that this client read too
        slowly. Events between two calls are missed. Closing the iterator closes the connection.
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
        """Close the connections."""
        self._http.close()

    def _call(self, make: Callable[..., Call[T]], args: Any, kwargs: Any) -> T:
        return self.send(make(*args, **kwargs))

    def _outcome(self, request: dict[str, Any]) -> Outcome:
        try:
            return self._http.request(**request)
        except httpx.HTTPError as error:
            return error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_BaseClient):
    """`Client` for asyncio: the same methods, as coroutines."""

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

    async def send(self, call: Call[T]) -> T:
        """Send a call of `kvsight.calls`."""
        attempts = self._attempts(call)
        try:
            attempt = next(attempts)
            while True:
                if attempt.pause_s:
                    await asyncio.sleep(attempt.pause_s)
                attempt = attempts.send(await self._outcome(attempt.request))
        except StopIteration as end:
            result: T = end.value
            return result

    async def events(
        self, *, worker: str | None = None, model: str | None = None, tenant: str | None = None
    ) -> AsyncGenerator[FeedEvent]:
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
        """Close the connections."""
        await self._http.aclose()

    async def _call(self, make: Callable[..., Call[T]], args: Any, kwargs: Any) -> T:
        return await self.send(make(*args, **kwargs))

    async def _outcome(self, request: dict[str, Any]) -> Outcome:
        try:
            return await self._http.request(**request)
        except httpx.HTTPError as error:
            return error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


def _request(call: Call[T]) -> dict[str, Any]:
    """Arguments for httpx."""
    return {
        "method": call.method,
        "url": call.path,
        "params": {name: value for name, value in (call.params or {}).items() if value is not None},
        "content": call.content,
        "headers": {"Content-Type": call.content_type} if call.content_type else {},
    }


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
    """Arguments for httpx. Errors do not contain the credentials."""
    if token and not _TOKEN.fullmatch(token):
        raise InvalidValueError("token", f"{len(token)} characters", "printable ASCII without spaces or line ends")
    if token and url.userinfo:
        raise InvalidValueError("token", f"{len(token)} characters", "no user in `url` besides: both are credentials")
    if token:
        return {"headers": {"Authorization": f"Bearer {token}"}}
    return {"auth": (url.username, url.password)} if url.userinfo else {}
