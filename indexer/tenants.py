"""Bounds on what one tenant may use: a TOML file that may change at any time, and the gate that holds tenants to it."""

import logging
import math
import re
import tomllib
from collections.abc import Generator
from pathlib import Path
from typing import Annotated

import msgspec

from indexer.freshness import Freshness
from indexer.namespaces import Namespaces, RefusedStream
from indexer.views import View
from kv_events.codec import DecodedBatch
from kv_events.errors import InvalidValueError, shorten
from kv_events.limits import MAX_NAME_BYTES
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.runtime.settings import read_secret
from kv_events.runtime.variables import variable
from kv_events.streams import StreamId

logger = logging.getLogger(__name__)

FIELD = "tenant_limits_file"
OTHERS = "*"
"""Table of the tenants without a table of their own."""

TENANT_STREAMS = "tenant limit: worker_streams"
"""Reason of a stream that gets no view, because its tenant has as many as it may."""

_LOOK_S = 1.0
_MAX_LOOKS = 4096


class TenantLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bounds of one tenant. None: no bound of its own."""

    worker_streams: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Streams over all its models: DP ranks of workers, and their groups."""
    pages: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Distinct pages over all its namespaces."""
    queries_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None


_NONE = TenantLimit()


class TenantLimits:
    """The current content of the file."""

    def __init__(self, file: Path) -> None:
        """Raises InvalidValueError."""
        self._file = file
        self.text = self.read()
        """The content at the start."""
        self.use(self.text)

    def read(self) -> str:
        """Return the text of the file. Raises InvalidValueError."""
        return read_secret(FIELD, self._file)

    def use(self, text: str) -> None:
        """Replace all limits. Raises InvalidValueError; the limits stay as they are then."""
        self._by_tenant = _parsed(text, self._file)
        self._others = self._by_tenant.pop(OTHERS, _NONE)

    def of(self, tenant: str) -> TenantLimit:
        return self._by_tenant.get(tenant, self._others)

    @property
    def named(self) -> list[str]:
        return list(self._by_tenant)


class TenantGate:
    """Refuses streams beyond the limit of their tenant, and bounds the pages of its indexes.

    A tenant at a limit loses its expired workers early, the one that was silent longest first.
    """

    def __init__(self, limits: TenantLimits) -> None:
        self._limits = limits
        self._next_look: dict[str, float] = {}  # by tenant: tick from which expired views are looked for again
        self._limited_logger = RateLimitedLogger(logger, "a worker stream is refused")

    def admits(
        self, namespaces: Namespaces, batch: DecodedBatch, at: float, tick: float, freshness: Freshness | None
    ) -> Generator[None, None, bool]:
        """Return whether a stream without a view may have one. In slices. at, tick: see `Applier.apply`."""
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
            yield from namespaces.forget(min(expired, key=lambda view: view.last_batch_tick).stream)


def _parsed(text: str, file: Path) -> dict[str, TenantLimit]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidValueError(variable(FIELD), file, f"TOML: {error}") from None
    found = {}
    for name, table in tables.items():
        where = f"table {shorten(name)}"
        if not 1 <= len(name.encode(errors="surrogatepass")) <= MAX_NAME_BYTES:
            expected = f"names of tenants of 1 .. {MAX_NAME_BYTES} bytes, not {where}"
            raise InvalidValueError(variable(FIELD), file, expected)
        try:
            found[name] = msgspec.convert(table, TenantLimit)
        except msgspec.ValidationError as error:
            fault = re.sub(r" - at `\$\.?(.*)`$", r" (\1)", str(error)).replace(" ()", "")
            expected = f"{where} with {', '.join(TenantLimit.__struct_fields__)}: {fault}"
            raise InvalidValueError(variable(FIELD), file, expected) from None
    return found
