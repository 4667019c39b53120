"""Conversion of records into events of the engines' protocol, for readers that were written for vLLM and SGLang.

Block hashes are the sequence hashes, as RFC #1527 requires, so that parents are always known; other readers treat them
as opaque identifiers. A resync is sent as the difference to what readers already know, which consists of removals:
pages that they do not know have no tokens in a resync and cannot be sent.
"""

from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kv_events import schema
from kv_events.codec import decode_batch, wire_events
from kv_events.hashing import U32Array, U64Array, namespace_seed, sequence_hashes

Encoding: TypeAlias = Literal["array", "map"]

_CLEARED = "AllBlocksCleared"


class _Namespace(NamedTuple):
    """The information with which readers hash a page in the same way as a prompt."""

    lora_name: str | None
    cache_salt: str | None

    @property
    def seed(self) -> int:
        return namespace_seed(self.lora_name, self.cache_salt)


class EngineEvents:
    """The knowledge of the readers of one stream. `encode` must be called with every record, in order."""

    def __init__(self, encoding: Encoding) -> None:
        self.num_omitted = 0
        """Number of omitted pages: pages without tokens, or whose hash does not follow from the tokens."""
        self._encoding = encoding
        self._encoder = msgspec.msgpack.Encoder()
        self._sent: dict[schema.StorageMedium, set[int]] = {medium: set() for medium in schema.MEDIA}
        self._resent: dict[schema.StorageMedium, set[int]] | None = None  # since the beginning of a resync
        self._has_begun = False

    def encode(self, record: bytes) -> bytes | None:
        """Convert one record. Returns None if it contains nothing for readers. Raises RecordRejectedError.

        The first batch clears all blocks, for readers that know an earlier worker of this name. The last one clears
        them, too.
        """
        batch = decode_batch(record)
        events: list[Any] = [] if self._has_begun else [self._event(_CLEARED)]
        self._has_begun = True
        for event in wire_events(record):
            events += self._translated(event, batch.block_size)
        if batch.degraded_reason == schema.CLOSED:
            events += self._translated(schema.AllBlocksCleared(), batch.block_size)
        return self._encoder.encode([batch.timestamp, events, batch.stream.dp_rank]) if events else None

    def _translated(self, event: schema.WireEvent, block_size: int) -> list[Any]:
        match event:
            case schema.PackedStored() if self._resent is not None:
                self._note_resent(event, self._resent)
            case schema.PackedStored():
                return self._stored(event, block_size)
            case schema.PackedRemoved():
                removed = self._sent[event.medium].intersection(np.frombuffer(event.sequence_hashes, "<u8").tolist())
                return self._removed(event.medium, removed)
            case schema.AllBlocksCleared():
                for sent in self._sent.values():
                    sent.clear()
                return [self._event(_CLEARED)]
            case schema.SnapshotBegin():
                self._resent = {medium: set() for medium in schema.MEDIA}
            case schema.SnapshotEnd() if self._resent is not None:
                resent, self._resent = self._resent, None
                return [
                    removed
                    for medium in schema.MEDIA
                    for removed in self._removed(medium, self._sent[medium] - resent[medium])
                ]
        return []

    def _note_resent(self, event: schema.PackedStored, resent: dict[schema.StorageMedium, set[int]]) -> None:
        hashes = set(np.frombuffer(event.sequence_hashes, "<u8").tolist())
        self.num_omitted += len(hashes - self._sent[event.medium])
        resent[event.medium] |= hashes

    def _removed(self, medium: schema.StorageMedium, hashes: set[int]) -> list[Any]:
        if not hashes:
            return []
        self._sent[medium] -= hashes
        return [self._event("BlockRemoved", block_hashes=sorted(hashes), medium=medium.value)]

    def _stored(self, event: schema.PackedStored, block_size: int) -> list[Any]:
        hashes, parents = np.frombuffer(event.sequence_hashes, "<u8"), np.frombuffer(event.parents, "<u8").tolist()
        rows = _token_rows(event.token_ids, len(hashes))
        if rows.shape[1] not in (block_size, block_size + 1):
            self.num_omitted += len(hashes)
            return []
        starts = np.unpackbits(np.frombuffer(event.chain_starts, np.uint8), count=len(hashes), bitorder="little")
        chains = pairwise([*np.flatnonzero(starts).tolist(), len(hashes)])
        events = []
        for (start, stop), parent in zip(chains, parents, strict=True):
            chain = self._chain(event, hashes[start:stop], rows[start:stop], parent or None, block_size)
            if chain is not None:
                events.append(chain)
        return events

    def _chain(
        self, event: schema.PackedStored, hashes: U64Array, rows: U32Array, parent: int | None, block_size: int
    ) -> Any | None:
        """Return the event for pages whose hashes readers can reproduce. rows: uint32[pages, block_size or 1 more]."""
        is_bigram = rows.shape[1] > block_size
        tokens = np.concatenate((rows[0, :is_bigram], rows[:, is_bigram:].reshape(-1)))
        names, num_agreed = _agreement(event.extra_key, tokens, hashes, parent, block_size, is_bigram)
        self.num_omitted += len(hashes) - num_agreed
        if not num_agreed:
            return None
        block_hashes = hashes[:num_agreed].tolist()
        self._sent[event.medium].update(block_hashes)
        plain = tokens[: num_agreed * block_size + is_bigram].tolist()
        return self._event(
            "BlockStored",
            block_hashes=block_hashes,
            parent_block_hash=parent,
            token_ids=list(pairwise(plain)) if is_bigram else plain,
            block_size=block_size,
            lora_id=None,
            medium=event.medium.value,
            **self._name_fields(names),
        )

    def _name_fields(self, names: _Namespace) -> dict[str, Any]:
        """Return the fields of the namespace. An array has one field for the adapter (vLLM) or the salt (SGLang)."""
        if self._encoding == "map":
            return {"lora_name": names.lora_name} | ({"cache_salt": names.cache_salt} if names.cache_salt else {})
        if names.cache_salt:
            return {"cache_salt": {"cache_salt": names.cache_salt}}
        return {"lora_name": names.lora_name} if names.lora_name else {}

    def _event(self, tag: str, **fields: Any) -> Any:
        return {"type": tag, **fields} if self._encoding == "map" else [tag, *fields.values()]


def _agreement(
    extra_key: str | None, tokens: U32Array, hashes: U64Array, parent: int | None, block_size: int, is_bigram: bool
) -> tuple[_Namespace, int]:
    """Return the kind of the namespace, a salt or an adapter, and the number of pages whose hashes follow from it.

    The number is 0 if the preceding page is unknown, or if the hashes contain more than tokens.
    """
    best = _Namespace(None, extra_key or None), 0
    for names in {best[0], _Namespace(extra_key or None, None)}:
        expected = sequence_hashes(tokens, block_size, names.seed, parent, is_bigram=is_bigram)
        num_agreed = int(np.logical_and.accumulate(expected == hashes).sum())
        if num_agreed > best[1]:
            best = names, num_agreed
    return best


def _token_rows(token_ids: bytes | None, num_pages: int) -> U32Array:
    """Return uint32[pages, tokens a page], or [0, 0] if there are no tokens or their number does not match."""
    if not token_ids or not num_pages or len(token_ids) % (4 * num_pages):
        return np.empty((0, 0), np.uint32)
    tokens: npt.NDArray[np.uint32] = np.frombuffer(token_ids, "<u4")
    return tokens.reshape(num_pages, -1)
