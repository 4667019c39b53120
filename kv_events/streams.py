"""Names of topics, worker streams and group streams.

What a worker of a hybrid model holds beside full KV is one more stream of that worker for each *group* of layers, in a
companion model: `m#mamba` for the model `m`. It is a stream like any other; who knows nothing of groups sees a model
that nobody asks for.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

from kv_events.errors import InvalidValueError

EVENTS_TOPIC = "kv-events"
CONTROL_TOPIC = "kv-control"
DEFAULT_TENANT = "default"

MAMBA_GROUP = "mamba"
"""A page is held on a medium if a recurrent state lies there that is valid exactly at the page's end."""

_GROUP = re.compile(rf"{MAMBA_GROUP}|swa:([1-9][0-9]{{0,8}})", re.ASCII)
_COMPANION = re.compile(rf"(.+)#({_GROUP.pattern})", re.ASCII | re.DOTALL)


def swa_group(window: int) -> str:
    """The group of sliding-window layers: a page is held if its KV of these layers is. window: units, 1 .. 999999999.

    Raises InvalidValueError.
    """
    group = f"swa:{window}"
    if not _GROUP.fullmatch(group):
        raise InvalidValueError("window", window, "an integer in 1 .. 999999999")
    return group


def group_model(model: str, group: str) -> str:
    """Model name of a group's streams. Raises InvalidValueError for a group of unknown form, or of a model without a
    name."""
    companion = f"{model}#{group}"
    if split_group(companion) != (model, group):
        raise InvalidValueError("group", companion, f"MODEL#{MAMBA_GROUP} or MODEL#swa:WINDOW")
    return companion


def split_group(model: str) -> tuple[str, str | None]:
    """Inverse of `group_model`; a name that does not end like a group's is a model's own, whatever `#` is in it."""
    found = _COMPANION.fullmatch(model)
    return (found[1], found[2]) if found else (model, None)


def group_window(group: str) -> int:
    """Units before a page's end that must be held so that a prefix can end there; 1 for a state, which is all in the
    last page. Raises InvalidValueError."""
    found = _GROUP.fullmatch(group)
    if found is None:
        raise InvalidValueError("group", group, f"{MAMBA_GROUP} or swa:WINDOW")
    return int(found[1] or 1)


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
