"""Block hash and sequence hash of a page, computed recursively over its prefix with hashlib and xxhash."""

import hashlib
import struct
from functools import cache as memoize

import xxhash


@memoize
def block_hash(raw, page_size, is_bigram):
    """SHA-256 digest of the last page of a prefix, chained by recursion."""
    num_units = len(raw) - is_bigram
    prior = b""
    if num_units > page_size:
        prior = block_hash(raw[:-page_size], page_size, is_bigram)
    units = range(num_units - page_size, num_units)
    tokens = [raw[j + k] for j in units for k in range(1 + is_bigram)]
    return hashlib.sha256(prior + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


def block_name(raw, page_size, is_bigram):
    """Return the block hash as the signed number that events carry."""
    return int.from_bytes(block_hash(raw, page_size, is_bigram)[:8], "big", signed=True)


@memoize
def sequence_hash(raw, page_size, is_bigram, extra_key):
    """XXH3-64 of the last page of a prefix, rolled by recursion. The namespace enters only the local hashes."""
    seed = 1337
    if extra_key is not None:
        seed = (seed + xxhash.xxh3_64_intdigest(extra_key.encode(), 1)) % 2**64
    width = page_size + is_bigram
    local = xxhash.xxh3_64_intdigest(struct.pack(f"<{width}I", *raw[-width:]), seed)
    if len(raw) - is_bigram == page_size:
        return local
    above = sequence_hash(raw[:-page_size], page_size, is_bigram, extra_key)
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", above, local), 1337)
