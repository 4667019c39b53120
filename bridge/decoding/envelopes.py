"""Events as Mooncake's RFC #1527 has them, and as `mooncake_master` really sends them: maps with an `event_type`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

_Name = Annotated[str, msgspec.Meta(max_length=256)] | None


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """One event, whatever stream it belongs to. Absent and null are the same."""

    event_type: Literal["stored", "removed", "cleared"]
    model_name: _Name = None
    block_size: int | None = None
    additional_salt: _Name = None
    lora_name: _Name = None
    tenant_id: _Name = None
    backend_id: _Name = None
    """Owner of the pages; not the instance that a router would choose."""
    medium: _Name = None
    dp_rank: int | None = None
    seq_hashes: list[int] = []
    """Rolling hashes; empty where `mooncake_master` cannot read one from the object's key."""
    base_block_idx: int | None = None
    """Depth of the first page."""
    parent_hash: int | None = None
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]] | None = None
    """Needed where the hashes are not the standard's."""

    @property
    def owner(self) -> str:
        """The stream as far as it keeps equal hashes apart, as text that no other stream has."""
        parts = (self.backend_id, self.additional_salt, self.lora_name)
        return "pool " + msgspec.json.encode([part or "" for part in parts]).decode()


class _Kind(msgspec.Struct, frozen=True):
    event_type: str


_decoder = msgspec.msgpack.Decoder(Envelope)
_kind_decoder = msgspec.msgpack.Decoder(_Kind)


def decode_envelope(data: bytes | memoryview) -> Envelope:
    """Raises msgspec.DecodeError (its ValidationError where a field is wrong), UnicodeDecodeError, RecursionError."""
    return _decoder.decode(data)


def may_remove(data: bytes | memoryview) -> bool:
    """Whether an envelope that cannot be decoded may have said that pages are gone."""
    try:
        return _kind_decoder.decode(data).event_type != "stored"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True


def decode_any(data: bytes | memoryview) -> Any:
    """Plain objects from msgpack; raises the same."""
    return msgspec.msgpack.decode(data)
