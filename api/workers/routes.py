"""Routes about workers: the list, the pages of one view, a resync on demand, and a dump of all views."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from heapq import nsmallest
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import numpy as np
from fastapi import APIRouter, Query, Request
from msgspec import UNSET
from starlette.responses import Response, StreamingResponse

from analysis.diff import media_of
from api.openapi import answers, body_of, problem
from api.problems import ProblemError, ProblemKind
from api.queries.answers import age_ms
from api.queries.body_formats import decode_as, format_of
from api.queries.routes import json_response, read_body
from api.view_source import ViewSource, is_known, stream_pages
from api.workers.description import list_workers
from indexer.index import StreamPages
from indexer.namespaces import Namespace, NamespaceKey
from indexer.views import View
from kv_events.http.workers import RadixView, ResyncAccepted, ViewPage, Worker, WorkerRecord
from kv_events.kernels.prefix_order import prefix_order
from kv_events.limits import MAX_DP_RANK
from kv_events.streams import StreamId, split_group

if TYPE_CHECKING:
    from api.workers.records import WorkerRecords
    from api.workers.registrations import Registrations

MAX_PAGES_PER_ANSWER = 10_000
MAX_BODY_BYTES = 64 * 1024
STORAGE_TIERS = ("device", "host_pinned", "disk", "external")
"""Dynamo's names of the tiers, fastest first."""
_T = TypeVar("_T")
_MAX_NAMES = 20
_EVENTS_PER_CHUNK = 500

_BAD_PARAMETER = problem(422, "A parameter is invalid")
_UNKNOWN_WORKER = problem(404, "No stream of this worker matches")

RankFilter = Annotated[int | None, Query(ge=0, le=MAX_DP_RANK)]


def worker_routes(
    served: ViewSource,
    registrations: Registrations | None = None,
    demand_resync: Callable[[View], None] | None = None,
    records: WorkerRecords | None = None,
) -> APIRouter:
    """Return the routes. They are coroutines, because they read the views in the event loop that changes them.

    demand_resync: asks the publisher of a view to resend everything. None: no publisher listens, so there is no route.
    records: of workers. None: they cannot be changed.
    """
    router = APIRouter(tags=["workers"])

    @router.get("/workers", response_class=Response, responses=answers(list[Worker], "The workers"))
    async def workers(model_name: str | None = None, routing_group: str | None = None) -> Response:
        """Return every worker with the state of each of its ranks, or an empty list.

        Group streams are shown with their worker, not as models of their own.
        """
        engines = {} if registrations is None else registrations.status()
        known = [] if records is None else records.all()
        found = [worker async for worker in list_workers(served, engines, known, model_name, routing_group)]
        return json_response(b"[" + b",".join(found) + b"]")

    # worker names may contain slashes
    @router.get(
        "/workers/{worker:path}/view",
        response_class=Response,
        responses={
            **answers(RadixView, "A part of the view"),
            **problem(400, "More than one stream matches"),
            **_UNKNOWN_WORKER,
            **_BAD_PARAMETER,
        },
    )
    async def view(
        worker: str,
        dp_rank: RankFilter = None,
        model: str | None = None,
        tenant: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGES_PER_ANSWER)] = 1000,
        cursor: Annotated[int, Query(ge=0, le=2**31)] = 0,
    ) -> Response:
        """Return the pages of a worker stream, `limit` at a time, in no particular order.

        Each page of a worker with group streams names those that hold it. `model` may name a group stream: `m#mamba`.
        """
        views = selected_views(served, worker, dp_rank, model, tenant)
        selected = [view for view in views if view.stream.model in (model, _base_model(view))]
        found = _single(selected or views, worker)
        return json_response(await _radix_view(served, found, limit, cursor))

    _add_dump_route(router, served)
    if records is not None:
        _add_record_routes(router, records)
    if demand_resync is None:
        return router

    @router.post(
        "/workers/{worker:path}/resync",
        status_code=HTTPStatus.ACCEPTED,
        response_class=Response,
        responses={
            **answers(ResyncAccepted, "The streams that will be asked", HTTPStatus.ACCEPTED),
            **_UNKNOWN_WORKER,
            **_BAD_PARAMETER,
        },
    )
    async def resync(
        worker: str, dp_rank: RankFilter = None, model: str | None = None, tenant: str | None = None
    ) -> Response:
        """Ask a worker's publishers to resend everything they hold as soon as possible, including group streams."""
        views = selected_views(served, worker, dp_rank, model, tenant)
        for each in views:
            demand_resync(each)
        accepted = ResyncAccepted(streams=[each.stream.key for each in views])
        return json_response(accepted, HTTPStatus.ACCEPTED)

    return router


def _add_dump_route(router: APIRouter, served: ViewSource) -> None:
    shown = {"m:default": {"block_size": 16, "events": [_event("worker-0", 0, "device", 101, 0)]}}
    example = {"content": {"application/json": {"schema": {"type": "object"}, "example": shown}}}

    @router.get("/dump", response_class=StreamingResponse, responses={200: example})
    async def dump() -> StreamingResponse:
        """Return a stored event for each page, worker and tier, parents before children.

        `block_hash` is the page's sequence hash, unsigned. `tokens_hash` is not known here. Events are applied while
        the dump is written: a view of at most 65,536 pages is consistent, larger views and several views are not.
        """
        return StreamingResponse(_dump(served), media_type="application/json")


def _add_record_routes(router: APIRouter, records: WorkerRecords) -> None:
    example = {"worker_id": 1, "model_name": "my-model", "block_size": 16, "endpoint": "http://10.0.0.1:8000"}
    body = body_of(WorkerRecord, example)  # before the answers: requests need not have all fields of answers
    changes = body_of(WorkerRecord, {"lifecycle": "draining"})
    record = answers(WorkerRecord, "The record")
    unknown = problem(404, "The worker has no record")
    faulty = problem(403, "The service may not connect to an address") | problem(409, "A limit is reached")
    faulty |= problem(422, "A field is invalid")

    async def received(request: Request, kind: type[_T]) -> _T:
        body_format = format_of(request.headers.get("content-type"))
        text = await read_body(request, MAX_BODY_BYTES)
        return decode_as(kind, text, body_format)

    @router.post("/workers", status_code=201, responses={201: record[200], **faulty}, openapi_extra=body)
    async def put(request: Request) -> Response:
        """Add or replace the record of a worker, and read the engines whose addresses it names.

        A record that lacks something is kept as `incomplete`, with the reasons.
        """
        return json_response(await records.put(await received(request, WorkerRecord)), HTTPStatus.CREATED)

    @router.patch("/workers/{worker:path}", responses={**record, **unknown, **faulty}, openapi_extra=changes)
    async def patch(worker: str, request: Request) -> Response:
        """Change fields of a record. null leaves a field. `{"lifecycle": "draining"}` keeps new requests away."""
        return json_response(await records.patch(worker, await received(request, dict[str, Any])))

    @router.delete("/workers/{worker:path}", responses={**record, **unknown})
    async def delete(worker: str) -> Response:
        """Forget the record of a worker, stop reading its engines, and drop their pages."""
        return json_response(await records.remove(worker))


def selected_views(
    served: ViewSource, worker: str, dp_rank: int | None, model: str | None, tenant: str | None
) -> list[View]:
    """Return the views that a caller selects, including group streams. Raises ProblemError (404) if there is none."""
    found = [
        view
        for view in served.namespaces.views
        if view.stream.worker == worker
        and dp_rank in (None, view.stream.dp_rank)
        and model in (None, view.stream.model, _base_model(view))
        and tenant in (None, view.stream.tenant)
    ]
    if found:
        return found
    known = [view.stream for view in served.namespaces.views]
    detail = f"no stream of worker {worker[:80]!r} fits; known (tenant/model/worker/rank): {_listed(known)}"
    raise ProblemError(404, ProblemKind.UNKNOWN_WORKER, detail, "worker", worker)


def _base_model(view: View) -> str:
    return split_group(view.stream.model)[0]


def _single(views: list[View], worker: str) -> View:
    if len(views) == 1:
        return views[0]
    names = _listed([view.stream for view in views])
    detail = f"worker {worker[:80]!r} has {len(views)} streams ({names}): say dp_rank, model or tenant"
    raise ProblemError(400, ProblemKind.AMBIGUOUS_WORKER, detail, "worker", worker)


def _listed(streams: list[StreamId]) -> str:
    more = f" and {len(streams) - _MAX_NAMES} more" if len(streams) > _MAX_NAMES else ""
    return (", ".join(stream.key for stream in nsmallest(_MAX_NAMES, streams)) or "none") + more


async def _radix_view(served: ViewSource, view: View, limit: int, cursor: int) -> RadixView:
    """Return up to `limit` pages from `cursor` on. Raises ProblemError (404) if the stream is forgotten."""
    block_size = view.block_size
    groups = served.namespaces.group_views(view.stream)
    pages: list[ViewPage] = []
    next_cursor = None
    passed = 0
    async for held in stream_pages(served, view):
        start = max(0, cursor - passed)
        part = slice(start, start + limit - len(pages))
        columns = (held.hashes[part].tolist(), held.parents[part].tolist(), held.tiers[part].tolist())
        hashes = np.ascontiguousarray(held.hashes[part])
        in_groups = {name: each.index.tiers_held(hashes, each.number).tolist() for name, each in groups.items()}
        for i, row in enumerate(zip(*columns, strict=True)):
            pages.append(_view_page(*row, {name: tiers[i] for name, tiers in in_groups.items()}))
        passed += len(held.hashes)
        if len(pages) == limit and passed > cursor + limit:
            next_cursor = cursor + limit
            break
    if not is_known(served, view):
        detail = f"{view.stream.key} was forgotten while its pages were read"
        raise ProblemError(404, ProblemKind.UNKNOWN_WORKER, detail, "worker", view.stream.worker)
    return RadixView(
        model_name=view.stream.model,
        routing_group=view.stream.tenant,
        block_size=block_size,
        dp_rank=view.stream.dp_rank,
        state=served.freshness.state(view).value,
        age_ms=age_ms(view.last_batch_at, served.now()),
        epoch=view.epoch,
        seq=view.next_seq - 1,
        num_pages=len(pages),
        pages=pages,
        next_cursor=next_cursor,
    )


def _view_page(sequence_hash: int, parent: int, tiers: int, in_groups: dict[str, int]) -> ViewPage:
    groups = {name: media_of(each) for name, each in in_groups.items()}
    return ViewPage(sequence_hash=sequence_hash, parent=parent or None, media=media_of(tiers), groups=groups or UNSET)


async def _dump(served: ViewSource) -> AsyncIterator[bytes]:
    namespaces = list(served.namespaces)
    names = Counter(_name(namespace.key) for namespace in namespaces)
    yield b"{"
    for number, namespace in enumerate(namespaces):
        name = _name(namespace.key)
        if names[name] > 1:
            name = f"{name}:{namespace.key.block_size}"
        yield (b"," if number else b"") + msgspec.json.encode(name)
        yield b':{"block_size":%d,"events":[' % namespace.key.block_size
        separator = b""
        async for chunk in _chunks(served, namespace):
            yield separator + chunk
            separator = b","
        yield b"]}"
    yield b"}"


def _name(key: NamespaceKey) -> str:
    return f"{key.model}:{key.tenant}"


async def _chunks(served: ViewSource, namespace: Namespace) -> AsyncIterator[bytes]:
    """Yield the events of every view, a few hundred at a time, separated by commas."""
    for view in list(namespace.views.values()):
        slices = [held async for held in stream_pages(served, view)]
        if not slices:
            continue
        held = StreamPages(*(np.concatenate(column) for column in zip(*slices, strict=True)))
        # sorting takes too long for the event loop
        order = await asyncio.to_thread(prefix_order, held.hashes, held.parents)
        for start in range(0, len(order), _EVENTS_PER_CHUNK):
            part = order[start : start + _EVENTS_PER_CHUNK]
            events = _events(view, StreamPages(held.hashes[part], held.parents[part], held.tiers[part]))
            yield msgspec.json.encode(list(events))[1:-1]
            await asyncio.sleep(0)


def _events(view: View, held: StreamPages) -> Iterator[object]:
    rows = zip(held.hashes.tolist(), held.parents.tolist(), held.tiers.tolist(), strict=True)
    for sequence_hash, parent, tiers in rows:
        for tier, name in enumerate(STORAGE_TIERS):
            if tiers >> tier & 1:
                yield _event(view.stream.worker, view.stream.dp_rank, name, sequence_hash, parent)


def _event(worker: str, dp_rank: int, tier: str, sequence_hash: int, parent: int) -> object:
    block = {"block_hash": sequence_hash, "tokens_hash": None, "mm_extra_info": None}
    stored = {"parent_hash": parent or None, "start_position": None, "blocks": [block]}
    event = {"event_id": 0, "data": {"stored": stored}, "dp_rank": dp_rank}
    return {"worker_id": worker, "storage_tier": tier, "residency_domain": "worker", "event": event}
