"""The digest shows with each batch whether a view equals the ledger.

For each medium, it contains the number of pages held and the XOR of their mixed sequence hashes. Adding or removing a
page takes O(1), and the order does not matter. Publisher and indexer both use this code. As an array, a digest is
uint64[8]: four counts, then four XORs, in the order of `schema.MEDIA`. On the wire, it is the same 64 bytes,
little-endian.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kv_events.kernels.bundles import U64Vector
from kv_events.kernels.declare import inline_helper
from kv_events.kernels.numbers import U64, uint64
from kv_events.schema import NUM_MEDIA

DIGEST_WORDS = 2 * NUM_MEDIA
DIGEST_BYTES = 8 * DIGEST_WORDS

Digest: TypeAlias = npt.NDArray[np.uint64]


@inline_helper
def mix(sequence_hash: U64) -> U64:
    """Mix a hash with the finaliser of SplitMix64 (Steele, Lea, Flood, 2014).

    Mixed hashes do not cancel out even if the hashes are related by XOR.
    """
    x = sequence_hash + uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@inline_helper
def add_page(digest: U64Vector, medium: int, sequence_hash: U64) -> None:
    """Add one page that became resident. digest: uint64[8]; medium: tier index."""
    digest[medium] += uint64(1)
    digest[medium + NUM_MEDIA] ^= mix(sequence_hash)


@inline_helper
def remove_page(digest: U64Vector, medium: int, sequence_hash: U64) -> None:
    """Subtract one page that was removed. digest: uint64[8]; medium: tier index."""
    digest[medium] -= uint64(1)
    digest[medium + NUM_MEDIA] ^= mix(sequence_hash)


def empty_digest() -> Digest:
    return np.zeros(DIGEST_WORDS, np.uint64)


def digest_bytes(digest: Digest) -> bytes:
    """Return the wire form, 64 bytes."""
    return digest.astype("<u8", copy=False).tobytes()


def page_counts(digest: Digest) -> list[int]:
    """Return the number of pages on each medium, in the order of `schema.MEDIA`."""
    counts: list[int] = digest[:NUM_MEDIA].tolist()
    return counts
