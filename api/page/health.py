"""The verdict: one or two sentences that a person on call can act on."""

from typing import NamedTuple

from indexer.freshness import NO_HEARTBEAT
from indexer.tenants import TENANT_STREAMS
from indexer.views import INDEX_FULL, TENANT_PAGES, ViewState
from kv_events.http.fleet import FleetWorker
from kv_events.runtime.words import duration
from kv_events.schema import CLOSED, LEDGER_FULL

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


class FleetHealth(NamedTuple):
    """See `Fleet.level` and `Fleet.verdict`."""

    level: str
    parts: list[str | float]


def severity(worker: FleetWorker) -> int:
    """Return the rank of a worker by severity: 0 is the worst, 4 is live."""
    return _LEFT if worker.reason == CLOSED else _TROUBLE[ViewState(worker.state)]


def verdict(workers: list[FleetWorker], now: float, why_not_ready: str, next_step: str) -> FleetHealth:
    """Judge a fleet. workers: those in trouble first. why_not_ready: or "". next_step: what to do without a worker."""
    if why_not_ready:
        known = f"{len(workers):,} workers are known so far." if workers else "No worker is known yet."
        return FleetHealth(STARTING, [f"Not ready: {why_not_ready}. {known}"])
    if not workers:
        return FleetHealth(EMPTY, [f"No worker is known: {next_step}."])
    live = [worker for worker in workers if worker.state == ViewState.LIVE.value]
    if len(live) < len(workers):
        level = TROUBLE if severity(workers[0]) < _TROUBLE[ViewState.SYNCING] else WARNING
        worst = workers[0]
        remedy = f" {worst.remedy}" if worst.remedy and not worst.is_resync_requested and level == TROUBLE else ""
        return FleetHealth(level, [*_about(worst), remedy, _about_others(len(workers), len(live))])
    agreed = min(worker.agreed_at or 0.0 for worker in live)
    text = f"{len(live):,} of {len(live):,} workers live. Views equal what the engines reported as of "
    text += f"{duration(round(max(0.0, now - agreed) * 1000))} ago (digests)."
    broken = sum(each.state != ViewState.LIVE.value for worker in live for each in worker.ranks)
    if broken:
        return FleetHealth(WARNING, [f"{text} {broken:,} group stream{'s are' if broken > 1 else ' is'} not live."])
    return FleetHealth(OK, [text])


def _about(worker: FleetWorker) -> list[str | float]:
    pages, name = sum(worker.pages.values()), worker.worker
    if worker.reason == CLOSED:
        return [f"{name} left", *_since(" at ", worker), ": its publisher was closed. Answers leave it out."]
    if worker.state == ViewState.EXPIRED.value:
        silent = f": silent for {duration(round(worker.age_s * 1000))}. Answers leave it out."
        return [f"{name} expired", *_since(" at ", worker), silent]
    if worker.state == ViewState.SYNCING.value:
        return [f"{name} is being resynchronised; answers use its {pages:,} pages until the resync ends."]
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
