"""GET /fleet: all workers, those in trouble first, and whether their views are true.

The verdict is one or two sentences that a person on call can act on.
"""

from collections import Counter
from collections.abc import Generator
from typing import NamedTuple

import msgspec
import numpy as np

from api.page.state import PageState
from api.page.worker_history import INTERVAL_S, WorkerHistory
from api.workers.description import Engines, WorkerStreams, listener_of, readers_of, worker_streams
from indexer.freshness import NO_HEARTBEAT
from indexer.tenants import TENANT_STREAMS
from indexer.views import INDEX_FULL, TENANT_PAGES, View, ViewState, least_trusted
from kv_events.http.fleet import Fleet, FleetRank, FleetWorker, StateChange
from kv_events.http.workers import Listener
from kv_events.runtime.words import count, duration, natural_order
from kv_events.schema import BATCHES_LOST, CLOSED, LEDGER_FULL, MEDIA, counted_reason
from kv_events.streams import StreamId
from selection.book import Booked

_MAX_CHANGES = 30
_MAIN = ""

_encoder = msgspec.json.Encoder()


class FleetAnswer(NamedTuple):
    """All workers of a scene, of which each viewer asks for some."""

    fleet: Fleet
    """Without workers."""
    workers: list[tuple[str, msgspec.Raw]]
    """Name and JSON of each worker, in the order of the answer."""

    def select(self, limit: int, contains: str, worker: str | None) -> bytes:
        """Return `Fleet` as JSON, with at most `limit` workers.

        contains: a part of their names, in any case. worker: their name. None: any.
        """
        part = contains.lower()
        found = [each for name, each in self.workers if part in name.lower() and worker in (None, name)]
        fields = msgspec.structs.asdict(self.fleet)
        return _encoder.encode({**fields, "num_selected": len(found), "workers": found[:limit]})


def describe_fleet(scene: PageState) -> Generator[None, None, FleetAnswer]:
    """Describe all workers, one in each step."""
    now = scene.views.now()
    readers = readers_of(scene.engines)
    workers = []
    for streams in worker_streams(scene.views, scene.engines):
        workers.append(_worker(scene, streams, readers))
        yield
    workers.sort(key=_order)
    encoded = []
    for worker in workers:
        encoded.append((worker.worker, msgspec.Raw(_encoder.encode(worker))))
        yield
    level, parts = verdict(workers, now, scene.views.why_not_ready(), scene.next_step)
    fleet = Fleet(
        time=now,
        is_past=scene.is_past,
        level=level,
        verdict=parts,
        states=Counter(worker.state for worker in workers),
        num_workers=len(workers),
        num_selected=len(workers),
        duplicated=_duplicated(scene),
        interval_s=INTERVAL_S,
        workers=[],
    )
    return FleetAnswer(fleet, encoded)


def _order(worker: FleetWorker) -> tuple[object, ...]:
    """Worse ones first, then by name, in which numbers count as numbers."""
    name = natural_order(worker.worker)
    return severity(worker), -worker.missing_batches, name, worker.model, worker.tenant, worker.block_size


def _worker(scene: PageState, streams: WorkerStreams, readers: Engines) -> FleetWorker:
    views, key, watch = streams.views, streams.key, scene.watch
    worker = StreamId(key.model, key.tenant, streams.name, 0)
    ranks = [_rank(scene, view.stream, listener_of(scene.views, view, readers), view) for view in views]
    ranks += [_rank(scene, worker._replace(dp_rank=rank), each) for rank, each in streams.unheard.items()]
    of_groups = [
        _rank(scene, view.stream, listener_of(scene.views, view, {}), view, group) for group, view in streams.groups
    ]
    state = least_trusted(ViewState(each.state) for each in ranks).value
    worst = next(each for each in ranks if each.state == state)
    agreed = [each.agreed_at for each in ranks]
    stored, removed = _rates(watch, views)
    held = sum(sum(view.num_pages) for view in views)
    engines = [scene.engines.get(worker._replace(dp_rank=each.dp_rank)) for each in ranks]
    return FleetWorker(
        worker=streams.name,
        model=key.model,
        tenant=key.tenant,
        block_size=key.block_size,
        state=state,
        reason=worst.reason,
        endpoint=worst.endpoint,
        cause=worst.cause,
        remedy=worst.remedy,
        can_resync=not scene.is_past and any(_can_resync(scene, view) for view in views),
        can_forget=any(each is not None and each.engine.worker is not None for each in engines)
        or (scene.can_forget_expired and all(each.state == ViewState.EXPIRED.value for each in ranks)),
        since=worst.since,
        age_s=worst.age_s,
        agreed_at=None if None in agreed else min(each for each in agreed if each is not None),
        missing_batches=sum(each.missing_batches for each in ranks),
        is_resync_requested=any(each.is_resync_requested for each in ranks),
        pages={medium.value: sum(each.pages[medium.value] for each in ranks) for medium in MEDIA},
        capacity=_capacity(scene, views, ranks, key.block_size),
        booked=_booked(scene, views),
        lifetime_s=held * len(removed) / sum(removed) if sum(removed) else None,
        lifetime_p50_s=watch.median_lifetime_s(view.stream for view in views),
        peak_pages=sum(max(watch.peak_pages(view.stream), sum(view.num_pages)) for view in views),
        stored=stored,
        removed=removed,
        batches=sum(view.counters.batches for view in views),
        resyncs=sum(view.counters.resyncs for view in views),
        gaps=sum(view.counters.gaps for view in views),
        restarts=sum(view.counters.restarts for view in views),
        ranks=ranks + of_groups,
        changes=_changes(watch, views),
    )


def _booked(scene: PageState, views: list[View]) -> dict[str, int]:
    booked = [scene.booked(view.stream) for view in views]
    return dict(zip(Booked._fields, map(sum, zip(*booked, strict=True)), strict=False)) if any(map(any, booked)) else {}


def _capacity(scene: PageState, views: list[View], ranks: list[FleetRank], block_size: int) -> dict[str, int]:
    rooms = [scene.capacity(view.stream, block_size) for view in views]
    if len(rooms) < len(ranks):
        return {}  # a rank is not heard yet
    return {
        each.value: sum(room[each.value] for room in rooms) for each in MEDIA if all(each in room for room in rooms)
    }


def _duplicated(scene: PageState) -> float:
    namespaces = [each for each in scene.views.namespaces if not scene.views.namespaces.is_group(each)]
    held = sum(sum(view.num_pages) for each in namespaces for view in each.views.values())
    return max(0.0, 1 - sum(each.index.num_pages for each in namespaces) / held) if held else 0.0


def _lost_by_engine(view: View) -> int:
    """Return the batches that the publisher, which forwards them from its engine, reports as lost."""
    kind, number = counted_reason(view.degraded_reason)
    return number if kind == BATCHES_LOST else 0


def _rates(watch: WorkerHistory, views: list[View]) -> tuple[list[float], list[float]]:
    if not views:
        return [], []
    total = np.sum([watch.rates(view.stream) for view in views], axis=0).round(1)
    return total[:, 0].tolist(), total[:, 1].tolist()


def _changes(watch: WorkerHistory, views: list[View]) -> list[StateChange]:
    changes = [change for view in views for change in watch.changes(view.stream)]
    return sorted(changes, key=lambda each: -each.time)[:_MAX_CHANGES]


def _can_resync(scene: PageState, view: View) -> bool:
    """Return whether a publisher listens, and would send other pages than the view has."""
    return scene.views.freshness.state(view) is not ViewState.EXPIRED and not view.degraded_reason


def _rank(
    scene: PageState, stream: StreamId, listener: Listener, view: View | None = None, group: str = _MAIN
) -> FleetRank:
    """view: of the stream. None: it has none."""
    changes, reason = scene.watch.changes(stream), listener.stale_reason
    if view is None:
        reason = listener.failure or ("not heard yet" if reason == "new" else reason)
    return FleetRank(
        dp_rank=stream.dp_rank,
        group=group,
        stream=stream.key,
        state=listener.state,
        reason=reason,
        endpoint=listener.endpoint if "://" in listener.endpoint else "",
        cause=listener.cause,
        remedy=listener.remedy,
        since=listener.cause_since or (changes[0].time if changes else None),
        age_s=listener.age_ms / 1000,
        agreed_at=None if view is None else view.agreed_at or None,
        missing_batches=0 if view is None else view.missing_batches + _lost_by_engine(view),
        is_resync_requested=view is not None and scene.is_resync_requested(view),
        epoch=listener.epoch,
        seq=listener.seq,
        pages=listener.pages,
    )


OK, WARNING, TROUBLE, EMPTY, STARTING = "ok", "warning", "trouble", "empty", "starting"

_TROUBLE = {ViewState.STALE: 0, ViewState.EXPIRED: 1, ViewState.SYNCING: 2, ViewState.LIVE: 4}
_LEFT = 3
_REASONS = {
    "new": "its first batches are not complete",
    "gap": "batches were lost",
    "digest": "its digest differs from the engine's",
    "restart": "its engine or publisher restarted",
    LEDGER_FULL: "its publisher's ledger was full, and left pages out",
    INDEX_FULL: "the index is full",
    TENANT_PAGES: "its tenant holds as many pages as it may",
    TENANT_STREAMS: "its tenant has as many worker streams as it may",
}


def severity(worker: FleetWorker) -> int:
    """Return the rank of a worker by severity: 0 is the worst, 4 is live."""
    return _LEFT if worker.reason == CLOSED else _TROUBLE[ViewState(worker.state)]


def verdict(
    workers: list[FleetWorker], now: float, why_not_ready: str, next_step: str
) -> tuple[str, list[str | float]]:
    """Return `Fleet.level` and `Fleet.verdict`. workers: those in trouble first. why_not_ready: or "".

    next_step: what to do without a worker.
    """
    if why_not_ready:
        known = f"{count(len(workers), 'worker')} known so far." if workers else "No worker is known yet."
        return STARTING, [f"Not ready: {why_not_ready}. {known}"]
    if not workers:
        return EMPTY, [f"No worker is known: {next_step}."]
    live = [worker for worker in workers if worker.state == ViewState.LIVE.value]
    if len(live) < len(workers):
        level = TROUBLE if severity(workers[0]) < _TROUBLE[ViewState.SYNCING] else WARNING
        worst = workers[0]
        remedy = f" {worst.remedy}" if worst.remedy and not worst.is_resync_requested and level == TROUBLE else ""
        return level, [*_about(worst), remedy, _about_others(len(workers), len(live))]
    agreed = min(worker.agreed_at or 0.0 for worker in live)
    text = f"{len(live):,} of {len(live):,} workers live. Views equal what the engines reported as of "
    text += f"{duration(round(max(0.0, now - agreed) * 1000))} ago (digests)."
    broken = sum(each.state != ViewState.LIVE.value for worker in live for each in worker.ranks)
    if broken:
        return WARNING, [f"{text} {broken:,} group stream{'s are' if broken > 1 else ' is'} not live."]
    return OK, [text]


def _about(worker: FleetWorker) -> list[str | float]:
    pages, name = sum(worker.pages.values()), worker.worker
    if worker.reason == CLOSED:
        return [f"{name} left", *_since(" at ", worker), ": its publisher was closed. Answers leave it out."]
    if worker.state == ViewState.EXPIRED.value:
        silent = f": silent for {duration(round(worker.age_s * 1000))}. Answers leave it out."
        return [f"{name} expired", *_since(" at ", worker), silent]
    if worker.state == ViewState.SYNCING.value:
        return [f"{name} is being resynchronised; answers use its {count(pages, 'page')} until the resync ends."]
    if worker.endpoint and worker.endpoint not in worker.cause:
        name += f" ({worker.endpoint})"
    used = f". Answers still use {pages:,} of its pages." if pages else ". Answers have none of its pages."
    return [f"{name} stale", *_since(" since ", worker), f": {_why(worker)}{used}"]


def _since(word: str, worker: FleetWorker) -> list[str | float]:
    return [] if worker.since is None else [word, worker.since]


def _why(worker: FleetWorker) -> str:
    why = worker.cause if worker.cause != worker.reason else _REASONS.get(worker.reason, worker.reason)
    if worker.reason == NO_HEARTBEAT:
        why = f"no heartbeat for {duration(round(worker.age_s * 1000))}"
    elif worker.missing_batches and worker.reason == "gap":
        why = f"{worker.missing_batches:,} batch{'es' if worker.missing_batches > 1 else ''} lost"
    return f"{why}, resync asked for" if worker.is_resync_requested else why


def _about_others(total: int, live: int) -> str:
    others = total - live - 1
    if others:
        return f" {others:,} more of {total:,} workers {'are' if others > 1 else 'is'} not live."
    return f" The other {live:,} workers are live." if live > 1 else " The other worker is live." if live else ""
