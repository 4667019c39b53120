"""vLLM's `extra_keys`: what, besides tokens, went into the hashes of pages. The entries bear no tags.

Per page: nothing, or a list in the order adapter name, multimodal identifiers, cache salt (on a prompt's first page
only), prompt embeddings. Identifiers of multimodal objects are hex digests of 64 digits, of which NVIDIA Dynamo takes
the first 16 as the object's hash; up to 0.17 they came as `[identifier, offset]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.lib.stride_tricks import sliding_window_view

from kv_events.hashing import U32Array, U64Array

_IDENTIFIER = re.compile("[0-9a-fA-F]{64}")


class ExtraKeys(NamedTuple):
    """What the entries of an event mean."""

    objects: list[list[int]]
    """For each page, hashes of what lies in it, ascending."""
    salt: str
    """Cache salt of the prompt, where only its looks say that it is one; empty: none."""


def read_extra_keys(entries: Sequence[Any], lora_name: str, cache_salt: str, *, begins_prompt: bool) -> ExtraKeys:
    """Make out what the entries mean. What cannot be made out still keeps its page apart from all others.

    lora_name, cache_salt: those that the event names besides; empty: it does not.
    """
    objects: list[list[int]] = []
    salt = ""
    for page, entry in enumerate(entries):
        keys = list(entry) if isinstance(entry, list | tuple) else [] if entry is None else [entry]
        for named in filter(None, (lora_name, cache_salt)):
            if named in keys:
                keys.remove(named)  # once: they may have the same text
        if begins_prompt and page == 0 and not cache_salt and keys and _is_salt(keys[-1]):
            salt = keys.pop()
        objects.append(sorted(map(_object_hash, keys)))
    return ExtraKeys(objects, salt)


def local_hashes_with_objects(
    tokens: U32Array, objects: list[list[int]], block_size: int, seed: int, *, is_bigram: bool
) -> U64Array:
    """uint64[pages]: local hashes of pages whose tokens are followed by the hashes of their objects, as Dynamo has it.

    tokens: uint32[pages * block_size], one more in bigram mode. Pages beyond the list have no objects.
    """
    windows = sliding_window_view(tokens.astype("<u4", copy=False), block_size + is_bigram)[::block_size]
    pages = [window.tobytes() for window in windows]
    for i, hashes in enumerate(objects[: len(pages)]):
        pages[i] += np.array(hashes, "<u8").tobytes()
    return np.array([xxhash.xxh3_64_intdigest(page, seed=seed) for page in pages], np.uint64)


def _is_salt(key: Any) -> bool:
    return isinstance(key, str) and _IDENTIFIER.fullmatch(key) is None


def _object_hash(key: Any) -> int:
    if isinstance(key, list | tuple) and key and isinstance(key[0], str):
        key = key[0]
    if isinstance(key, str) and _IDENTIFIER.fullmatch(key):
        return int(key[:16], 16)
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(key))
