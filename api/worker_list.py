"""What GET /workers says: every worker stream that has a view, or was registered and has still to be heard of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from api.answers import age_ms
from api.held_pages import is_known
from indexer.consumer import Consumer
from indexer.namespaces import Namespace, NamespaceKey
from indexer.views import View, ViewCounters, ViewState
from kv_events.digest import digest_bytes, empty_digest
from kv_events.schema import MEDIA
from kv_events.streams import StreamId

if TYPE_CHECKING:
    from bridge import EngineStatus

_SLICE_S = 0.001
_LINK_STATUS = {"connecting": "pending", "connected": "active"}
"""In the running peer's words; whatever else the link says is a failure."""

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Listener:
    """One DP rank's stream, as this process sees it."""

    endpoint: str
    """Address of a registered engine, also of ranks that only its batches name; else key of the stream on the log:
    tenant/model/worker/rank."""
    status: str
    """`active`, or `failed` once expired; of a registered engine also `pending` until it is connected, and `failed`
    while it cannot be reached."""
    state: ViewState
    stale_reason: str
    """Why the view is stale; "" otherwise."""
    age_ms: int
    """Since the worker was last heard of; of a bridged engine, since its bridge last heard it."""
    epoch: int
    """Incarnation of the publisher; -1: none yet."""
    seq: int
    """Number of the newest batch applied; -1: none yet."""
    pages: dict[str, int]
    """By medium."""
    digest: str
    """Hex of the 64 bytes that the publisher's batches must equal."""
    counters: ViewCounters
    failure: str | None = None
    """Why a registered engine is not read at present."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker of a namespace, in the running peer's shape, with what is added here."""

    instance_id: str
    status: str
    model_name: str
    routing_group: str
    block_size: int
    endpoints: dict[str, str]
    """By DP rank."""
    listeners: dict[str, Listener]
    """By DP rank."""
    state: ViewState
    """The least trustworthy among the ranks."""
    age_ms: int
    """The oldest among the ranks."""
    groups: dict[str, dict[str, Listener]]
    """What it says of its states and windows: by group, by DP rank. They do not count in `status`, `state` and
    `age_ms`."""
    source: str
    """`zmq`: a registered engine; `log`."""


Engines = Mapping[StreamId, "EngineStatus"]
"""By rank: who reads it."""


async def list_workers(
    consumer: Consumer, engines: Engines, model: str | None, tenant: str | None
) -> AsyncIterator[bytes]:
    """A `Worker` each, as JSON; events and other callers get through in between. model, tenant: None: any."""
    unheard = _unheard(consumer, engines)
    readers = {rank.stream: status for status in engines.values() for rank in status.streams} | dict(engines)
    slice_began = time.perf_counter()
    for namespace in list(consumer.namespaces):
        if not _is_wanted(namespace.key, model, tenant) or consumer.namespaces.is_group(namespace):
            continue
        for name, views in _by_worker(namespace).items():
            now = time.time()
            known = [view for view in views if is_known(consumer, view)]
            if known:
                listeners = {view.stream.dp_rank: _listener(consumer, view, readers, now) for view in known}
                listeners |= unheard.pop((namespace.key, name), {})
                groups = _groups(consumer, namespace, known, now)
                yield _encoder.encode(_worker(name, namespace.key, listeners, groups))
            if time.perf_counter() - slice_began > _SLICE_S:
                await asyncio.sleep(0)
                slice_began = time.perf_counter()
    for (key, name), listeners in unheard.items():
        if _is_wanted(key, model, tenant):
            yield _encoder.encode(_worker(name, key, listeners, {}))


def _is_wanted(key: NamespaceKey, model: str | None, tenant: str | None) -> bool:
    return model in (None, key.model) and tenant in (None, key.tenant)


def _unheard(consumer: Consumer, engines: Engines) -> dict[tuple[NamespaceKey, str], dict[int, Listener]]:
    """Registered ranks without a view, by worker."""
    by_worker: dict[tuple[NamespaceKey, str], dict[int, Listener]] = {}
    for stream, status in engines.items():
        if consumer.namespaces.view(stream) is None:
            key = NamespaceKey(stream.model, stream.tenant, status.engine.block_size or 0)
            by_worker.setdefault((key, stream.worker), {})[stream.dp_rank] = Listener(
                endpoint=status.engine.endpoint,
                status=_status(status, ViewState.STALE),
                state=ViewState.STALE,
                stale_reason="new",
                age_ms=0,
                epoch=-1,
                seq=-1,
                pages={medium.value: 0 for medium in MEDIA},
                digest=digest_bytes(empty_digest()).hex(),
                counters=ViewCounters(),
                failure=status.failure,
            )
    return by_worker


def _by_worker(namespace: Namespace) -> dict[str, list[View]]:
    by_worker: dict[str, list[View]] = {}
    for view in sorted(namespace.views.values(), key=lambda view: view.stream):
        by_worker.setdefault(view.stream.worker, []).append(view)
    return by_worker


def _groups(consumer: Consumer, namespace: Namespace, views: list[View], now: float) -> dict[str, dict[str, Listener]]:
    """Of the worker to which the views belong."""
    groups: dict[str, dict[str, Listener]] = {}
    for name, group in sorted(namespace.groups.items()):
        for view in views:
            found = group.by_rank.get((view.stream.worker, view.stream.dp_rank))
            if found is not None:
                groups.setdefault(name, {})[str(view.stream.dp_rank)] = _listener(consumer, found, {}, now)
    return groups


def _worker(
    name: str, key: NamespaceKey, ranks: Mapping[int, Listener], groups: dict[str, dict[str, Listener]]
) -> Worker:
    listeners = {str(rank): listener for rank, listener in sorted(ranks.items())}
    statuses = {each.status for each in listeners.values()}
    return Worker(
        instance_id=name,
        status=next((status for status in ("active", "pending") if status in statuses), "failed"),
        model_name=key.model,
        routing_group=key.tenant,
        block_size=key.block_size,
        endpoints={rank: each.endpoint for rank, each in listeners.items()},
        listeners=listeners,
        state=max((each.state for each in listeners.values()), key=tuple(ViewState).index),
        age_ms=max(each.age_ms for each in listeners.values()),
        groups=groups,
        source="zmq" if any("://" in each.endpoint for each in listeners.values()) else "log",
    )


def _listener(consumer: Consumer, view: View, readers: Engines, now: float) -> Listener:
    state, engine = consumer.freshness.state(view), readers.get(view.stream)
    return Listener(
        endpoint=view.stream.key if engine is None else engine.engine.endpoint,
        status=_status(engine, state),
        state=state,
        stale_reason=view.distrust,
        age_ms=age_ms(view.heard_at, now),
        epoch=view.epoch,
        seq=view.next_seq - 1,
        pages={medium.value: pages for medium, pages in zip(MEDIA, view.num_pages, strict=True)},
        digest=digest_bytes(view.index.digest(view.number)).hex(),
        counters=view.counters,
        failure=None if engine is None else engine.failure,
    )


def _status(engine: EngineStatus | None, state: ViewState) -> str:
    if engine is not None:
        return _LINK_STATUS.get(engine.state.value, "failed")
    return "failed" if state is ViewState.EXPIRED else "active"
