"""Names of topics, worker streams and group streams.

A worker with a hybrid model publishes one more stream for each *group* of layers that keeps something other than full
KV, under a companion model: `m#mamba` for the model `m`. It is an ordinary stream. A reader without support for groups
sees a model that no one queries. Some groups hold no pages: the existence of their stream is what they say.
"""

import re
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from kv_events.errors import InvalidValueError

EVENTS_TOPIC = "kv-events"
CONTROL_TOPIC = "kv-control"
DECISIONS_TOPIC = "kv-decisions"
RESERVATIONS_TOPIC = "kv-reservations"

HEARTBEAT_S = 2.0
"""Interval of records without events, by default."""
DEFAULT_TENANT = "default"

MAMBA_GROUP = "mamba"
"""A page is held on a medium if a recurrent state that is valid exactly at its end is stored there."""

MAX_GROUP_SIZE = 999_999_999
"""Bound on windows, chunks and blocks, in units."""

_NUMBER = "[1-9][0-9]{0,8}"
_GROUP = re.compile(rf"(mamba|eagle|nofull)|(chunk|step):({_NUMBER})|(swa):({_NUMBER})(?:/({_NUMBER}))?", re.ASCII)
_COMPANION = re.compile(rf"(.+)#({_GROUP.pattern})", re.ASCII | re.DOTALL)


class Group(NamedTuple):
    """What a group of layers demands of the place where a reused prefix ends. Sizes are units, 1 .. MAX_GROUP_SIZE."""

    kind: str
    """`swa`, `mamba`, `chunk`: the last window, the state at the end, or all since the end's chunk began must be held.
    Without pages: `step`: the prefix is a multiple of `size`, because the groups have blocks of several sizes; `eagle`:
    the engine computes one more block; `nofull`: it has no full attention, so that a prefix can end wherever the other
    groups allow."""
    size: int = 0
    """The window, chunk or step. 0 for the others."""
    block: int = 0
    """Of `swa`: size of the engine's blocks, each named by its last page. 0: that of a page."""

    @property
    def name(self) -> str:
        """The text in companion models. Raises InvalidValueError."""
        name = self.kind + (f":{self.size}" if self.size else "") + (f"/{self.block}" if self.block else "")
        if not _GROUP.fullmatch(name):
            raise InvalidValueError("group", name, _EXPECTED_GROUP)
        return name


_EXPECTED_GROUP = "mamba, swa:WINDOW[/BLOCK], chunk:SIZE, step:SIZE, eagle or nofull"


def group_model(model: str, group: str) -> str:
    """Return the model name of a group's streams. Raises InvalidValueError for an invalid group or an empty model."""
    companion = f"{model}#{group}"
    if split_group(companion) != (model, group):
        raise InvalidValueError("group", companion, f"MODEL#GROUP, where GROUP is {_EXPECTED_GROUP}")
    return companion


def split_group(model: str) -> tuple[str, str | None]:
    """Inverse of `group_model`. A name that does not end with a group is the name of a model, even if it has a `#`."""
    found = _COMPANION.fullmatch(model)
    return (found[1], found[2]) if found else (model, None)


@lru_cache(1024)
def parse_group(name: str) -> Group:
    """Inverse of `Group.name`. Raises InvalidValueError."""
    found = _GROUP.fullmatch(name)
    if found is None:
        raise InvalidValueError("group", name, _EXPECTED_GROUP)
    plain, sized, size, swa, window, block = found.groups()
    return Group(plain or sized or swa, int(size or window or 0), int(block or 0))


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
