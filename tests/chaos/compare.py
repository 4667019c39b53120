"""Page-by-page comparison of every view of every service with its engine's own cache, while the engines rest."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import NamedTuple

from api.workers.dump import STORAGE_TIERS
from kv_events.schema import MEDIA
from tests.chaos.engine import Engine, Truth
from tests.chaos.rig import Rig, Service
from tests.chaos.watch import listener_of

_SHOWN = 5
_TIER_OF = dict(zip(STORAGE_TIERS, (medium.value for medium in MEDIA), strict=True))


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
        engine.rest()
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
            engine.work()


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
