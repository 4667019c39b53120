"""Clients of the API: `Client` blocks, `AsyncClient` has the same methods as coroutines.

Prompts are sent as msgpack with packed numbers, the fastest form. Requests that can be repeated safely are retried
after a broken connection, a 429 and a 503 (`RetryPolicy`). `calls` defines the requests and how answers are read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from inspect import Parameter, signature
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, get_args, get_type_hints

import httpx

from kv_events.errors import InvalidValueError, KvsightError
from kv_events.http.events import FeedEvent
from kv_events.http.selection import Selection
from kv_events.http.service import DEFAULT_URL
from kvsight import calls
from kvsight.base_client import AttemptResult, BaseClient, EventReader, RetryPolicy, stream_request
from kvsight.calls import Call
from kvsight.prompts import Integers

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Any])


def _blocking(call: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """A function of `calls` as a method of `Client`."""

    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(_made(call, *args, **kwargs))

    return _presented_as(call, method, "Client")


def _awaitable(call: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """A function of `calls` as a method of `AsyncClient`."""

    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(_made(call, *args, **kwargs))

    return _presented_as(call, method, "AsyncClient")


def _made(call: Callable[P, Call[T]], *args: P.args, **kwargs: P.kwargs) -> Call[T]:
    """Call a function of `calls`. Raises InvalidValueError for an argument of a wrong type."""
    try:
        return call(*args, **kwargs)
    except (TypeError, AttributeError):
        with suppress(TypeError):  # no argument is wrong, but their names or their number
            _check_types(call, signature(call).bind(*args, **kwargs).arguments)
        raise


def _check_types(call: Callable[..., Any], given: Mapping[str, object]) -> None:
    from pydantic import ConfigDict, ValidationError, create_model

    config = ConfigDict(arbitrary_types_allowed=True, revalidate_instances="always", strict=True)
    fields: dict[str, Any] = {name: each for name, each in get_type_hints(call).items() if name in given}
    try:
        create_model(call.__name__, __config__=config, **fields)(**given)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise InvalidValueError(name, given[name], signature(call).parameters[name].annotation) from None


def _presented_as(call: Callable[..., Any], method: M, client: str) -> M:
    """Give a method the name, docstring and parameters of `call`, and the result of the call as its result."""
    shown, hints = signature(call), get_type_hints(call)
    self = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    result = shown.return_annotation.removeprefix("Call[").removesuffix("]")  # a string, as all annotations are
    details = {
        "__name__": call.__name__,
        "__qualname__": f"{client}.{call.__name__}",
        "__doc__": call.__doc__,
        "__annotations__": {**hints, "return": get_args(hints["return"])[0]},
        "__signature__": shown.replace(parameters=[self, *shown.parameters.values()], return_annotation=result),
    }
    for name, value in details.items():
        setattr(method, name, value)
    return method


class Client(BaseClient):
    """A blocking client of one API address. Threads may share it.

    Every method raises KvsightHttpError if the API refuses the request, KvsightConnectionError if the server does not
    answer, UnexpectedAnswerError if the answer is not from a kvsight API, InvalidValueError for invalid arguments, and
    ClientClosedError after `close`.

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
        self._http: httpx.Client = httpx.Client(transport=transport, **self._options)

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

    query = _blocking(calls.query)
    query_by_hash = _blocking(calls.query_by_hash)
    query_batch = _blocking(calls.query_batch)
    query_raw = _blocking(calls.query_raw)
    best_worker = _blocking(calls.best_worker)
    rank_workers = _blocking(calls.rank_workers)
    select = _blocking(calls.select)
    reserve = _blocking(calls.reserve)
    complete = _blocking(calls.complete)
    release = _blocking(calls.release)
    loads = _blocking(calls.loads)
    report_decisions = decided = _blocking(calls.report_decisions)
    explain = _blocking(calls.explain)
    workers = _blocking(calls.workers)
    fleet = _blocking(calls.fleet)
    view = _blocking(calls.view)
    resync = _blocking(calls.resync)
    dump = _blocking(calls.dump)
    register = _blocking(calls.register)
    unregister = _blocking(calls.unregister)
    health = _blocking(calls.health)
    ready = _blocking(calls.ready)

    @contextmanager
    def placed(self, model: str, token_ids: Integers | None = None, **options: Any) -> Generator[Selection]:
        """Reserve a worker for a block, and release it at its end. options: as for `reserve`.

        If the release cannot be sent, the reservation ends by itself after the service's time-to-live.
        """
        selection = self.reserve(model, token_ids, **options)
        try:
            yield selection
        finally:
            with suppress(KvsightError):
                self.release(str(selection.selection_id))

    def events(
        self, *, worker: str | None = None, model: str | None = None, tenant: str | None = None
    ) -> Generator[FeedEvent]:
        """Iterate over what happens to the views: first the state of each, then batches and state changes.

        The iterator ends when the server stops, or after `ClientDropped`, which reports that this client read too
        slowly. Events between two calls are missed. Closing the iterator closes the connection.
        """
        self._check_open()
        reader = EventReader(f"{self._shown_url}/events")
        try:
            with self._http.stream(**stream_request(worker, model, tenant, self._timeout_s)) as response:
                if not response.is_success:
                    response.read()
                    self._result(calls.events(), response)
                for received in response.iter_raw():
                    yield from reader.take(received)
        except httpx.HTTPError as error:
            raise self._broken("/events", error) from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _outcome(self, request: httpx.Request) -> AttemptResult:
        try:
            return self._http.send(request)
        except httpx.HTTPError as error:
            return error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(BaseClient):
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
        self._http: httpx.AsyncClient = httpx.AsyncClient(transport=transport, **self._options)

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

    query = _awaitable(calls.query)
    query_by_hash = _awaitable(calls.query_by_hash)
    query_batch = _awaitable(calls.query_batch)
    query_raw = _awaitable(calls.query_raw)
    best_worker = _awaitable(calls.best_worker)
    rank_workers = _awaitable(calls.rank_workers)
    select = _awaitable(calls.select)
    reserve = _awaitable(calls.reserve)
    complete = _awaitable(calls.complete)
    release = _awaitable(calls.release)
    loads = _awaitable(calls.loads)
    report_decisions = decided = _awaitable(calls.report_decisions)
    explain = _awaitable(calls.explain)
    workers = _awaitable(calls.workers)
    fleet = _awaitable(calls.fleet)
    view = _awaitable(calls.view)
    resync = _awaitable(calls.resync)
    dump = _awaitable(calls.dump)
    register = _awaitable(calls.register)
    unregister = _awaitable(calls.unregister)
    health = _awaitable(calls.health)
    ready = _awaitable(calls.ready)

    @asynccontextmanager
    async def placed(self, model: str, token_ids: Integers | None = None, **options: Any) -> AsyncGenerator[Selection]:
        """See `Client.placed`."""
        selection = await self.reserve(model, token_ids, **options)
        try:
            yield selection
        finally:
            with suppress(KvsightError):
                await self.release(str(selection.selection_id))

    async def events(
        self, *, worker: str | None = None, model: str | None = None, tenant: str | None = None
    ) -> AsyncGenerator[FeedEvent]:
        """See `Client.events`."""
        self._check_open()
        reader = EventReader(f"{self._shown_url}/events")
        try:
            async with self._http.stream(**stream_request(worker, model, tenant, self._timeout_s)) as response:
                if not response.is_success:
                    await response.aread()
                    self._result(calls.events(), response)
                async for received in response.aiter_raw():
                    for event in reader.take(received):
                        yield event
        except httpx.HTTPError as error:
            raise self._broken("/events", error) from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _outcome(self, request: httpx.Request) -> AttemptResult:
        try:
            return await self._http.send(request)
        except httpx.HTTPError as error:
            return error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
