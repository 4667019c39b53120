"""Bounds on what one tenant may use, from a TOML file that may change at any time."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from kv_events.errors import InvalidValueError, shorten
from kv_events.limits import MAX_NAME_BYTES
from kv_events.runtime.settings import read_secret
from kv_events.runtime.variables import variable

FIELD = "tenant_limits_file"
OTHERS = "*"
"""Table of the tenants without a table of their own."""

TENANT_PAGES = "tenant limit: pages"
"""Stale reason of a view whose pages did not all fit into the bound of its tenant."""
TENANT_STREAMS = "tenant limit: worker_streams"
"""Reason of a stream that gets no view, because its tenant has as many as it may."""


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
        """Return the limits of a tenant."""
        return self._by_tenant.get(tenant, self._others)

    @property
    def named(self) -> list[str]:
        """The tenants that have a table."""
        return list(self._by_tenant)


def _parsed(text: str, file: Path) -> dict[str, TenantLimit]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidValueError(variable(FIELD), str(file), f"TOML: {error}") from None
    found = {}
    for name, table in tables.items():
        where = f"table {shorten(name)}"
        if not 1 <= len(name.encode(errors="surrogatepass")) <= MAX_NAME_BYTES:
            expected = f"names of tenants of 1 .. {MAX_NAME_BYTES} bytes, not {where}"
            raise InvalidValueError(variable(FIELD), str(file), expected)
        try:
            found[name] = msgspec.convert(table, TenantLimit)
        except msgspec.ValidationError as error:
            fault = re.sub(r" - at `\$\.?(.*)`$", r" (\1)", str(error)).replace(" ()", "")
            expected = f"{where} with {', '.join(TenantLimit.__struct_fields__)}: {fault}"
            raise InvalidValueError(variable(FIELD), str(file), expected) from None
    return found
