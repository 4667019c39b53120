"""The workers: their streams that have a view, and registered engines that have sent nothing yet; GET /workers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import structs, to_builtins

from api.queries.answers import age_ms
from api.selection.answers import worker_name
from api.view_source import ViewSource
from indexer.namespaces import Namespace, NamespaceKey, Namespaces
from indexer.slices import Slices
from indexer.views import View, ViewCounters, ViewState, least_trusted
from kv_events.digest import digest_bytes, empty_digest
from kv_events.http.workers import Listener, Worker, WorkerRecord
from kv_events.remedies import remedy
from kv_events.schema import BATCHES_LOST, ENGINE_UNHEARD, MEDIA
from kv_events.streams import StreamId, split_group

if TYPE_CHECKING:
    from bridge import EngineStatus

_LINK_STATUS = {"connecting": "pending", "connected": "active"}
"""Link state -> status, in Dynamo's words; any other link state is a failure."""

_encoder = msgspec.json.Encoder()

Engines = Mapping[StreamId, "EngineStatus"]
"""Rank -> the status of the engine's reader."""


def _cause(reason: str, stream: StreamId, engine: EngineStatus | None) -> dict[str, Any]:
    """Return the fields `cause`, `cause_since` and `remedy` of a listener: what is known best.

    reason: why the view is not live; "new": it has no batch. engine: its reader.
    """
    text, since = reason, None
    if engine is not None:
        is_unheard, missed = reason in (ENGINE_UNHEARD, "new"), engine.missed.get(stream.worker)
        if engine.down_s is not None and is_unheard:
            text = engine.failure or f"{engine.engine.endpoint}: not connected yet"
            since = time.time() - engine.down_s
        elif engine.failure is not None or is_unheard:
            text = engine.failure or "connected, but nothing has arrived since"
        elif missed is not None and reason.startswith(BATCHES_LOST):
            text, since = str(missed), missed.since
    return {"cause": text, "cause_since": since, "remedy": remedy(text)}


def readers_of(engines: Engines) -> dict[StreamId, EngineStatus]:
    """Return the reader of each stream: of registered ranks, and of those that only batches name."""
    return {rank.stream: status for status in engines.values() for rank in status.streams} | dict(engines)


class WorkerStreams(NamedTuple):
    """The streams of one worker of a namespace."""

    key: NamespaceKey
    name: str
    views: list[View]
    """Of its ranks, in their order."""
    groups: list[tuple[str, View]]
    """Group streams of these ranks, each with the name of its group, by which they are sorted."""
    unheard: dict[int, Listener]
    """Ranks that have no view: refused ones, and registered ones that have sent nothing yet."""


def worker_streams(served: ViewSource, engines: Engines) -> Iterator[WorkerStreams]:
    """Yield every worker. Other tasks may run, and views may be forgotten, between two of them."""
    namespaces = served.namespaces
    unheard = _unheard_ranks(namespaces, engines, served.now())
    for namespace in list(namespaces):
        if namespaces.is_group(namespace):
            continue
        for name, views in _by_worker(namespace).items():
            known = [view for view in views if namespaces.view(view.stream) is view]
            if known:
                of_ranks = [namespaces.group_views(view.stream) for view in known] if namespace.groups else []
                groups = sorted((pair for each in of_ranks for pair in each.items()), key=itemgetter(0))
                yield WorkerStreams(namespace.key, name, known, groups, unheard.pop((namespace.key, name), {}))
    for (key, name), ranks in unheard.items():
        yield WorkerStreams(key, name, [], [], ranks)


async def list_workers(
    served: ViewSource, engines: Engines, records: Iterable[WorkerRecord], model: str | None, tenant: str | None
) -> AsyncIterator[bytes]:
    """Yield each `Worker` as JSON. Other tasks run about once a millisecond. model, tenant: None selects all.

    records: of workers, also of those without streams.
    """
    readers = readers_of(engines)
    slices = Slices()
    for worker, record in _with_records(worker_streams(served, engines), records):
        if model in (None, worker.key.model) and tenant in (None, worker.key.tenant):
            yield _encoder.encode(_worker(served, worker, record, readers))
        await slices.yield_if_due()


def _with_records(
    workers: Iterable[WorkerStreams], records: Iterable[WorkerRecord]
) -> Iterator[tuple[WorkerStreams, WorkerRecord]]:
    known = {(each.model_name, each.routing_group, str(each.worker_id)): each for each in records}
    left = dict(known)
    for worker in workers:
        model, tenant, _ = worker.key
        left.pop((model, tenant, worker.name), None)
        without = WorkerRecord(worker_id=worker_name(worker.name), model_name=model, routing_group=tenant)
        yield worker, known.get((model, tenant, worker.name), without)
    for (model, tenant, name), record in left.items():
        yield WorkerStreams(NamespaceKey(model, tenant, record.block_size or 0), name, [], [], {}), record


def _unheard_ranks(
    namespaces: Namespaces, engines: Engines, now: float
) -> dict[tuple[NamespaceKey, str], dict[int, Listener]]:
    by_worker: dict[tuple[NamespaceKey, str], dict[int, Listener]] = {}

    def add(stream: StreamId, block_size: int, **fields: Any) -> None:
        key = NamespaceKey(stream.model, stream.tenant, block_size), stream.worker
        by_worker.setdefault(key, {})[stream.dp_rank] = Listener(
            state=ViewState.STALE.value,
            pages={medium.value: 0 for medium in MEDIA},
            digest=digest_bytes(empty_digest()).hex(),
            counters=to_builtins(ViewCounters()),
            **_cause(fields["stale_reason"], stream, engines.get(stream)),
            **fields,
        )

    for stream, refused in namespaces.refused.items():
        if split_group(stream.model)[1] is None:
            add(
                stream,
                refused.block_size,
                endpoint=stream.key,
                status="failed",
                stale_reason=refused.reason,
                age_ms=age_ms(refused.last_batch_at, now),
                epoch=refused.epoch,
                seq=refused.seq,
            )
    for stream, status in engines.items():
        is_worker = status.engine.worker is not None or status.failure is not None
        if is_worker and namespaces.view(stream) is None and stream not in namespaces.refused:
            add(
                stream,
                status.engine.block_size or 0,
                endpoint=status.engine.endpoint,
                status=_status(status, ViewState.STALE),
                stale_reason="new",
                age_ms=0,
                epoch=-1,
                seq=-1,
                failure=status.failure,
                warning=status.warning,
            )
    return by_worker


def _by_worker(namespace: Namespace) -> dict[str, list[View]]:
    by_worker: dict[str, list[View]] = {}
    for view in sorted(namespace.views.values(), key=lambda view: view.stream):
        by_worker.setdefault(view.stream.worker, []).append(view)
    return by_worker


def _worker(served: ViewSource, worker: WorkerStreams, record: WorkerRecord, readers: Engines) -> Worker:
    key = worker.key
    known = {view.stream.dp_rank: listener_of(served, view, readers) for view in worker.views}
    listeners = dict(sorted((known | worker.unheard).items()))
    groups: dict[str, dict[int, Listener]] = {}
    for group, view in worker.groups:
        groups.setdefault(group, {})[view.stream.dp_rank] = listener_of(served, view, {})
    statuses = {each.status for each in listeners.values()} or {"pending"}
    return Worker(
        **(structs.asdict(record) | {"block_size": key.block_size}),
        instance_id=worker.name,
        status=next((status for status in ("active", "pending") if status in statuses), "failed"),
        endpoints={rank: each.endpoint for rank, each in listeners.items()},
        listeners=listeners,
        state=least_trusted([ViewState(each.state) for each in listeners.values()] or [ViewState.STALE]).value,
        age_ms=max((each.age_ms for each in listeners.values()), default=0),
        groups=groups,
        source="zmq" if any("://" in each.endpoint for each in listeners.values()) else "log",
    )


def listener_of(served: ViewSource, view: View, readers: Engines) -> Listener:
    """Return what is known of a stream. readers: see `readers_of`."""
    state, engine, reason = served.freshness.state(view), readers.get(view.stream), served.reason(view)
    cause = {} if state is ViewState.LIVE else _cause(reason, view.stream, engine)
    return Listener(
        endpoint=view.stream.key if engine is None else engine.engine.endpoint,
        status=_status(engine, state),
        state=state.value,
        stale_reason=reason,
        age_ms=age_ms(view.last_batch_at, served.now()),
        epoch=view.epoch,
        seq=view.next_seq - 1,
        pages={medium.value: pages for medium, pages in zip(MEDIA, view.num_pages, strict=True)},
        digest=digest_bytes(view.index.digest(view.number)).hex(),
        counters=to_builtins(view.counters),
        failure=None if engine is None else engine.failure,
        warning=None if engine is None else engine.warning,
        **cause,
    )


def _status(engine: EngineStatus | None, state: ViewState) -> str:
    if engine is not None:
        return _LINK_STATUS.get(engine.state.value, "failed")
    return "failed" if state is ViewState.EXPIRED else "active"
