"""What a translator knows about its worker stream before the first event."""

from __future__ import annotations

from typing import NamedTuple


class EngineRules(NamedTuple):
    """How an engine reuses its cache, as far as its events do not say. See `bridge.settings.EngineSettings`."""

    eagle: bool = False
    count_copies: bool = True
    attention_chunk_size: int = 0
    """0: not known."""


class StreamIdentity(NamedTuple):
    """The model and tenant whose events are accepted, and the namespace of pages whose events name none."""

    model: str
    tenant: str
    lora_name: str = ""
    """Adapter of pages whose events name none."""
    cache_salt: str = ""
    """Salt of pages whose events name none."""
    rules: EngineRules = EngineRules()


class RegistrationDefaults(NamedTuple):
    """Values of an engine's registration for what its events leave out."""

    block_size: int | None
    """None: as its stores say."""
    lora_name: str = ""
    cache_salt: str = ""
    rules: EngineRules = EngineRules()
