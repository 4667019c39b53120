"""Names of topics and worker streams."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote, unquote

from kv_events.errors import InvalidValueError

EVENTS_TOPIC = "kv-events"
CONTROL_TOPIC = "kv-control"
DEFAULT_TENANT = "default"


class StreamId(NamedTuple):
    """One publisher's stream: its batches keep their order because they share a record key."""

    model: str
    tenant: str
    worker: str
    dp_rank: int

    @property
    def key(self) -> str:
        """`tenant/model/worker/dp_rank`, each name percent-encoded, so that no name can imitate another stream."""
        return "/".join((quote(self.tenant, ""), quote(self.model, ""), quote(self.worker, ""), str(self.dp_rank)))

    @classmethod
    def parse(cls, key: str) -> StreamId:
        """Inverse of `key`. Raises InvalidValueError."""
        parts = key.split("/")
        if len(parts) != 4 or not parts[3].isdecimal():
            raise InvalidValueError("stream", key, "tenant/model/worker/dp_rank")
        tenant, model, worker = (unquote(part) for part in parts[:3])
        return cls(model, tenant, worker, int(parts[3]))
