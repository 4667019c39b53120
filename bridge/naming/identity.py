"""Whose events a worker stream's translator takes, and what it knows of them beforehand."""

from __future__ import annotations

from typing import NamedTuple


class Identity(NamedTuple):
    """Whose events are taken."""

    model: str
    tenant: str
    lora_name: str = ""
    """Adapter of the pages of which events name none."""
    cache_salt: str = ""
    """Salt of the pages of which events name none."""


class Unsaid(NamedTuple):
    """What an engine's registration says, and its events need not."""

    block_size: int | None
    """None: as stores say."""
    lora_name: str = ""
    cache_salt: str = ""
