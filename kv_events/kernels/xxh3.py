"""XXH3-64 with a seed over arrays of u32 tokens, as numba kernels.

Implements the XXH3 specification of the xxHash project (release 0.8). Input lengths are positive multiples of four
bytes, so the classes of 0 to 3 bytes are not implemented. Strings are hashed by the `xxhash` package.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kv_events.kernels.bundles import U32Input, U64Input, U64Vector
from kv_events.kernels.declare import helper, inline_helper, kernel
from kv_events.kernels.instructions import folded_product, swapped
from kv_events.kernels.numbers import U64, uint64

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_NUM_SECRET_WORDS = len(_SECRET) - 7
# element i: the eight secret bytes from byte i on, as a little-endian word
_SECRET_AT = np.array([int.from_bytes(_SECRET[i : i + 8], "little") for i in range(_NUM_SECRET_WORDS)], dtype=np.uint64)

_MAX_SHORT, _NUM_LANES = 60, 8  # tokens up to which the secret is not derived from the seed; accumulators
_NO_STATE = np.zeros(0, np.uint64)
LONG_STATE_WORDS = _NUM_SECRET_WORDS + _NUM_LANES

_P32_1 = uint64(0x9E3779B1)
_P32_2 = uint64(0x85EBCA77)
_P32_3 = uint64(0xC2B2AE3D)
_P64_1 = uint64(0x9E3779B185EBCA87)
_P64_2 = uint64(0xC2B2AE3D27D4EB4F)
_P64_3 = uint64(0x165667B19E3779F9)
_P64_4 = uint64(0x85EBCA77C2B2AE63)
_P64_5 = uint64(0x27D4EB2F165667C5)
_AVALANCHE = uint64(0x165667919E3779F9)
_RRMXMX = uint64(0x9FB21C651E98DF25)
_LOW32 = uint64(0xFFFFFFFF)


@inline_helper
def _rotate_left(x: U64, bits: int) -> U64:
    return (x << uint64(bits)) | (x >> uint64(64 - bits))


@inline_helper
def _avalanche(h: U64) -> U64:
    h ^= h >> uint64(37)
    h *= _AVALANCHE
    return h ^ (h >> uint64(32))


@inline_helper
def _word(tokens: U32Input, i: int) -> U64:
    """Return the u64 that starts at token i."""
    return uint64(tokens[i]) | (uint64(tokens[i + 1]) << uint64(32))


@inline_helper
def _mix16(tokens: U32Input, i: int, offset: int, seed: U64) -> U64:
    """Mix the four tokens from i on with the secret at a byte offset."""
    return folded_product(
        _word(tokens, i) ^ (_SECRET_AT[offset] + seed), _word(tokens, i + 2) ^ (_SECRET_AT[offset + 8] - seed)
    )


@inline_helper
def _hash_ends(first: U64, last: U64, num_bytes: int, seed: U64) -> U64:
    """Hash 9 to 16 bytes. first, last: the eight bytes at each end."""
    lo = first ^ ((_SECRET_AT[24] ^ _SECRET_AT[32]) + seed)
    hi = last ^ ((_SECRET_AT[40] ^ _SECRET_AT[48]) - seed)
    return _avalanche(uint64(num_bytes) + swapped(lo) + hi + folded_product(lo, hi))


@inline_helper
def hash_pair(low: U64, high: U64, seed: U64) -> U64:
    """Return XXH3-64 of the 16 bytes low ‖ high (both u64, little-endian)."""
    return _hash_ends(low, high, 16, seed)


@inline_helper
def _hash_up_to_8(tokens: U32Input, start: int, n: int, seed: U64) -> U64:
    seed = seed ^ swapped(seed & _LOW32)
    flip = (_SECRET_AT[8] ^ _SECRET_AT[16]) - seed
    h = (uint64(tokens[start + n - 1]) + (uint64(tokens[start]) << uint64(32))) ^ flip
    h ^= _rotate_left(h, 49) ^ _rotate_left(h, 24)
    h *= _RRMXMX
    h ^= (h >> uint64(35)) + uint64(4 * n)
    h *= _RRMXMX
    return h ^ (h >> uint64(28))


@inline_helper
def _hash_up_to_16(tokens: U32Input, start: int, n: int, seed: U64) -> U64:
    return _hash_ends(_word(tokens, start), _word(tokens, start + n - 2), 4 * n, seed)


@inline_helper
def _hash_up_to_128(tokens: U32Input, start: int, n: int, seed: U64) -> U64:
    end = start + n
    acc = uint64(4 * n) * _P64_1
    if n > 24:
        acc += _mix16(tokens, start + 12, 96, seed) + _mix16(tokens, end - 16, 112, seed)
    if n > 16:
        acc += _mix16(tokens, start + 8, 64, seed) + _mix16(tokens, end - 12, 80, seed)
    if n > 8:
        acc += _mix16(tokens, start + 4, 32, seed) + _mix16(tokens, end - 8, 48, seed)
    acc += _mix16(tokens, start, 0, seed) + _mix16(tokens, end - 4, 16, seed)
    return _avalanche(acc)


@inline_helper
def _hash_up_to_240(tokens: U32Input, start: int, n: int, seed: U64) -> U64:
    acc = uint64(4 * n) * _P64_1
    for i in range(8):
        acc += _mix16(tokens, start + 4 * i, 16 * i, seed)
    acc = _avalanche(acc)
    for i in range(8, n // 4):
        acc += _mix16(tokens, start + 4 * i, 16 * (i - 8) + 3, seed)
    return _avalanche(acc + _mix16(tokens, start + n - 4, 119, seed))


@inline_helper
def _accumulate(acc: U64Vector, tokens: U32Input, start: int, secret: U64Vector, offset: int) -> None:
    for i in range(8):
        value = _word(tokens, start + 2 * i)
        keyed = value ^ secret[offset + 8 * i]
        acc[i ^ 1] += value
        acc[i] += (keyed & _LOW32) * (keyed >> uint64(32))


@helper
def _hash_long(tokens: U32Input, start: int, n: int, secret: U64Vector, acc: U64Vector) -> U64:
    """Hash more than 240 bytes.

    secret: words of the seeded secret at every byte offset, see `_seeded_secret`. acc: uint64[8], scratch space.
    """
    acc[0], acc[1], acc[2], acc[3] = _P32_3, _P64_1, _P64_2, _P64_3
    acc[4], acc[5], acc[6], acc[7] = _P64_4, _P32_2, _P64_5, _P32_1
    num_stripes = (4 * n - 1) // 64
    for stripe in range(num_stripes):
        _accumulate(acc, tokens, start + 16 * stripe, secret, 8 * (stripe % 16))
        if stripe % 16 == 15:
            for i in range(8):
                acc[i] = (acc[i] ^ (acc[i] >> uint64(47)) ^ secret[128 + 8 * i]) * _P32_1
    _accumulate(acc, tokens, start + n - 16, secret, 121)
    result = uint64(4 * n) * _P64_1
    for i in range(4):
        result += folded_product(acc[2 * i] ^ secret[11 + 16 * i], acc[2 * i + 1] ^ secret[19 + 16 * i])
    return _avalanche(result)


@lru_cache(maxsize=256)
def _seeded_secret(seed: int) -> npt.NDArray[np.uint64]:
    """Return uint64[185], the words of the secret derived from a seed, one at every byte offset."""
    words, signs = _SECRET_AT[::8].copy(), np.array([1, -1] * 12, np.int64).view(np.uint64)
    data = (words + signs * uint64(seed)).astype("<u8").view(np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(data, 8)
    return np.ascontiguousarray(windows).view("<u8").reshape(-1).astype(np.uint64)


def long_hash_state(width: int, seed: int | np.uint64) -> npt.NDArray[np.uint64]:
    """Return uint64[LONG_STATE_WORDS], which `hash_windows` needs for windows of more than 60 tokens; [0] for others.

    Threads must not share it.
    """
    if width <= _MAX_SHORT:
        return _NO_STATE
    return np.concatenate((_seeded_secret(int(seed)), np.zeros(_NUM_LANES, np.uint64)))


@kernel
def hash_windows(tokens: U32Input, width: int, stride: int, seed: U64, state: U64Vector, out: U64Vector) -> None:
    """Compute XXH3-64 of windows of a token array.

    tokens: uint32, C order, with at least (len(out) - 1) * stride + width elements. width: tokens per window, >= 1.
    stride: tokens between the starts of adjacent windows. state: `long_hash_state` of this width and seed. out: uint64;
    out[i] receives the hash of tokens[i * stride :][:width] as little-endian bytes.
    """
    if width > _MAX_SHORT:
        secret, acc = state[:_NUM_SECRET_WORDS], state[_NUM_SECRET_WORDS:]
        for i in range(out.shape[0]):
            out[i] = _hash_long(tokens, i * stride, width, secret, acc)
    elif width > 32:
        for i in range(out.shape[0]):
            out[i] = _hash_up_to_240(tokens, i * stride, width, seed)
    elif width > 4:
        for i in range(out.shape[0]):
            out[i] = _hash_up_to_128(tokens, i * stride, width, seed)
    elif width > 2:
        for i in range(out.shape[0]):
            out[i] = _hash_up_to_16(tokens, i * stride, width, seed)
    else:
        for i in range(out.shape[0]):
            out[i] = _hash_up_to_8(tokens, i * stride, width, seed)


@kernel
def roll(local: U64Input, base: U64, parent: U64, has_parent: bool, out: U64Vector) -> None:
    """Roll local hashes into sequence hashes: out[i] = XXH3-64(out[i - 1] ‖ local[i]).

    local, out: uint64 of equal lengths, which may be the same array. base: the hash seed, equal for all namespaces.
    parent: the sequence hash of the page before the first one, used if has_parent is set. Otherwise, out[0] = local[0].
    """
    previous = parent
    for i in range(local.shape[0]):
        previous = hash_pair(previous, local[i], base) if has_parent or i > 0 else local[0]
        out[i] = previous


@kernel
def hash_prompt(
    tokens: U32Input,
    width: int,
    stride: int,
    seed: U64,
    state: U64Vector,
    base: U64,
    parent: U64,
    has_parent: bool,
    out: U64Vector,
) -> None:
    """Hash windows as `hash_windows` and roll the hashes as `roll`. Parameters as there."""
    hash_windows(tokens, width, stride, seed, state, out)
    roll(out, base, parent, has_parent, out)
