"""Settings of the HTTP side, from `KVSIGHT_*` environment variables or keyword arguments."""

from __future__ import annotations

from pydantic import Field, SecretStr

from kv_events.settings import KvsightSettings


class ApiSettings(KvsightSettings):
    """Frozen; read once at start. A bad value stops the start and names the variable."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65_535)
    """0: any free port."""
    api_token: SecretStr | None = Field(None, min_length=1)
    """Token that callers must send as `Authorization: Bearer`, save to /health, /ready and /metrics. None: open."""
    max_body_bytes: int = Field(32 * 2**20, ge=1024)
    """Largest request body."""
    max_connections: int = Field(1024, ge=1)
    """Connections and requests at once; beyond them callers get a 503 at once instead of a place in a queue."""
