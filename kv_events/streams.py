"""Names of topics, worker streams and group streams.

A worker with a hybrid model publishes one more stream for each *group* of layers that keeps something other than full
KV, under a companion model: `m#mamba` for the model `m`. It is an ordinary stream. A reader without support for groups
sees a model that no one queries.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from kv_events.errors import InvalidValueError

EVENTS_TOPIC = "kv-events"
CONTROL_TOPIC = "kv-control"
DECISIONS_TOPIC = "kv-decisions"

HEARTBEAT_S = 2.0
"""Interval of records without events, by default."""
DEFAULT_TENANT = "default"

MAMBA_GROUP = "mamba"
"""A page is held on a medium if a recurrent state that is valid exactly at its end is stored there."""

_GROUP = re.compile(rf"{MAMBA_GROUP}|swa:([1-9][0-9]{{0,8}})", re.ASCII)
_COMPANION = re.compile(rf"(.+)#({_GROUP.pattern})", re.ASCII | re.DOTALL)


def swa_group(window: int) -> str:
    """Return the group of layers with a sliding window. A page is held if its KV of these layers is stored.

    window: units, 1 .. 999999999.

    Raises InvalidValueError.
    """
    group = f"swa:{window}"
    if not _GROUP.fullmatch(group):
        raise InvalidValueError("window", window, "an integer in 1 .. 999999999")
    return group


def group_model(model: str, group: str) -> str:
    """Return the model name of a group's streams. Raises InvalidValueError for an invalid group or an empty model."""
    companion = f"{model}#{group}"
    if split_group(companion) != (model, group):
        raise InvalidValueError("group", companion, f"MODEL#{MAMBA_GROUP} or MODEL#swa:WINDOW")
    return companion


def split_group(model: str) -> tuple[str, str | None]:
    """Inverse of `group_model`. A name that does not end with a group is the name of a model, even if it has a `#`."""
    found = _COMPANION.fullmatch(model)
    return (found[1], found[2]) if found else (model, None)


def group_window(group: str) -> int:
    """Return the number of units before a page's end that must be held for a prefix to end there.

    It is 1 for a state, which belongs to the last page alone. Raises InvalidValueError.
    """
    found = _GROUP.fullmatch(group)
    if found is None:
        raise InvalidValueError("group", group, f"{MAMBA_GROUP} or swa:WINDOW")
    return int(found[1] or 1)


class StreamId(NamedTuple):
    """Identity of a worker stream. Its batches keep their order because they share a record key."""

    model: str
    tenant: str
    worker: str
    dp_rank: int

    @property
    def key(self) -> str:
        """`tenant/model/worker/dp_rank`, each part percent-encoded, so that no name can imitate another stream."""
        return "/".join((quote(self.tenant, ""), quote(self.model, ""), quote(self.worker, ""), str(self.dp_rank)))


@lru_cache(4096)
def worker_key(key: bytes) -> bytes:
    """Return the key of rank 0 of a stream's worker, without a group. key: `StreamId.key`; any other key stays."""
    parts = key.split(b"/")
    if len(parts) != 4:
        return key
    tenant, model, worker, _ = parts
    base, _ = split_group(unquote_to_bytes(model).decode(errors="surrogateescape"))
    return b"/".join((tenant, quote(base.encode(errors="surrogateescape"), "").encode(), worker, b"0"))
