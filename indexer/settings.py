"""Settings of the router side, from `KVSIGHT_*` environment variables or keyword arguments."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, field_validator

from kv_events.errors import InvalidValueError
from kv_events.kafka_settings import KafkaSettings
from kv_events.settings import argument
from kv_events.variables import variable

_CREDENTIALS = re.compile("//.*@")


class IndexerSettings(KafkaSettings):
    """Frozen; read once at start. A bad value stops the start and names the variable."""

    event_log_dir: Path | None = None
    """Event log to follow if there is no Kafka. Without both, the event log is in memory (embedded mode)."""
    redis: str | None = None
    """URL of the Redis that stores snapshots: redis://HOST:PORT/DB, rediss://... or unix://... None uses a folder. In
    embedded mode there are no snapshots, and Redis stores registrations.
    """
    snapshot_dir: Path | None = None
    """Folder for the same data if there is no Redis. Without both, every start replays the event log."""
    snapshot_interval_s: float = Field(30.0, gt=0)
    """Time between snapshots."""
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

    resync_rate_per_s: float = argument(5.0, gt=0)
    """Resync requests per second, over all workers: a storm of resyncs must not delay live events."""
    resync_retry_s: float = argument(2.0, gt=0)
    """First pause before the same worker is asked for a resync again. It doubles up to a minute."""

    @property
    def is_embedded(self) -> bool:
        """Whether the event log is in memory."""
        return self.kafka is None and self.event_log_dir is None

    @field_validator("redis")
    @classmethod
    def _redis_can_be_parsed(cls, url: str | None) -> str | None:
        if url is not None:
            from redis.asyncio.connection import parse_url

            try:
                parse_url(url)
            except ValueError:
                shown = _CREDENTIALS.sub("//...@", url)
                raise InvalidValueError(variable("redis"), shown, "a URL such as redis://HOST:PORT/DB") from None
        return url
