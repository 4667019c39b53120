"""GET /events: changes of the views as server-sent events (HTML Living Standard, section 9.2)."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from typing import Any, Final, Literal, NamedTuple

import msgspec
from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from api.access.guard import header
from api.problems import ProblemError, ProblemKind
from indexer.consumer import Consumer
from indexer.views import View
from indexer.worker_log import WorkerChange
from kv_events.codec import DecodedBatch
from kv_events.http.events import EVENT_NAMES, PING_S, BatchApplied, ClientDropped, FeedEvent, StateChanged
from kv_events.schema import MEDIA, AllBlocksCleared
from kv_events.streams import StreamId

MAX_QUEUED_EVENTS = 4096
"""Maximum number of events queued for one client."""

_BATCH: Final = "batch"
_STATE: Final = "state"
_MEDIA_TYPE = "text/event-stream"
_EXAMPLE = 'event: dropped\ndata: {"lost": 4097}\n\n'

_encoder = msgspec.json.Encoder()


class StreamFilter(NamedTuple):
    """The streams that a client selects. None selects all."""

    worker: str | None = None
    model: str | None = None
    tenant: str | None = None
    kind: str | None = None
    """Kind of events: `batch` or `state`."""

    def matches(self, stream: StreamId, kind: str) -> bool:
        """Return whether events of a kind and a stream are selected."""
        return (
            self.kind in (None, kind)
            and self.worker in (None, stream.worker)
            and self.model in (None, stream.model)
            and self.tenant in (None, stream.tenant)
        )


class _Client:
    """The queue of one client."""

    def __init__(self, stream_filter: StreamFilter, authorization: bytes) -> None:
        self.stream_filter = stream_filter
        self.authorization = authorization
        self.is_ended = False
        self.lost = 0
        """Number of dropped events. If it is not 0, the client is too slow and is disconnected."""
        self.woken = asyncio.Event()
        self._waiting: deque[bytes] = deque()

    def put(self, event: bytes) -> None:
        if not self.lost and len(self._waiting) == MAX_QUEUED_EVENTS:
            self.lost = MAX_QUEUED_EVENTS
            self._waiting.clear()
        if self.lost:
            self.lost += 1
        else:
            self._waiting.append(event)
        self.woken.set()

    def take(self) -> bytes:
        self.woken.clear()
        events = b"".join(self._waiting)
        self._waiting.clear()
        return events


class EventStream:
    """Sends events to clients. Does no work without clients. Belongs to the consumer's event loop."""

    def __init__(self, consumer: Consumer, max_clients: int) -> None:
        self._consumer = consumer
        self._max_clients = max_clients
        self._clients: set[_Client] = set()
        self._is_closed = False
        consumer.applier.on_applied.insert(0, self._on_applied)  # a batch comes before the change that it makes
        consumer.worker_log.on_change.append(self._on_change)

    @property
    def num_clients(self) -> int:
        """Number of connected clients."""
        return len(self._clients)

    def close(self) -> None:
        """End all streams, because a stopping server waits for its connections."""
        self._is_closed = True
        for client in self._clients:
            client.woken.set()

    def end_streams(self, is_permitted: Callable[[bytes], bool]) -> None:
        """End the streams of clients whose header `Authorization` does not permit them any longer."""
        for client in self._clients:
            client.is_ended = not is_permitted(client.authorization)
            client.woken.set()

    @asynccontextmanager
    async def listening(
        self, stream_filter: StreamFilter, authorization: bytes = b""
    ) -> AsyncIterator[AsyncGenerator[bytes]]:
        """Connect a client for the duration of the block. Yields its events; the states come first.

        authorization: the header that the client sent.

        Raises ProblemError (429) if there are too many clients.
        """
        if len(self._clients) >= self._max_clients:
            detail = f"{self._max_clients} clients listen to events already (KVSIGHT_MAX_EVENT_CLIENTS)"
            raise ProblemError(HTTPStatus.TOO_MANY_REQUESTS, ProblemKind.TOO_MANY_CLIENTS, detail)
        client = _Client(stream_filter, authorization)
        client.put(b": kvsight\n\n" + self._all_states(stream_filter))
        self._clients.add(client)
        try:
            async with aclosing(self._events(client)) as events:
                yield events
        finally:
            self._clients.discard(client)

    async def _events(self, client: _Client) -> AsyncGenerator[bytes]:
        while True:
            events = client.take()
            if client.is_ended:
                return
            if client.lost:
                yield _event(ClientDropped(lost=client.lost))
                return
            if events:
                yield events
                continue
            if self._is_closed:
                return
            try:
                await asyncio.wait_for(client.woken.wait(), PING_S)
            except TimeoutError:
                yield b": quiet\n\n"

    def _all_states(self, stream_filter: StreamFilter) -> bytes:
        views = [view for view in self._consumer.namespaces.views if stream_filter.matches(view.stream, _STATE)]
        for view in views:
            self._consumer.worker_log.note(view)  # so that the next change begins with the state that is sent here
        return b"".join(_event(self._state_changed(view.stream, None, self._state(view))) for view in views)

    def _state(self, view: View) -> str:
        return self._consumer.freshness.state(view).value

    # --- events -----------------------------------------------------------------------------------------------------

    def _on_applied(self, view: View, batch: DecodedBatch) -> None:
        if self._clients:
            self._send(view.stream, _BATCH, lambda: _batch_applied(view, batch, self._state(view)))

    def _on_change(self, change: WorkerChange) -> None:
        if self._clients and change.before is not change.after:
            before = None if change.before is None else change.before.value
            state = "forgotten" if change.after is None else change.after.value
            self._send(change.stream, _STATE, lambda: self._state_changed(change.stream, before, state))

    def _state_changed(self, stream: StreamId, before: str | None, state: str) -> StateChanged:
        view = self._consumer.namespaces.view(stream)
        reason = "" if view is None else self._consumer.reason(view)
        return StateChanged(**_names(stream), before=before, state=state, reason=reason)

    def _send(self, stream: StreamId, kind: str, make: Callable[[], FeedEvent]) -> None:
        listening = [client for client in self._clients if client.stream_filter.matches(stream, kind)]
        if listening:
            event = _event(make())
            for client in listening:
                client.put(event)


class _FeedResponse(StreamingResponse):
    """An answer that keeps its client connected while it is sent, and disconnects it in all cases at the end."""

    def __init__(self, feed: EventStream, stream_filter: StreamFilter) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__((), headers=headers, media_type=_MEDIA_TYPE)
        self._feed = feed
        self._filter = stream_filter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        authorization = header(scope, b"authorization") or b""
        async with self._feed.listening(self._filter, authorization) as self.body_iterator:
            await super().__call__(scope, receive, send)


def feed_routes(feed: EventStream) -> APIRouter:
    """Return the route of this module."""
    router = APIRouter(tags=["workers"])
    example = {"content": {_MEDIA_TYPE: {"schema": {"type": "string"}, "example": _EXAMPLE}}}

    @router.get("/events", response_class=StreamingResponse, responses={200: example})
    async def events(
        worker: str | None = None,
        model: str | None = None,
        tenant: str | None = None,
        kind: Literal["batch", "state"] | None = None,
    ) -> Response:
        """Return server-sent events: `batch` for each applied batch, `state` when the state of a view changes.

        The state of every view comes first. `kind` selects one of the two. A client that reads too slowly gets
        `dropped`, and its connection ends.
        """
        return _FeedResponse(feed, StreamFilter(worker, model, tenant, kind))

    return router


def _event(event: FeedEvent) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (EVENT_NAMES[type(event)], _encoder.encode(event))


def _batch_applied(view: View, batch: DecodedBatch, state: str) -> BatchApplied:
    stored, removed = batch.pages()
    return BatchApplied(
        **_names(view.stream),
        epoch=batch.epoch,
        seq=batch.seq,
        stored=stored,
        removed=removed,
        cleared=any(isinstance(step, AllBlocksCleared) for step in batch.steps),
        pages={medium.value: pages for medium, pages in zip(MEDIA, view.num_pages, strict=True)},
        state=state,
    )


def _names(stream: StreamId) -> dict[str, Any]:
    return {
        "stream": stream.key,
        "model_name": stream.model,
        "routing_group": stream.tenant,
        "instance_id": stream.worker,
        "dp_rank": stream.dp_rank,
    }
