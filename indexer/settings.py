"""Settings of the router side, from `KVSIGHT_*` environment variables or keyword arguments."""

import re
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from kv_events.errors import InvalidValueError
from kv_events.kafka.settings import KafkaSettings
from kv_events.runtime.settings import KvsightSettings
from kv_events.runtime.variables import variable

_CREDENTIALS = re.compile("//.*@")
_OF_TLS = ("redis_ca_file", "redis_cert_file", "redis_key_file", "redis_key_password_file")


class RedisSettings(KvsightSettings):
    """The Redis of snapshots and registrations, and the way to log in. Secrets are never part of an error."""

    redis: str | None = Field(None, repr=False)
    """URL: redis://HOST:PORT/DB, rediss://USER@HOST:PORT/DB (TLS) or unix://PATH. None: no Redis."""
    redis_password: SecretStr | None = Field(None, min_length=1)
    """Password of the URL's user, or of the default user if the URL names none."""
    redis_password_file: Path | None = None
    """File that contains the password."""
    redis_ca_file: Path | None = None
    """PEM file of the CAs that may have signed the server's certificate. None: those of the system."""
    redis_cert_file: Path | None = None
    """PEM file of the client certificate and its chain. None: no client certificate."""
    redis_key_file: Path | None = None
    """PEM file of the client's private key. None: the key is in `redis_cert_file`."""
    redis_key_password_file: Path | None = None
    """File that contains the password of the private key."""

    @property
    def is_redis_tls(self) -> bool:
        return self.redis is not None and self.redis.startswith("rediss://")

    @model_validator(mode="after")
    def _redis_is_complete(self) -> Self:
        has_password = False
        if self.redis is not None:
            from redis.asyncio.connection import parse_url

            try:
                parsed = parse_url(self.redis)
                if not {"db", "path"} & parsed.keys():
                    int(urlsplit(self.redis).path.strip("/") or 0)  # for which redis-py takes database 0
                has_password = "password" in parsed
            except ValueError:
                shown = _CREDENTIALS.sub("//...@", self.redis)
                raise InvalidValueError(variable("redis"), shown, "a URL such as redis://HOST:PORT/DB") from None
        if has_password + (self.redis_password is not None) + (self.redis_password_file is not None) > 1:
            expected = "one password: in the URL, in a file, or in a variable"
            raise InvalidValueError(variable("redis_password_file"), "several", expected)
        if self.redis is not None and not self.is_redis_tls:
            self.refuse(_OF_TLS, f"none without TLS: {variable('redis')}=rediss://...")
        return self


class IndexerSettings(KafkaSettings, RedisSettings):
    """Frozen; read once at start. A bad value stops the start and names the variable.

    In embedded mode there are no snapshots, and Redis or the folder keeps registrations.
    """

    event_log_dir: Path | None = None
    """Event log to follow if there is no Kafka. Without both, the event log is in memory (embedded mode)."""
    snapshot_dir: Path | None = None
    """Folder for the same data if there is no Redis. Without both, every start replays the event log."""
    snapshot_interval_s: float = Field(30.0, gt=0)
    """Time between snapshots."""
    tenant_limits_file: Path | None = None
    """TOML file of limits by tenant. It is read again when it changes. None: only the limits below count."""
    dead_letter_dir: Path | None = None
    """Event log for records that cannot be decoded. If None, they are only counted."""
    max_pages: int = Field(2**24, ge=1, le=2**31)
    """Bound on distinct pages of one namespace."""
    max_set_bytes: int = Field(2**30, ge=2**16)
    """Bound on the memory of one namespace's holder sets: one set for each distinct combination of holders."""
    max_streams: int = Field(4096, ge=1, le=65_536)
    """Bound on worker streams of one namespace."""
    max_namespaces: int = Field(64, ge=1, le=4096)
    """Bound on (model, tenant, block size) combinations."""
    worker_ttl_s: float = Field(10.0, gt=0)
    """Silence after which a worker is expired: left out of scores, its pages kept."""
    forget_after_s: float = Field(600.0, gt=0)
    """Silence after which a worker is removed with its pages."""

    resync_rate_per_s: float = Field(5.0, gt=0)
    """Resync requests per second, over all workers: a storm of resyncs must not delay live events."""
    resync_retry_s: float = Field(2.0, gt=0)
    """First pause before the same worker is asked for a resync again. It doubles up to a minute."""

    @property
    def interval_of_snapshots(self) -> float | None:
        """Time between snapshots, in seconds. None: there are none."""
        return None if self.redis is None and self.snapshot_dir is None else self.snapshot_interval_s

    @property
    def is_embedded(self) -> bool:
        return self.kafka is None and self.event_log_dir is None
