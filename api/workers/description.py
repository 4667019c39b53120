"""The answer of GET /workers: worker streams that have a view, and registered engines that have sent nothing yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

import msgspec
from msgspec import to_builtins

from api.queries.encoding import age_ms
from api.served_views import ViewSource
from api.workers.stream_pages import is_known
from indexer.namespaces import Namespace, NamespaceKey, Namespaces
from indexer.views import View, ViewCounters, ViewState, least_trusted
from kv_events.digest import digest_bytes, empty_digest
from kv_events.http.workers import Listener, Worker
from kv_events.schema import MEDIA
from kv_events.streams import StreamId, split_group

if TYPE_CHECKING:
    from bridge import EngineStatus

_SLICE_S = 0.001
_LINK_STATUS = {"connecting": "pending", "connected": "active"}
"""Link state -> status, in Dynamo's words; any other link state is a failure."""

_encoder = msgspec.json.Encoder()


Engines = Mapping[StreamId, "EngineStatus"]
"""Rank -> the status of the engine's reader."""


async def list_workers(
    served: ViewSource, engines: Engines, model: str | None, tenant: str | None
) -> AsyncIterator[bytes]:
    """Yield each `Worker` as JSON. Other tasks run about once a millisecond. model, tenant: None selects all."""
    unheard = unheard_ranks(served.namespaces, engines, served.now())
    readers = {rank.stream: status for status in engines.values() for rank in status.streams} | dict(engines)
    slice_began = time.perf_counter()
    for namespace in list(served.namespaces):
        if not _matches(namespace.key, model, tenant) or served.namespaces.is_group(namespace):
            continue
        for name, views in _by_worker(namespace).items():
            now = served.now()
            known = [view for view in views if is_known(served, view)]
            if known:
                listeners = {view.stream.dp_rank: _listener(served, view, readers, now) for view in known}
                listeners |= unheard.pop((namespace.key, name), {})
                groups = _groups(served, namespace, known, now)
                yield _encoder.encode(_worker(name, namespace.key, listeners, groups))
            if time.perf_counter() - slice_began > _SLICE_S:
                await asyncio.sleep(0)
                slice_began = time.perf_counter()
    for (key, name), listeners in unheard.items():
        if _matches(key, model, tenant):
            yield _encoder.encode(_worker(name, key, listeners, {}))


def _matches(key: NamespaceKey, model: str | None, tenant: str | None) -> bool:
    return model in (None, key.model) and tenant in (None, key.tenant)


def unheard_ranks(
    namespaces: Namespaces, engines: Engines, now: float
) -> dict[tuple[NamespaceKey, str], dict[int, Listener]]:
    """Return the ranks that have no view, by worker: refused ones, and registered ones that have sent nothing yet."""
    by_worker: dict[tuple[NamespaceKey, str], dict[int, Listener]] = {}
    for stream, refused in namespaces.refused.items():
        if split_group(stream.model)[1] is None:
            key = NamespaceKey(stream.model, stream.tenant, refused.block_size)
            by_worker.setdefault((key, stream.worker), {})[stream.dp_rank] = Listener(
                endpoint=stream.key,
                status="failed",
                state=ViewState.STALE.value,
                stale_reason=refused.reason,
                age_ms=age_ms(refused.heard_at, now),
                epoch=refused.epoch,
                seq=refused.seq,
                pages={medium.value: 0 for medium in MEDIA},
                digest=digest_bytes(empty_digest()).hex(),
                counters=to_builtins(ViewCounters()),
                failure=None,
            )
    for stream, status in engines.items():
        if namespaces.view(stream) is None and stream not in namespaces.refused:
            key = NamespaceKey(stream.model, stream.tenant, status.engine.block_size or 0)
            by_worker.setdefault((key, stream.worker), {})[stream.dp_rank] = Listener(
                endpoint=status.engine.endpoint,
                status=_status(status, ViewState.STALE),
                state=ViewState.STALE.value,
                stale_reason="new",
                age_ms=0,
                epoch=-1,
                seq=-1,
                pages={medium.value: 0 for medium in MEDIA},
                digest=digest_bytes(empty_digest()).hex(),
                counters=to_builtins(ViewCounters()),
                failure=status.failure,
                warning=status.warning,
            )
    return by_worker


def _by_worker(namespace: Namespace) -> dict[str, list[View]]:
    by_worker: dict[str, list[View]] = {}
    for view in sorted(namespace.views.values(), key=lambda view: view.stream):
        by_worker.setdefault(view.stream.worker, []).append(view)
    return by_worker


def _groups(served: ViewSource, namespace: Namespace, views: list[View], now: float) -> dict[str, dict[int, Listener]]:
    """Return the group streams of the worker to which the views belong."""
    groups: dict[str, dict[int, Listener]] = {}
    for name, group in sorted(namespace.groups.items()):
        for view in views:
            found = group.by_rank.get((view.stream.worker, view.stream.dp_rank))
            if found is not None:
                groups.setdefault(name, {})[view.stream.dp_rank] = _listener(served, found, {}, now)
    return groups


def _worker(
    name: str, key: NamespaceKey, ranks: Mapping[int, Listener], groups: dict[str, dict[int, Listener]]
) -> Worker:
    listeners = dict(sorted(ranks.items()))
    statuses = {each.status for each in listeners.values()}
    return Worker(
        instance_id=name,
        status=next((status for status in ("active", "pending") if status in statuses), "failed"),
        model_name=key.model,
        routing_group=key.tenant,
        block_size=key.block_size,
        endpoints={rank: each.endpoint for rank, each in listeners.items()},
        listeners=listeners,
        state=least_trusted(ViewState(each.state) for each in listeners.values()).value,
        age_ms=max(each.age_ms for each in listeners.values()),
        groups=groups,
        source="zmq" if any("://" in each.endpoint for each in listeners.values()) else "log",
    )


def _listener(served: ViewSource, view: View, readers: Engines, now: float) -> Listener:
    state, engine = served.freshness.state(view), readers.get(view.stream)
    return Listener(
        endpoint=view.stream.key if engine is None else engine.engine.endpoint,
        status=_status(engine, state),
        state=state.value,
        stale_reason=served.reason(view),
        age_ms=age_ms(view.heard_at, now),
        epoch=view.epoch,
        seq=view.next_seq - 1,
        pages={medium.value: pages for medium, pages in zip(MEDIA, view.num_pages, strict=True)},
        digest=digest_bytes(view.index.digest(view.number)).hex(),
        counters=to_builtins(view.counters),
        failure=None if engine is None else engine.failure,
        warning=None if engine is None else engine.warning,
    )


def _status(engine: EngineStatus | None, state: ViewState) -> str:
    if engine is not None:
        return _LINK_STATUS.get(engine.state.value, "failed")
    return "failed" if state is ViewState.EXPIRED else "active"
