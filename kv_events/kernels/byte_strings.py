"""Kernels that hash and compare short texts."""

from kv_events.kernels.bundles import U8Input
from kv_events.kernels.declare import helper
from kv_events.kernels.instructions import eight_bytes, folded_product
from kv_events.kernels.numbers import U64, uint64

_FACTOR = uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio


@helper
def hash_bytes(data: U8Input, begin: int, end: int, state: U64) -> U64:
    """Return a hash of `data[begin:end]`. state: a secret, or the hash of what comes before."""
    at, state = begin, folded_product(state ^ uint64(end - begin), _FACTOR)
    while at + 8 <= end:
        state = folded_product(state ^ eight_bytes(data, at), _FACTOR)
        at += 8
    while at < end:
        state = folded_product(state ^ uint64(data[at]), _FACTOR)
        at += 1
    return state


@helper
def equal_bytes(data: U8Input, begin: int, end: int, other: U8Input, start: int) -> bool:
    """Return whether `data[begin:end]` is what `other` has from index `start` on."""
    at = begin
    while at + 8 <= end:
        if eight_bytes(data, at) != eight_bytes(other, start + at - begin):
            return False
        at += 8
    while at < end:
        if data[at] != other[start + at - begin]:
            return False
        at += 1
    return True
