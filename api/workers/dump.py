"""GET /dump: everything that the views hold, in Dynamo's format, as a stream."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import msgspec
import numpy as np
from fastapi import APIRouter
from starlette.responses import StreamingResponse

from api.view_source import ViewSource, stream_pages
from indexer.index import StreamPages
from indexer.namespaces import Namespace, NamespaceKey
from indexer.views import View
from kv_events.kernels.prefix_order import prefix_order

STORAGE_TIERS = ("device", "host_pinned", "disk", "external")
"""Dynamo's names of the tiers, fastest first."""

_EVENTS_PER_CHUNK = 500


def dump_routes(served: ViewSource) -> APIRouter:
    """Return the route of this module."""
    router = APIRouter(tags=["workers"])
    shown = {"m:default": {"block_size": 16, "events": [_event("worker-0", 0, "device", 101, 0)]}}
    example = {"content": {"application/json": {"schema": {"type": "object"}, "example": shown}}}

    @router.get("/dump", response_class=StreamingResponse, responses={200: example})
    async def dump() -> StreamingResponse:
        """Return a stored event for each page, worker and tier, parents before children.

        `block_hash` is the page's sequence hash, unsigned. `tokens_hash` is not known here. Events are applied while
        the dump is written: a view of at most 65,536 pages is consistent, larger views and several views are not.
        """
        return StreamingResponse(_dump(served), media_type="application/json")

    return router


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
