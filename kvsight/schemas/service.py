"""Answers of GET /health and GET /ready."""

from __future__ import annotations

import msgspec


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The process is healthy, or ready."""

    status: str
