"""Settings of the HTTP side, from `KVSIGHT_*` environment variables or keyword arguments."""

from __future__ import annotations

from fnmatch import fnmatchcase

from pydantic import Field, SecretStr, field_validator

from kv_events.errors import InvalidValueError
from kv_events.settings import KvsightSettings, variable


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
    max_event_clients: int = Field(64, ge=0)
    """Callers that may listen to `GET /events` at once."""


class RegistrationSettings(KvsightSettings):
    """What callers may have this process connect to."""

    register_allow: str = "tcp://*"
    """Patterns of addresses, comma between them, `*` for anything: `tcp://10.0.*:*,ipc:///run/engines/*`. Names are
    not resolved before they are compared. Empty: no registration at all."""
    max_registrations: int = Field(1024, ge=0, le=65_536)
    """Ranks of engines that may be registered."""

    @field_validator("register_allow")
    @classmethod
    def _schemes_are_known(cls, patterns: str) -> str:
        for pattern in filter(None, patterns.split(",")):
            if not pattern.strip().startswith(("tcp://", "ipc://")):
                raise InvalidValueError(variable("register_allow"), pattern, "tcp://PATTERN or ipc://PATTERN")
        return patterns

    def allows(self, address: str) -> bool:
        """Whether an address fits one of the patterns."""
        return any(fnmatchcase(address, pattern.strip()) for pattern in self.register_allow.split(","))
