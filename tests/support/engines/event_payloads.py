"""Events in every encoding that engines use, and a slow reference for the sequence hashes of pages."""

import itertools
import struct
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import xxhash

MASK64 = 2**64 - 1
STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
Form = Literal["array", "array with nils", "map"]

Event = dict[str, Any]
"""Tag under `type`, and the fields that differ from their defaults."""


def stored(
    hashes: Sequence[Any], tokens: Sequence[Any], block_size: int = 4, parent: Any = None, **fields: Any
) -> Event:
    """Return a BlockStored."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_size,
        **fields,
    }


def removed(hashes: Sequence[Any], medium: str | None = None, **fields: Any) -> Event:
    """Return a BlockRemoved."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, **fields}


def cleared() -> Event:
    """Return an AllBlocksCleared."""
    return {"type": "AllBlocksCleared"}


def written(event: Event, form: Form = "array") -> Any:
    """Encode an event as plain objects. Fields without a place in the array form need a map."""
    if form == "map":
        return event
    names = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS}.get(event["type"], ())
    unknown = set(event) - set(names) - {"type"}
    assert not unknown, f"only a map has {unknown}"
    values = [event.get(name) for name in names]
    while form == "array" and values and values[-1] is None:
        values.pop()
    return [event["type"], *values]


def payload(
    *events: Any, rank: int | None = 0, form: Form = "array", batch: Literal["array", "pair", "map"] = "array"
) -> bytes:
    """Encode an event batch. Events that are not tagged dicts are passed through."""
    plain = [written(event, form) if isinstance(event, dict) and "type" in event else event for event in events]
    if batch == "map":
        return msgspec.msgpack.encode({"ts": 1.5, "events": plain, "data_parallel_rank": rank})
    return msgspec.msgpack.encode([1.5, plain] if batch == "pair" else [1.5, plain, rank])


def names_of(
    tokens: Sequence[int],
    block_size: int = 4,
    *,
    lora: str | None = None,
    salt: str | None = None,
    objects: Sequence[Sequence[int]] = (),
    is_bigram: bool = False,
) -> list[int]:
    """Return the sequence hashes of a prompt's pages, computed page by page with xxhash.

    objects: hashes of the multimodal objects in each page. Adapter, salt and objects enter the local hash of a page.
    Pages are chained with the base seed alone.
    """
    seed = 1337
    if lora:
        seed += xxhash.xxh3_64_intdigest(lora.encode(), 0)
    if salt:
        seed += xxhash.xxh3_64_intdigest(salt.encode(), 1)
    names: list[int] = []
    for page, start in enumerate(range(0, len(tokens) - is_bigram - block_size + 1, block_size)):
        part = tokens[start : start + block_size + is_bigram]
        data = struct.pack(f"<{len(part)}I", *part)
        data += b"".join(struct.pack("<Q", value) for value in sorted(objects[page] if page < len(objects) else ()))
        local = xxhash.xxh3_64_intdigest(data, seed & MASK64)
        rolled = xxhash.xxh3_64_intdigest(struct.pack("<QQ", names[-1], local), 1337) if names else local
        names.append(rolled)
    return names


def pairs(tokens: Sequence[int]) -> list[list[int]]:
    """Return the bigram form of tokens."""
    return [list(pair) for pair in itertools.pairwise(tokens)]
