"""Problem documents (RFC 9457): the body of every error."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class ProblemDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, for people (`detail`) and for programs (`type`, `field`, `value`).

    The defaults are for the errors of other servers, such as proxies, which may send only some of the fields.
    """

    type: str = "about:blank"
    """Such as `urn:kvsight:problem:unknown-model`; `about:blank`: the status says everything."""
    title: str = ""
    status: int = 0
    detail: str = ""
    field: str | UnsetType | None = UNSET
    value: bool | int | float | str | UnsetType | None = UNSET
    error: str = ""
    """Repeats `detail`: clients written for Dynamo look here."""
