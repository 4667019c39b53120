"""Events of Mooncake's RFC #1527, and as `mooncake_master` sends them: maps with an `event_type`."""

from typing import Annotated, Any, Literal

import msgspec

_Name = Annotated[str, msgspec.Meta(max_length=256)] | None


class MooncakeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of any stream. Absent and null fields mean the same."""

    event_type: Literal["stored", "removed", "cleared"]
    model_name: _Name = None
    block_size: int | None = None
    additional_salt: _Name = None
    lora_name: _Name = None
    tenant_id: _Name = None
    backend_id: _Name = None
    """Owner of the pages. Not the instance that a router would choose."""
    medium: _Name = None
    dp_rank: int | None = None
    seq_hashes: list[int] = []
    """Rolling hashes. Empty if `mooncake_master` cannot read one from the object's key."""
    base_block_idx: int | None = None
    """Number of pages before the first one."""
    parent_hash: int | None = None
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]] | None = None
    """Required if the hashes are not the standard's."""

    @property
    def owner(self) -> str:
        """Key of the namespace in which the hashes are unique. Differs from keys of attention groups."""
        parts = (self.backend_id, self.additional_salt, self.lora_name)
        return "pool " + msgspec.json.encode([part or "" for part in parts]).decode()


_decoder = msgspec.msgpack.Decoder(MooncakeEvent)


def decode_mooncake_event(data: bytes | memoryview) -> MooncakeEvent:
    """Decode an event.

    Raises msgspec.DecodeError (ValidationError for a bad field), UnicodeDecodeError, RecursionError.
    """
    return _decoder.decode(data)


def may_remove(data: bytes | memoryview) -> bool:
    """Whether an event that cannot be decoded may have removed pages."""
    try:
        return bool(msgspec.msgpack.decode(data, type=dict[str, Any])["event_type"] != "stored")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return True
