"""Answers of POST /register and POST /unregister, in both dialects."""

from __future__ import annotations

import msgspec


class PeerRegistered(msgspec.Struct, frozen=True, kw_only=True):
    """The rank was registered or unregistered (Dynamo's dialect)."""

    status: str = "ok"


class RfcRegistered(msgspec.Struct, frozen=True, kw_only=True):
    """The rank was registered (the RFC's dialect)."""

    status: str = "registered successfully"
    instance_id: str | int


class RfcUnregistered(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks were unregistered (the RFC's dialect)."""

    status: str = "unregistered successfully"
    removed_instances: list[str]
    """`<instance>|<tenant>|<rank>` each."""
