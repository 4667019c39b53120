"""Kernels that read the fields of one event into a row, in any of their encodings."""

from __future__ import annotations

import numpy as np

from bridge.decoding.kernels.rows import (
    BLOCK_SIZE,
    CLEARED,
    EXTRA,
    EXTRA_LENGTH,
    GROUP,
    HAS_PARENT,
    HASH_FROM,
    HASH_TO,
    KIND,
    LORA,
    LORA_ID,
    MEDIUM,
    MOONCAKE_EVENT,
    PARENT,
    RANGE,
    REMOVED,
    STORED,
    TAG,
    TRUNCATED,
    TYPE,
    UNREADABLE,
    WINDOW,
    fail,
)
from bridge.decoding.kernels.tokens import read_tokens
from kv_events.kernels.declare import array_function, array_helper
from kv_events.kernels.instructions import eight_bytes
from kv_events.kernels.msgpack import (
    ARRAY,
    BIN,
    MAP,
    NEGATIVE,
    NIL,
    POSITIVE,
    STR,
    big_endian,
    dictionary,
    look_up,
    read_head,
    read_key,
    skip,
)
from kv_events.limits import MAX_ENGINE_PAGES

# fields; the first ones are strings, whose pairs of columns begin at MEDIUM
_F_MEDIUM, _F_LORA, _F_SALT, _F_SPEC, _F_LOCALITY = range(5)
_F_EXTRA, _F_HASHES, _F_PARENT, _F_TOKENS, _F_BLOCK_SIZE, _F_LORA_ID, _F_GROUP, _F_WINDOW = range(5, 13)
F_TAG, F_EVENT_TYPE, F_UNKNOWN, _F_LORA_OR_MAP = range(13, 17)
NUM_TEXTS = 5

EVENT_TEXT, EVENT_BORDERS, EVENT_MEANINGS = dictionary(
    {
        "medium": _F_MEDIUM,
        "lora_name": _F_LORA,
        "cache_salt": _F_SALT,
        "kv_cache_spec_kind": _F_SPEC,
        "locality": _F_LOCALITY,
        "extra_keys": _F_EXTRA,
        "block_hashes": _F_HASHES,
        "parent_block_hash": _F_PARENT,
        "token_ids": _F_TOKENS,
        "block_size": _F_BLOCK_SIZE,
        "lora_id": _F_LORA_ID,
        "group_idx": _F_GROUP,
        "kv_cache_spec_sliding_window": _F_WINDOW,
        "type": F_TAG,
        "event_type": F_EVENT_TYPE,
    }
)
_TAG_TEXT, _TAG_BORDERS, _TAG_MEANINGS = dictionary(
    {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": CLEARED}
)

# fields of the array form, in the order in which the engines added them; index 0 is the tag
STORED_FIELDS = np.array(
    [
        F_TAG, _F_HASHES, _F_PARENT, _F_TOKENS, _F_BLOCK_SIZE, _F_LORA_ID, _F_MEDIUM, _F_LORA_OR_MAP, _F_EXTRA,
        _F_GROUP, _F_SPEC, _F_WINDOW,
    ],
    np.int64,
)  # fmt: skip
REMOVED_FIELDS = np.array([F_TAG, _F_HASHES, _F_MEDIUM, _F_GROUP], np.int64)

_MAX_SIZE = np.uint64(2**31 - 1)
_MAX_PAGES = np.uint64(MAX_ENGINE_PAGES)
_ZERO = np.uint64(0)
_UINT64, _INT64 = 0xCF, 0xD3


@array_helper
def _read_hash(data, at, stop):
    """Read a block hash. Returns (whether it is valid, 64 bits, position after it).

    Only the last eight bytes of a binary hash are used, as a big-endian number.
    """
    if at + 9 <= stop and (data[at] == _UINT64 or data[at] == _INT64):
        return True, eight_bytes(data, at + 1), at + 9
    kind, value, at = read_head(data, at, stop)
    if kind in (POSITIVE, NEGATIVE):
        return True, value, at
    if kind == BIN and value > _ZERO:
        length = np.int64(value)
        return True, big_endian(data, at, length), at + length
    return False, _ZERO, at


@array_helper
def _read_hashes(data, at, stop, row, hashes):
    kind, count, at = read_head(data, at, stop)
    if kind != ARRAY:
        return fail(row, TYPE)
    if count > _MAX_PAGES:
        return fail(row, RANGE)
    position = row[HASH_FROM]
    for _ in range(np.int64(count)):
        is_hash, value, at = _read_hash(data, at, stop)
        if not is_hash:
            return fail(row, TYPE)
        hashes[position] = value
        position += 1
    row[HASH_TO] = position
    return at


@array_function
def _read_parent(data, at, stop, row):
    kind, _, end = read_head(data, at, stop)
    if kind == NIL:
        row[HAS_PARENT] = 0
        return end
    is_hash, value, at = _read_hash(data, at, stop)
    if not is_hash:
        return fail(row, TYPE)
    row[HAS_PARENT] = 1
    row[PARENT] = np.int64(value)
    return at


@array_helper
def _read_number(data, at, stop, row, column):
    """Read an integer. Sizes and indices must fit 31 bits. Nil counts as absent."""
    kind, value, at = read_head(data, at, stop)
    if kind == NIL:
        return at
    if kind not in (POSITIVE, NEGATIVE):
        return fail(row, TYPE)
    if column != LORA_ID and (kind == NEGATIVE or value > _MAX_SIZE):
        return fail(row, RANGE)
    row[column] = np.int64(value)
    return at


@array_function
def _read_text(data, at, stop, row, column):
    kind, value, at = read_head(data, at, stop)
    if kind == NIL:
        return at
    if kind != STR:
        return fail(row, TYPE)
    row[column], row[column + 1] = at, np.int64(value)
    return at + np.int64(value)


@array_function
def _read_lora_or_map(data, at, stop, row):
    """Read the element at index 7: vLLM's adapter name. Some SGLang builds send a map with the salt there instead."""
    kind, count, end = read_head(data, at, stop)
    if kind != MAP:
        return _read_text(data, at, stop, row, LORA)
    at = end
    for _ in range(np.int64(count)):
        field, at = read_key(data, at, stop, EVENT_TEXT, EVENT_BORDERS, EVENT_MEANINGS, F_UNKNOWN)
        if at < 0:
            return fail(row, TRUNCATED)
        if field in (_F_SALT, _F_LORA):
            at = _read_text(data, at, stop, row, MEDIUM + 2 * field)
        else:
            at = skip(data, at, stop)
        if at < 0:
            return fail(row, TYPE)
    return at


@array_function
def _read_extra(data, at, stop, row):
    """Record the extra keys if any page has some."""
    kind, count, inside = read_head(data, at, stop)
    end = skip(data, at, stop)
    if end < 0:
        return fail(row, TRUNCATED)
    if kind == NIL:
        return end
    if kind != ARRAY:
        return fail(row, TYPE)
    for _ in range(np.int64(count)):
        kind, value, _at = read_head(data, inside, stop)
        if kind != NIL and not (kind == ARRAY and value == _ZERO):
            row[EXTRA], row[EXTRA_LENGTH] = at, end - at
            break
        inside = skip(data, inside, stop)
    return end


@array_function
def read_tag(data, at, stop, row):
    kind, value, at = read_head(data, at, stop)
    if kind != STR:
        return fail(row, TAG)
    length = np.int64(value)
    tag = look_up(data, at, length, _TAG_TEXT, _TAG_BORDERS, _TAG_MEANINGS, UNREADABLE)
    if row[KIND] != MOONCAKE_EVENT:
        row[KIND] = tag
    return at + length


@array_helper
def read_field(data, at, stop, field, row, hashes, tokens):
    """Read one value into the row. Returns the position after it, or -1 with a reason in the row."""
    if field < NUM_TEXTS:
        return _read_text(data, at, stop, row, MEDIUM + 2 * field)
    if field == _F_HASHES:
        return _read_hashes(data, at, stop, row, hashes)
    if field == _F_TOKENS:
        return read_tokens(data, at, stop, row, tokens)
    if field == _F_PARENT:
        return _read_parent(data, at, stop, row)
    if field == _F_BLOCK_SIZE:
        return _read_number(data, at, stop, row, BLOCK_SIZE)
    if field == _F_LORA_ID:
        return _read_number(data, at, stop, row, LORA_ID)
    if field == _F_GROUP:
        return _read_number(data, at, stop, row, GROUP)
    if field == _F_WINDOW:
        return _read_number(data, at, stop, row, WINDOW)
    if field == _F_LORA_OR_MAP:
        return _read_lora_or_map(data, at, stop, row)
    if field == _F_EXTRA:
        return _read_extra(data, at, stop, row)
    if field == F_TAG:
        return read_tag(data, at, stop, row)
    if field == F_EVENT_TYPE:
        row[KIND] = MOONCAKE_EVENT
    at = skip(data, at, stop)
    return at if at >= 0 else fail(row, TRUNCATED)
