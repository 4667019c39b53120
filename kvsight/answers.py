"""What the API tells a client about workers, as typed structs. Fields of newer servers are ignored.

Answers to queries are the API's own structs, `api.schemas.PeerAnswer`.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ListenerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One DP rank's stream, as the API sees it."""

    endpoint: str
    status: str
    state: str
    stale_reason: str = ""
    age_ms: int
    epoch: int
    seq: int
    pages: dict[str, int]
    """By medium."""
    digest: str
    counters: dict[str, Any] = {}


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a model."""

    instance_id: str
    status: str
    model_name: str
    routing_group: str
    block_size: int
    listeners: dict[int, ListenerStatus]
    """By DP rank."""
    state: str
    """The least trustworthy among the ranks: live, syncing, stale or expired."""
    age_ms: int
    source: str = ""


class ViewedPage(msgspec.Struct, frozen=True):
    """One page of a radix view."""

    sequence_hash: int
    parent: int | None
    media: list[str]


class ViewPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of what one worker stream holds. Equal epoch and seq in two parts mean that the view did not move on."""

    model_name: str
    routing_group: str
    block_size: int
    dp_rank: int
    state: str
    age_ms: int
    epoch: int
    seq: int
    pages: list[ViewedPage]
    next_cursor: int | None
    """`cursor` of the next call; None: this was the end."""
