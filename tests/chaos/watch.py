"""Watches all views of all services against the engines' histories, and compares them with the caches page by page."""

import threading
import time
from collections import defaultdict
from typing import Any, NamedTuple, Self

import httpx
import numpy as np

from api.workers.routes import STORAGE_TIERS
from indexer.views import LATE_S
from kv_events.schema import MEDIA
from tests.chaos.engine import Engine, Truth
from tests.chaos.rig import Rig, Service
from tests.support.http_checks import WITHOUT_TLS

_EVERY_S = 0.2
_TIMEOUT_S = 5.0
_SHOWN = 5
_TIER_OF = dict(zip(STORAGE_TIERS, (medium.value for medium in MEDIA), strict=True))
FRESH_S = 1.0
"""A view whose cache was as it shows within this time is right: its newest record may be on the way."""
LIE_S = LATE_S + 2 * _EVERY_S
"""A view that is `live` and has been wrong for longer, in two looks in a row, is a lie: two heartbeats are missing.

One look may show the middle of a request, in which the cache is for a moment as it was some time ago.
"""


class Sighting(NamedTuple):
    """What a service said about a view."""

    at: float
    """Time of the monotonic clock."""
    service: str
    engine: str
    state: str
    reason: str
    wrong_s: float
    """Seconds since the cache was as the view shows. If it never was: since the view was seen to show the same."""
    epoch: int = -1
    seq: int = -1

    @property
    def is_right(self) -> bool:
        return self.state == "live" and self.wrong_s < FRESH_S

    @property
    def may_be_lie(self) -> bool:
        return self.state == "live" and self.wrong_s > LIE_S


def listener_of(workers: list[dict[str, Any]], engine: Engine) -> dict[str, Any] | None:
    stream = engine.stream
    for worker in workers:
        if (worker["model_name"], worker["routing_group"], worker["instance_id"]) == stream[:3]:
            return worker["listeners"].get(str(stream.dp_rank))  # type: ignore[no-any-return]
    return None


class Watch:
    """One thread for each service. `with Watch(rig) as watch:`."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._lock = threading.Lock()  # guards the four below
        self._newest: dict[tuple[str, str], Sighting] = {}
        self._right_since: dict[str, float | None] = {}
        self._wrong: list[Sighting] = []  # of live views
        self._lies: list[Sighting] = []
        self._unknown: dict[tuple[str, str], tuple[float, bytes]] = {}  # digest that no cache had, and since when
        self._is_ended = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def right_since(self) -> float | None:
        """Time since which all views of all services have been right in every look. None: some are not."""
        with self._lock:
            since = [self._right_since.get(service.name) for service in self._rig.all_services]
        known = [each for each in since if each is not None]
        return max(known) if len(known) == len(since) else None

    def newest(self) -> list[Sighting]:
        with self._lock:
            return list(self._newest.values())

    def wrong_since(self, at: float) -> list[Sighting]:
        with self._lock:
            return [each for each in self._wrong if each.at >= at]

    def lies_since(self, at: float) -> list[Sighting]:
        with self._lock:
            return [each for each in self._lies if each.at >= at]

    def _run(self, service: Service) -> None:
        with httpx.Client(base_url=service.url, timeout=_TIMEOUT_S, verify=WITHOUT_TLS) as client:
            while not self._is_ended.wait(_EVERY_S):
                at = time.monotonic()
                try:
                    if service.is_starting and client.get("/ready").is_success:
                        service.note_ready()
                    answer = client.get("/workers")
                    workers = answer.json() if answer.is_success else None
                except (httpx.TransportError, ValueError):
                    workers = None
                self._note(service, at, workers)

    def _note(self, service: Service, at: float, workers: list[dict[str, Any]] | None) -> None:
        if workers is None:
            seen = [Sighting(at, service.name, engine.name, "no answer", "", 0.0) for engine in self._rig.all_engines]
        else:
            seen = [
                self._sighting(service, engine, at, listener_of(workers, engine)) for engine in self._rig.all_engines
            ]
        is_right = all(each.is_right for each in seen) and not service.is_away
        with self._lock:
            before = [self._newest.get((each.service, each.engine)) for each in seen]
            self._lies += [
                each
                for each, last in zip(seen, before, strict=True)
                if each.may_be_lie and last is not None and last.may_be_lie
            ]
            self._newest |= {(each.service, each.engine): each for each in seen}
            since = self._right_since.get(service.name)
            self._right_since[service.name] = (at if since is None else since) if is_right else None
            self._wrong += [each for each in seen if each.state == "live" and each.wrong_s >= FRESH_S]

    def _sighting(self, service: Service, engine: Engine, at: float, listener: dict[str, Any] | None) -> Sighting:
        if listener is None:
            return Sighting(at, service.name, engine.name, "unknown", "", 0.0)
        shown = np.frombuffer(bytes.fromhex(listener["digest"]), "<u8")
        wrong_s = self._wrong_s(service, engine, at, shown) if engine.running else 0.0
        state = listener["state"] if engine.running else "dead engine"
        told = listener["stale_reason"], wrong_s, listener["epoch"], listener["seq"]
        return Sighting(at, service.name, engine.name, state, *told)

    def _wrong_s(self, service: Service, engine: Engine, at: float, shown: Any) -> float:
        rows, place = engine.rows(), (service.name, engine.name)
        (same,) = np.nonzero((rows["digest"] == shown).all(axis=1))
        if not len(same):
            since, before = self._unknown.get(place, (at, b""))
            self._unknown[place] = (since if before == shown.tobytes() else at, shown.tobytes())
            return at - self._unknown[place][0]
        last = int(same[-1])
        return 0.0 if last == len(rows) - 1 else max(0.0, at - float(rows["at"][last + 1]))

    def __enter__(self) -> Self:
        for service in self._rig.all_services:
            thread = threading.Thread(target=self._run, args=(service,), name=f"watch:{service.name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ended.set()
        for thread in self._threads:
            thread.join()


# --- page by page, while the engines rest ---


class Difference(NamedTuple):
    """How a view differs from the cache of its engine."""

    service: str
    engine: str
    what: str
    pages: int
    """Pages that one of them holds on a tier, and the other does not."""


def compare(rig: Rig, deadline_s: float) -> list[Difference]:
    """Let the engines rest, and return the differences that remain at the deadline. The engines then work again."""
    engines = [engine for engine in rig.all_engines if engine.running]
    for engine in engines:
        engine.order("rest")
    try:
        truths = {engine.name: engine.truth() for engine in engines}
        give_up = time.monotonic() + deadline_s
        while any(
            not _is_equal(service, engine, truths[engine.name]) for service in rig.all_services for engine in engines
        ):
            if time.monotonic() > give_up:
                break
            time.sleep(0.1)
        return [each for service in rig.all_services for each in _differences(rig, service, engines, truths)]
    finally:
        for engine in engines:
            engine.order("work")


def _is_equal(service: Service, engine: Engine, truth: Truth) -> bool:
    listener = listener_of(service.get("/workers").json(), engine)
    return listener is not None and (listener["state"], listener["digest"]) == ("live", truth.digest)


def _differences(rig: Rig, service: Service, engines: list[Engine], truths: dict[str, Truth]) -> list[Difference]:
    viewed, workers = _viewed(_sharers(rig, service)), service.get("/workers").json()
    found = []
    for engine in engines:
        truth, where = truths[engine.name], (service.name, engine.name)
        namespace = f"{engine.stream.model}:{engine.stream.tenant}"
        for medium, held in truth.pages.items():
            shown = viewed[namespace, engine.name, medium]
            missing, foreign = set(held) - shown, shown - set(held)
            if missing or foreign:
                what = f"{medium}: lacks {sorted(missing)[:_SHOWN]}, has besides {sorted(foreign)[:_SHOWN]}"
                found.append(Difference(*where, what, len(missing) + len(foreign)))
        listener = listener_of(workers, engine)
        state = {} if listener is None else {name: listener[name] for name in ("state", "stale_reason", "digest")}
        if (state.get("state"), state.get("digest")) != ("live", truth.digest):
            found.append(Difference(*where, f"{state}, the digest of the cache is {truth.digest}", 0))
    return found


def _sharers(rig: Rig, service: Service) -> list[Service]:
    """Return the services that have the views of a service: of a group, each member dumps its own."""
    return rig.members if service in rig.members else [service]


def _viewed(services: list[Service]) -> dict[tuple[str, str, str], set[int]]:
    """Return the pages of `GET /dump` by namespace, worker and medium."""
    pages: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for service in services:
        for name, namespace in service.get("/dump").json().items():
            model_and_tenant = ":".join(name.split(":")[:2])
            for event in namespace["events"]:
                place = model_and_tenant, event["worker_id"], _TIER_OF[event["storage_tier"]]
                pages[place] |= {block["block_hash"] for block in event["event"]["data"]["stored"]["blocks"]}
    return pages
