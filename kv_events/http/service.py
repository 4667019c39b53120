"""The address of a service, and its answers of GET /health and GET /ready."""

from __future__ import annotations

import msgspec

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where a service answers that was started without a host and a port."""


class Status(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The process is healthy, or ready."""

    status: str
    recording: str = ""
    """Why the recording of `kvsight serve --record` is degraded. Left out if it is not."""
