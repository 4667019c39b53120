"""Messages of an engine that cost their reader as much as possible, in every known shape."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tests.support.engines.event_payloads import cleared, removed, stored

_PAGE = [1, 2, 3, 4]


def _of_group(number: int, block_hash: int) -> dict[str, Any]:
    kind = "sliding_window" if number else "full_attention"
    return stored([block_hash], _PAGE, group_idx=number, kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=8)


def _pooled(event_type: str, number: int) -> dict[str, Any]:
    return {"event_type": event_type, "seq_hashes": [number], "block_size": 4, "backend_id": f"b{number % 7}"}


SHAPES: dict[str, Callable[[int], Sequence[Any]]] = {
    "empty maps": lambda n: [{}] * n,
    "nils": lambda n: [None] * n,
    "numbers": lambda n: [7] * n,
    "unknown tags": lambda n: [["Other", 1]] * n,
    "clears": lambda n: [cleared()] * n,
    "two kinds of junk": lambda n: [{}, None] * (n // 2),
    "junk, clears and stores": lambda n: [{}, cleared(), stored([1], _PAGE)] * (n // 3),
    "stores and clears of one page": lambda n: [stored([1], _PAGE), cleared()] * (n // 2),
    "distinct names": lambda n: [stored([i], _PAGE, lora_name=f"l{i}", medium=f"m{i}") for i in range(n)],
    "distinct salts": lambda n: [stored([i], _PAGE, cache_salt=f"s{i}") for i in range(n)],
    "many groups": lambda n: [_of_group(i % 16, i) for i in range(n)],
    "groups and removals": lambda n: [_of_group(i % 2, i) if i % 4 else removed([i]) for i in range(n)],
    "one name for all pages": lambda n: [stored([1], [i] * 4) for i in range(n)],
    "extra keys": lambda n: [stored([i], _PAGE, extra_keys=[["a", i]]) for i in range(n)],
    "block sizes": lambda n: [stored([i], [1] * (1 + i % 60), 1 + i % 60) for i in range(n)],
    "pooled pages": lambda n: [_pooled("cleared" if i % 3 else "stored", i) for i in range(n)],
    "ranks": lambda n: [{**_pooled("stored", i), "dp_rank": i} for i in range(n)],
    "many hashes": lambda n: [stored(range(20 * n), []), removed([5] * 20 * n)],
    "many tokens": lambda n: [stored([], range(20 * n))],
    "pages of one token": lambda n: [stored([1] * 20 * n, [1] * 20 * n, 1)],
    "many extra keys": lambda n: [stored([1], _PAGE, extra_keys=[[1] * 20 * n])],
    "extra keys without pages": lambda n: [stored([1], _PAGE, extra_keys=[[i] for i in range(20 * n)])],
    "deep lists": lambda n: [msgspec.Raw(b"\x91" * n + b"\xc0")],
}
"""Name -> the events of a message of about n events."""


def hostile(shape: str, num_events: int) -> bytes:
    """Return a payload of a shape."""
    return msgspec.msgpack.encode([1.0, SHAPES[shape](num_events), 0])
