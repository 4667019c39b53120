"""The kernels that find watched hashes among others."""

from kv_events.kernels.bundles import BoolVector, I64Vector, U64Input, U64Vector
from kv_events.kernels.declare import inline_helper, kernel
from kv_events.kernels.numbers import U64, int64, uint64
from kv_events.kernels.page_table import Table
from kv_events.kernels.page_table_ops import find, find_or_insert

BITMAP_WORDS = 2**14
"""16 bits for each of 65,536 hashes. More are found as well, but rejected later."""
_SPREAD = uint64(0x9E3779B97F4A7C15)
_SHIFT = uint64(64 - 20)


@inline_helper
def _bit(key: U64) -> tuple[int, U64]:
    """Return the word and the bit of a key. It is spread first, because engines may count their blocks."""
    bit = key * _SPREAD >> _SHIFT
    return int64(bit >> uint64(6)), uint64(1) << (bit & uint64(63))


@kernel
def watch(table: Table, bitmap: U64Vector, keys: U64Input, out_new: BoolVector) -> None:
    """Insert keys. bitmap: uint64[BITMAP_WORDS]. out_new: bool[n], written: whether a key got the next entry."""
    for i in range(keys.shape[0]):
        word, bit = _bit(keys[i])
        bitmap[word] |= bit
        entry, is_new = find_or_insert(table, keys[i])
        out_new[i] = is_new and entry >= 0


@kernel
def find_watched(
    table: Table, bitmap: U64Vector, hashes: U64Input, out_positions: I64Vector, out_entries: I64Vector
) -> int:
    """Find watched keys among hashes. Returns their number.

    out_positions, out_entries: int64, at least n elements, written: positions in `hashes`, ascending, and entries.
    """
    found = 0
    for i in range(hashes.shape[0]):
        word, bit = _bit(hashes[i])
        if bitmap[word] & bit != uint64(0):
            entry = find(table, hashes[i])
            if entry >= 0:
                out_positions[found] = i
                out_entries[found] = entry
                found += 1
    return found
