"""Kernels that read the fields of one event into a row, in any of their encodings."""

import numpy as np

from bridge.decoding.kernels import columns
from bridge.decoding.kernels.tokens import read_tokens
from kv_events.kernels import msgpack
from kv_events.kernels.bundles import I64Vector, U8Input, U32Vector, U64Vector
from kv_events.kernels.declare import helper, inline_helper
from kv_events.kernels.instructions import eight_bytes
from kv_events.kernels.numbers import U64, int64, uint64
from kv_events.limits import MAX_ENGINE_PAGES

# fields that are no columns; the others are named by the column, or the first one, that their value goes to
F_EVENT_TYPE, F_UNKNOWN, _F_LORA_OR_MAP = range(columns.NUM_COLUMNS, columns.NUM_COLUMNS + 3)

_TEXT, _BORDERS, _MEANINGS = msgpack.dictionary(
    {
        "medium": columns.MEDIUM,
        "lora_name": columns.LORA,
        "cache_salt": columns.SALT,
        "kv_cache_spec_kind": columns.SPEC,
        "locality": columns.LOCALITY,
        "extra_keys": columns.EXTRA,
        "block_hashes": columns.HASH_FROM,
        "parent_block_hash": columns.PARENT,
        "token_ids": columns.TOKEN_FROM,
        "block_size": columns.BLOCK_SIZE,
        "lora_id": columns.LORA_ID,
        "group_idx": columns.GROUP,
        "kv_cache_spec_sliding_window": columns.WINDOW,
        "type": columns.KIND,
        "event_type": F_EVENT_TYPE,
    }
)
_TAG_TEXT, _TAG_BORDERS, _TAG_MEANINGS = msgpack.dictionary(
    {"BlockStored": columns.STORED, "BlockRemoved": columns.REMOVED, "AllBlocksCleared": columns.CLEARED}
)
_MEDIA_TEXT, _MEDIA_BORDERS, _MEDIA_TIERS = msgpack.dictionary(
    {word: tier for name, tier in columns.TIERS.items() if name for word in (name, name.lower())}
)
_NO_MEDIUM = columns.TIERS[""]
_LOCAL, _REMOTE = range(2)
_LOCALITY_TEXT, _LOCALITY_BORDERS, _LOCALITIES = msgpack.dictionary(
    {"LOCAL": _LOCAL, "REMOTE": _REMOTE, "local": _LOCAL, "remote": _REMOTE}
)

# fields of the array form, in the order in which the engines added them; index 0 is the tag
STORED_FIELDS = np.array(
    [
        columns.KIND, columns.HASH_FROM, columns.PARENT, columns.TOKEN_FROM, columns.BLOCK_SIZE, columns.LORA_ID,
        columns.MEDIUM, _F_LORA_OR_MAP, columns.EXTRA, columns.GROUP, columns.SPEC, columns.WINDOW,
    ],
    np.int64,
)  # fmt: skip
REMOVED_FIELDS = np.array([columns.KIND, columns.HASH_FROM, columns.MEDIUM, columns.GROUP], np.int64)

_MAX_SIZE = uint64(2**31 - 1)
_MAX_PAGES = uint64(MAX_ENGINE_PAGES)
_ZERO = uint64(0)
_UINT64, _INT64 = 0xCF, 0xD3


@inline_helper
def read_name(data: U8Input, at: int, stop: int) -> tuple[int, int]:
    """Read the key of a field. Returns (field or F_UNKNOWN, position after it)."""
    return msgpack.read_key(data, at, stop, _TEXT, _BORDERS, _MEANINGS, F_UNKNOWN)


@inline_helper
def _read_hash(data: U8Input, at: int, stop: int) -> tuple[bool, U64, int]:
    """Read a block hash. Returns (whether it is valid, 64 bits, position after it).

    Only the last eight bytes of a binary hash are used, as a big-endian number.
    """
    if at + 9 <= stop and (data[at] == _UINT64 or data[at] == _INT64):
        return True, eight_bytes(data, at + 1), at + 9
    kind, value, at = msgpack.read_head(data, at, stop)
    if kind in (msgpack.POSITIVE, msgpack.NEGATIVE):
        return True, value, at
    if kind == msgpack.BIN and value > _ZERO:
        length = int64(value)
        return True, msgpack.big_endian(data, at, length), at + length
    return False, _ZERO, at


@inline_helper
def _read_hashes(data: U8Input, at: int, stop: int, row: I64Vector, hashes: U64Vector) -> int:
    kind, count, at = msgpack.read_head(data, at, stop)
    if kind != msgpack.ARRAY:
        return columns.reject(row, columns.TYPE)
    if count > _MAX_PAGES:
        return columns.reject(row, columns.RANGE)
    position = row[columns.HASH_FROM]
    for _ in range(int64(count)):
        is_hash, value, at = _read_hash(data, at, stop)
        if not is_hash:
            return columns.reject(row, columns.TYPE)
        hashes[position] = value
        position += 1
    row[columns.HASH_TO] = position
    return at


@helper
def _read_parent(data: U8Input, at: int, stop: int, row: I64Vector) -> int:
    kind, _, end = msgpack.read_head(data, at, stop)
    if kind == msgpack.NIL:
        row[columns.HAS_PARENT] = 0
        return end
    is_hash, value, at = _read_hash(data, at, stop)
    if not is_hash:
        return columns.reject(row, columns.TYPE)
    row[columns.HAS_PARENT] = 1
    row[columns.PARENT] = int64(value)
    return at


@inline_helper
def _read_number(data: U8Input, at: int, stop: int, row: I64Vector, column: int) -> int:
    """Read an integer. Sizes and indices must fit 31 bits. Nil counts as absent."""
    kind, value, at = msgpack.read_head(data, at, stop)
    if kind == msgpack.NIL:
        return at
    if kind not in (msgpack.POSITIVE, msgpack.NEGATIVE):
        return columns.reject(row, columns.TYPE)
    if column != columns.LORA_ID and (kind == msgpack.NEGATIVE or value > _MAX_SIZE):
        return columns.reject(row, columns.RANGE)
    row[column] = int64(value)
    return at


@helper
def _read_text(data: U8Input, at: int, stop: int, row: I64Vector, column: int) -> int:
    kind, value, at = msgpack.read_head(data, at, stop)
    if kind == msgpack.NIL:
        return at
    if kind != msgpack.STR:
        return columns.reject(row, columns.TYPE)
    row[column], row[column + 1] = at, int64(value)
    return at + int64(value)


@helper
def _read_lora_or_map(data: U8Input, at: int, stop: int, row: I64Vector) -> int:
    """Read the element at index 7: vLLM's adapter name. Some SGLang builds send a map with the salt there instead."""
    kind, count, end = msgpack.read_head(data, at, stop)
    if kind != msgpack.MAP:
        return _read_text(data, at, stop, row, columns.LORA)
    at = end
    for _ in range(int64(count)):
        field, at = read_name(data, at, stop)
        if at < 0:
            return columns.reject(row, columns.TRUNCATED)
        if field in (columns.SALT, columns.LORA):
            at = _read_text(data, at, stop, row, field)
        else:
            at = msgpack.skip(data, at, stop)
        if at < 0:
            return columns.reject(row, columns.TYPE)
    return at


@helper
def _read_extra(data: U8Input, at: int, stop: int, row: I64Vector) -> int:
    """Record the extra keys if any page has some."""
    kind, count, inside = msgpack.read_head(data, at, stop)
    end = msgpack.skip(data, at, stop)
    if end < 0:
        return columns.reject(row, columns.TRUNCATED)
    if kind == msgpack.NIL:
        return end
    if kind != msgpack.ARRAY:
        return columns.reject(row, columns.TYPE)
    for _ in range(int64(count)):
        kind, value, _at = msgpack.read_head(data, inside, stop)
        if kind != msgpack.NIL and not (kind == msgpack.ARRAY and value == _ZERO):
            row[columns.EXTRA], row[columns.EXTRA_LENGTH] = at, end - at
            break
        inside = msgpack.skip(data, inside, stop)
    return end


@helper
def read_tag(data: U8Input, at: int, stop: int, row: I64Vector) -> int:
    kind, value, at = msgpack.read_head(data, at, stop)
    if kind != msgpack.STR:
        return columns.reject(row, columns.TAG)
    length = int64(value)
    tag = msgpack.look_up(data, at, length, _TAG_TEXT, _TAG_BORDERS, _TAG_MEANINGS, columns.UNREADABLE)
    if row[columns.KIND] != columns.MOONCAKE_EVENT:
        row[columns.KIND] = tag
    return at + length


@inline_helper
def read_field(
    data: U8Input, at: int, stop: int, field: int, row: I64Vector, hashes: U64Vector, tokens: U32Vector
) -> int:
    """Read one value into the row. Returns the position after it, or -1 with a reason in the row."""
    if columns.MEDIUM <= field <= columns.LOCALITY:
        return _read_text(data, at, stop, row, field)
    if field == columns.HASH_FROM:
        return _read_hashes(data, at, stop, row, hashes)
    if field == columns.TOKEN_FROM:
        return read_tokens(data, at, stop, row, tokens)
    if field == columns.PARENT:
        return _read_parent(data, at, stop, row)
    if columns.BLOCK_SIZE <= field <= columns.WINDOW:
        return _read_number(data, at, stop, row, field)
    if field == _F_LORA_OR_MAP:
        return _read_lora_or_map(data, at, stop, row)
    if field == columns.EXTRA:
        return _read_extra(data, at, stop, row)
    if field == columns.KIND:
        return read_tag(data, at, stop, row)
    if field == F_EVENT_TYPE:
        row[columns.KIND] = columns.MOONCAKE_EVENT
    at = msgpack.skip(data, at, stop)
    return at if at >= 0 else columns.reject(row, columns.TRUNCATED)


@helper
def tier_of(data: U8Input, row: I64Vector) -> int:
    """Return the tier that the medium and the locality of an event name, or UNKNOWN if one of them is not known here.

    Pages on another machine are external, whatever their medium there.
    """
    tier, locality = int64(_NO_MEDIUM), int64(_LOCAL)
    if row[columns.MEDIUM_LENGTH]:
        at, length = row[columns.MEDIUM], row[columns.MEDIUM_LENGTH]
        tier = msgpack.look_up(data, at, length, _MEDIA_TEXT, _MEDIA_BORDERS, _MEDIA_TIERS, columns.UNKNOWN)
    if row[columns.LOCALITY_LENGTH]:
        at, length = row[columns.LOCALITY], row[columns.LOCALITY_LENGTH]
        locality = msgpack.look_up(data, at, length, _LOCALITY_TEXT, _LOCALITY_BORDERS, _LOCALITIES, columns.UNKNOWN)
    if tier == columns.UNKNOWN or locality == columns.UNKNOWN:
        return int64(columns.UNKNOWN)
    return tier if locality == _LOCAL else int64(columns.EXTERNAL)
