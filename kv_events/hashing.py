"""The two hashes of a page.

*Block hash*: the engine's own identifier of a page inside one worker: SGLang's SHA-256 chain over the tokens of a page,
cut to a signed 64-bit integer. *Sequence hash*: the router's identifier of a page together with its whole prefix:
XXH3-64 rolled along the pages of a prompt, after Mooncake's RFC #1527. It is equal on every worker and can be computed
from a prompt alone.

The *base* is the seed of `kv_events.hash_seed` (NVIDIA Dynamo's by default). LoRA adapter and cache salt change the
seed of the *local* hashes, which cover the tokens of one page. Pages are rolled with the base in every namespace, as in
Dynamo 1.6, so that a caller with local hashes need not know the namespace.
"""

import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha256

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kv_events.errors import InvalidValueError, check_positive
from kv_events.hash_seed import process_seed
from kv_events.kernels.xxh3 import hash_prompt, hash_windows, long_hash_state, roll
from kv_events.tokens import U32Array as U32Array
from kv_events.tokens import U64Array as U64Array
from kv_events.tokens import hash_array, hash_word
from kv_events.tokens import token_array as token_array

_SGLANG_NAMESPACE = b"sglang-kv-event-namespace-v1"
_SGLANG_SALT = b"sglang-cache-salt-v1\0"
_MASK64 = 2**64 - 1
HEX_DIGEST = re.compile("[0-9a-fA-F]{64}")
_U64, _NO_PARENT = np.dtype(np.uint64), np.uint64(0)


def _utf8(name: str, field: str) -> bytes:
    try:
        return name.encode()
    except (AttributeError, UnicodeEncodeError):
        raise InvalidValueError(field, name, "text that UTF-8 can hold") from None


# --- block hash -----------------------------------------------------------------------------------------------------


def block_hash_chain(
    tokens: Sequence[int] | npt.NDArray[np.integer], page_size: int, prior_hash: str | None, *, is_bigram: bool
) -> list[str]:
    """Return the SHA-256 hashes of the complete pages of a key, each chained to the one before it, in lower-case hex.

    tokens: the key's raw tokens, integers in 0 .. 2**32 - 1. page_size: logical units a page. prior_hash: hex hash of
    the page before the first one, or None. In bigram mode, unit j is the pair (tokens[j], tokens[j + 1]), and both
    tokens are hashed. Raises InvalidValueError.
    """
    check_positive(page_size=page_size)
    tokens = token_array(tokens, "tokens")
    if is_bigram:
        tokens = np.stack((tokens[:-1], tokens[1:]), axis=1).reshape(-1) if len(tokens) > 1 else tokens[:0]
    data = memoryview(tokens.astype("<u4", copy=False).tobytes())
    page_bytes = page_size * (8 if is_bigram else 4)
    digest = _hex(prior_hash, "prior_hash") if prior_hash else b""
    hashes = []
    for start in range(0, len(data) - page_bytes + 1, page_bytes):
        page = sha256(digest)
        page.update(data[start : start + page_bytes])
        digest = page.digest()
        hashes.append(digest.hex())
    return hashes


def hash_str_to_int64(hash_str: str) -> int:
    """Return the first 16 hex digits as a signed 64-bit integer. Raises InvalidValueError."""
    value = int.from_bytes(_hex(hash_str[:16], "hash_str"), "big")
    return value - 2**64 if value >= 2**63 else value


def hash_strs_to_int64(hash_strs: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return int64[n]: `hash_str_to_int64` of many 64-digit hashes at once. Raises InvalidValueError."""
    digests = _hex("".join(hash_strs), "hash_strs")
    if len(digests) != 32 * len(hash_strs):
        raise InvalidValueError("hash_strs", hash_strs, "hashes of 64 hex digits")
    return np.frombuffer(digests, dtype=">i8")[::4].astype(np.int64)


def salted_prior_hash(cache_salt: str | None) -> str | None:
    """Return the hash from which SGLang chains the first page of a salt, or None without a salt."""
    return sha256(_SGLANG_SALT + _utf8(cache_salt, "cache_salt")).hexdigest() if cache_salt else None


def namespaced_block_hashes(
    hashes: Sequence[int] | npt.NDArray[np.int64], extra_key: str | None, cache_salt: str | None
) -> npt.NDArray[np.int64]:
    """Return int64[n]: the hashes with which SGLang publishes the pages of a namespace.

    hashes: int64[n], a chain that starts from the `salted_prior_hash`. Without adapter and salt they are published as
    they are. With `"format": "dynamo"` both are hashed in; in the default format only the key of a named LoRA adapter.
    """
    chain = np.asarray(hashes, np.int64)
    if extra_key is None and cache_salt is None:
        return chain
    seed = sha256(_SGLANG_NAMESPACE + _tagged(extra_key) + _tagged(cache_salt)).digest()
    words = chain.astype(">i8").tobytes()
    digests = [sha256(seed + words[start : start + 8]).digest()[:8] for start in range(0, len(words), 8)]
    return np.frombuffer(b"".join(digests), ">i8").astype(np.int64)


def _hex(digits: str, field: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except (TypeError, ValueError):
        raise InvalidValueError(field, digits, "hex digits") from None


def _tagged(name: str | None) -> bytes:
    """Return bytes that distinguish an absent name from an empty one and delimit each name."""
    if name is None:
        return b"\0"
    data = _utf8(name, "name")
    return b"\1" + len(data).to_bytes(8, "little") + data


# --- sequence hash --------------------------------------------------------------------------------------------------


def namespace_seed(lora_name: str | None = None, cache_salt: str | None = None, *, base: int | None = None) -> int:
    """Return the seed of a namespace's local hashes: the base plus a tagged term for the LoRA name and for the salt.

    A name of "" counts as absent. base: None means `process_seed()`, here and below.

    The terms are XXH3-64 of the UTF-8 name with seed 0 (LoRA) and 1 (salt), added modulo 2**64, as in Dynamo 1.6. A
    salt "x" and an adapter "x" therefore give different seeds. Raises InvalidValueError.
    """
    seed = int(_seed_word(base, "base"))
    if lora_name:
        seed += xxhash.xxh3_64_intdigest(_utf8(lora_name, "lora_name"), seed=0)
    if cache_salt:
        seed += xxhash.xxh3_64_intdigest(_utf8(cache_salt, "cache_salt"), seed=1)
    return seed & _MASK64


def num_whole_pages(num_tokens: int, block_size: int, *, is_bigram: bool = False) -> int:
    """Return the number of complete pages. A partial last page has no hash."""
    if not isinstance(block_size, int) or block_size < 1:
        raise InvalidValueError("block_size", block_size, "a positive integer")
    return (num_tokens - is_bigram) // block_size if num_tokens else 0


def local_hashes(
    tokens: Sequence[int] | npt.NDArray[np.integer],
    block_size: int,
    seed: int | None = None,
    *,
    is_bigram: bool = False,
) -> U64Array:
    """Return uint64[pages]: XXH3-64 of the tokens of each complete page as little-endian u32, without its prefix.

    tokens: integers in 0 .. 2**32 - 1; a uint32 array is not copied. seed: the `namespace_seed`. In bigram mode a page
    of block_size pairs spans block_size + 1 tokens and shares its last one with the next page. Raises
    InvalidValueError.
    """
    tokens = token_array(tokens, "tokens")
    out = np.empty(num_whole_pages(len(tokens), block_size, is_bigram=is_bigram), _U64)
    width, word = block_size + is_bigram, _seed_word(seed, "seed")
    hash_windows(tokens, width, block_size, word, long_hash_state(width, word), out)
    return out


def local_hashes_with_objects(
    tokens: U32Array, objects: Sequence[Sequence[int]], block_size: int, seed: int, *, is_bigram: bool = False
) -> U64Array:
    """Return uint64[pages]: local hashes over a page's tokens and then the hashes of its objects, as Dynamo does.

    objects: for each page the hashes of its multimodal objects, ascending. Pages beyond the list have none.
    """
    local, width = local_hashes(tokens, block_size, seed, is_bigram=is_bigram), block_size + is_bigram
    for page, hashes in enumerate(objects[: len(local)]):
        if hashes:
            start = page * block_size
            data = tokens[start : start + width].astype("<u4", copy=False).tobytes()
            local[page] = xxhash.xxh3_64_intdigest(data + np.array(hashes, "<u8").tobytes(), seed=seed)
    return local


def object_hash(identifier: object) -> int:
    """Return the hash of a multimodal object: the first 16 of an identifier's 64 hex digits, else XXH3-64 of it."""
    if isinstance(identifier, str) and HEX_DIGEST.fullmatch(identifier):
        return int(identifier[:16], 16)
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(identifier))


def rolling_hashes(
    local: Sequence[int] | npt.NDArray[np.integer], *, parent: int | None = None, base: int | None = None
) -> U64Array:
    """Return uint64[pages]: the sequence hashes of local hashes of any namespace.

    local: integers in 0 .. 2**64 - 1; a uint64 array is not copied. parent: sequence hash of the page before the first
    one. Raises InvalidValueError.
    """
    local = hash_array(local, "local")
    out = np.empty(len(local), _U64)
    first = _NO_PARENT if parent is None else hash_word(parent, "parent")
    roll(local, _seed_word(base, "base"), first, parent is not None, out)
    return out


def sequence_hashes(
    tokens: Sequence[int] | npt.NDArray[np.integer],
    block_size: int,
    seed: int | None = None,
    parent: int | None = None,
    *,
    base: int | None = None,
    is_bigram: bool = False,
) -> U64Array:
    """Return uint64[pages]: the sequence hashes of a prompt's complete pages. See `local_hashes` and `rolling_hashes`.

    tokens: integers in 0 .. 2**32 - 1; a uint32 array is not copied. seed: the `namespace_seed`, used for local hashes
    only. None means the base. Raises InvalidValueError.
    """
    tokens, rolled_with = token_array(tokens, "tokens"), _seed_word(base, "base")
    out = np.empty(num_whole_pages(len(tokens), block_size, is_bigram=is_bigram), _U64)
    width, word = block_size + is_bigram, rolled_with if seed is None else hash_word(seed, "seed")
    state, first = long_hash_state(width, word), _NO_PARENT if parent is None else hash_word(parent, "parent")
    hash_prompt(tokens, width, block_size, word, state, rolled_with, first, parent is not None, out)
    return out


@cache
def process_base() -> np.uint64:
    """Return `process_seed()` as a word."""
    return np.uint64(process_seed())


def _seed_word(seed: int | None, field: str) -> np.uint64:
    return process_base() if seed is None else hash_word(seed, field)
