"""vLLM's `extra_keys`: what went into page hashes besides tokens. The entries have no tags.

An entry is one page's: null, or a list of adapter name, multimodal identifiers, cache salt (only on a prompt's first
page) and prompt embeddings, in this order. A multimodal identifier is a digest of 64 hex digits. NVIDIA Dynamo takes
the first 16 as the object's hash, and so does this module. vLLM up to 0.17 sent `[identifier, offset]`.
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
    """The entries of an event, interpreted."""

    objects: list[list[int]]
    """For each page, the hashes of its multimodal objects, ascending."""
    salt: str
    """Cache salt of the prompt, if an entry looks like one; else empty."""


def read_extra_keys(entries: Sequence[Any], lora_name: str, cache_salt: str, *, begins_prompt: bool) -> ExtraKeys:
    """Interpret the entries. An unknown key is hashed as an object, so that it still tells its page from others.

    lora_name, cache_salt: those that the event itself names, or empty.
    """
    objects: list[list[int]] = []
    salt = ""
    for page, entry in enumerate(entries):
        keys = list(entry) if isinstance(entry, list | tuple) else [] if entry is None else [entry]
        for named in filter(None, (lora_name, cache_salt)):
            if named in keys:
                keys.remove(named)  # one occurrence only: both may have the same text
        if begins_prompt and page == 0 and not cache_salt and keys and _is_salt(keys[-1]):
            salt = keys.pop()
        objects.append(sorted(map(_object_hash, keys)))
    return ExtraKeys(objects, salt)


def local_hashes_with_objects(
    tokens: U32Array, objects: list[list[int]], block_size: int, seed: int, *, is_bigram: bool
) -> U64Array:
    """uint64[pages]: local hashes over a page's tokens and then the hashes of its objects, as Dynamo computes them.

    tokens: uint32[pages * block_size], one more in bigram mode. objects: by page; pages beyond the list have none.
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
