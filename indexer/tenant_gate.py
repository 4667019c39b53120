"""Keeps each tenant within its limits while batches are applied."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator
from typing import NamedTuple

from indexer.freshness import Freshness
from indexer.namespaces import Namespaces, RefusedStream
from indexer.tenant_limits import TENANT_STREAMS, TenantLimits
from indexer.views import View
from kv_events.codec import DecodedBatch
from kv_events.errors import shorten
from kv_events.runtime.rate_limited_logger import RateLimitedLogger
from kv_events.streams import StreamId

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_MAX_LOOKS = 4096


class Arrival(NamedTuple):
    """A batch and the time at which it was received, see `Applier.apply`."""

    batch: DecodedBatch
    heard_at: float
    heard_tick: float


class TenantGate:
    """Refuses streams beyond the limit of their tenant, and bounds the pages of its indexes.

    A tenant at a limit loses its expired workers early, the one that was silent longest first.
    """

    def __init__(self, limits: TenantLimits) -> None:
        self._limits = limits
        self._next_look: dict[str, float] = {}  # by tenant: `heard_tick` from which expired views are looked for again
        self._limited_logger = RateLimitedLogger(logger, "a worker stream is refused")

    def admits(
        self, namespaces: Namespaces, arrival: Arrival, freshness: Freshness | None
    ) -> Generator[None, None, bool]:
        """Return whether a stream without a view may have one. In slices."""
        batch, at, tick = arrival
        tenant = batch.stream.tenant
        most = self._limits.of(tenant).worker_streams
        if most is not None and namespaces.num_streams(tenant) >= most:
            yield from self._drop_an_expired_view(namespaces, batch.stream, tick, freshness)
            if namespaces.num_streams(tenant) >= most:
                refused = RefusedStream(TENANT_STREAMS, batch.block_size, batch.epoch, batch.seq, at, tick)
                if namespaces.refuse(batch.stream, refused):
                    self._limited_logger.warning(
                        "%s: tenant %s has %d of at most %d (worker_streams)",
                        shorten(batch.stream.key, 200),
                        shorten(tenant),
                        namespaces.num_streams(tenant),
                        most,
                    )
                return False
        return True

    def bound_pages(
        self, namespaces: Namespaces, view: View, tick: float, freshness: Freshness | None
    ) -> Generator[None, None, None]:
        """Bound the index of a view to what the other namespaces of its tenant leave. In slices."""
        tenant = view.stream.tenant
        most = self._limits.of(tenant).pages
        if most is not None and namespaces.num_pages(tenant) >= most:
            yield from self._drop_an_expired_view(namespaces, view.stream, tick, freshness)
        others = namespaces.num_pages(tenant) - view.index.num_pages
        view.index.limit_pages(None if most is None else max(0, most - others))

    def _drop_an_expired_view(
        self, namespaces: Namespaces, stream: StreamId, tick: float, freshness: Freshness | None
    ) -> Generator[None, None, None]:
        """Forget the tenant's view that expired first, except that of `stream`. Looks for one once a second."""
        if freshness is None or tick < self._next_look.get(stream.tenant, -math.inf):
            return
        if len(self._next_look) >= _MAX_LOOKS:
            self._next_look.clear()
        self._next_look[stream.tenant] = tick + _LOOK_S
        expired = [
            view
            for namespace in namespaces.of_tenant(stream.tenant)
            for view in namespace.views.values()
            if view.stream != stream and freshness.is_expired(view, tick)
        ]
        if expired:
            yield from namespaces.forget(min(expired, key=lambda view: view.heard_tick).stream)
