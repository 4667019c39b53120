"""XXH3-64 with a seed over arrays of u32 tokens, as numba kernels.

Implements the XXH3 specification of the xxHash project (release 0.8). Input lengths are positive multiples of four
bytes, so the classes of 0 to 3 bytes are not implemented. Strings are hashed by the `xxhash` package.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from numba import types

from kv_events.kernels.declare import array_function, array_helper, array_kernel
from kv_events.kernels.instructions import folded_product

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

_P32_1 = np.uint64(0x9E3779B1)
_P32_2 = np.uint64(0x85EBCA77)
_P32_3 = np.uint64(0xC2B2AE3D)
_P64_1 = np.uint64(0x9E3779B185EBCA87)
_P64_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P64_3 = np.uint64(0x165667B19E3779F9)
_P64_4 = np.uint64(0x85EBCA77C2B2AE63)
_P64_5 = np.uint64(0x27D4EB2F165667C5)
_AVALANCHE = np.uint64(0x165667919E3779F9)
_RRMXMX = np.uint64(0x9FB21C651E98DF25)
_LOW32 = np.uint64(0xFFFFFFFF)

U32_IN = types.Array(types.uint32, 1, "C", readonly=True)
U64_IN = types.Array(types.uint64, 1, "C", readonly=True)
U64_OUT = types.Array(types.uint64, 1, "C")


@array_helper
def _rotate_left(x, bits):
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


@array_helper
def _swap64(x):
    x = ((x & np.uint64(0x00FF00FF00FF00FF)) << np.uint64(8)) | ((x >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF))
    x = ((x & np.uint64(0x0000FFFF0000FFFF)) << np.uint64(16)) | ((x >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF))
    return _rotate_left(x, 32)


@array_helper
def _avalanche(h):
    h ^= h >> np.uint64(37)
    h *= _AVALANCHE
    return h ^ (h >> np.uint64(32))


@array_helper
def _word(tokens, i):
    """Return the u64 that starts at token i."""
    return np.uint64(tokens[i]) | (np.uint64(tokens[i + 1]) << np.uint64(32))


@array_helper
def _mix16(tokens, i, offset, seed):
    """Mix the four tokens from i on with the secret at a byte offset."""
    return folded_product(
        _word(tokens, i) ^ (_SECRET_AT[offset] + seed), _word(tokens, i + 2) ^ (_SECRET_AT[offset + 8] - seed)
    )


@array_helper
def hash_pair(low, high, seed):
    """Return XXH3-64 of the 16 bytes low ‖ high (both u64, little-endian)."""
    lo = low ^ ((_SECRET_AT[24] ^ _SECRET_AT[32]) + seed)
    hi = high ^ ((_SECRET_AT[40] ^ _SECRET_AT[48]) - seed)
    return _avalanche(np.uint64(16) + _swap64(lo) + hi + folded_product(lo, hi))


@array_helper
def _hash_up_to_8(tokens, start, n, seed):
    swapped = _swap64(seed & _LOW32) >> np.uint64(32)
    seed = seed ^ (swapped << np.uint64(32))
    flip = (_SECRET_AT[8] ^ _SECRET_AT[16]) - seed
    h = (np.uint64(tokens[start + n - 1]) + (np.uint64(tokens[start]) << np.uint64(32))) ^ flip
    h ^= _rotate_left(h, 49) ^ _rotate_left(h, 24)
    h *= _RRMXMX
    h ^= (h >> np.uint64(35)) + np.uint64(4 * n)
    h *= _RRMXMX
    return h ^ (h >> np.uint64(28))


@array_helper
def _hash_up_to_16(tokens, start, n, seed):
    lo = _word(tokens, start) ^ ((_SECRET_AT[24] ^ _SECRET_AT[32]) + seed)
    hi = _word(tokens, start + n - 2) ^ ((_SECRET_AT[40] ^ _SECRET_AT[48]) - seed)
    return _avalanche(np.uint64(4 * n) + _swap64(lo) + hi + folded_product(lo, hi))


@array_helper
def _hash_up_to_128(tokens, start, n, seed):
    end = start + n
    acc = np.uint64(4 * n) * _P64_1
    if n > 24:
        acc += _mix16(tokens, start + 12, 96, seed) + _mix16(tokens, end - 16, 112, seed)
    if n > 16:
        acc += _mix16(tokens, start + 8, 64, seed) + _mix16(tokens, end - 12, 80, seed)
    if n > 8:
        acc += _mix16(tokens, start + 4, 32, seed) + _mix16(tokens, end - 8, 48, seed)
    acc += _mix16(tokens, start, 0, seed) + _mix16(tokens, end - 4, 16, seed)
    return _avalanche(acc)


@array_helper
def _hash_up_to_240(tokens, start, n, seed):
    acc = np.uint64(4 * n) * _P64_1
    for i in range(8):
        acc += _mix16(tokens, start + 4 * i, 16 * i, seed)
    acc = _avalanche(acc)
    for i in range(8, n // 4):
        acc += _mix16(tokens, start + 4 * i, 16 * (i - 8) + 3, seed)
    return _avalanche(acc + _mix16(tokens, start + n - 4, 119, seed))


@array_helper
def _accumulate(acc, tokens, start, secret, offset):
    for i in range(8):
        value = _word(tokens, start + 2 * i)
        keyed = value ^ secret[offset + 8 * i]
        acc[i ^ 1] += value
        acc[i] += (keyed & _LOW32) * (keyed >> np.uint64(32))


@array_function
def _hash_long(tokens, start, n, secret, acc):
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
                acc[i] = (acc[i] ^ (acc[i] >> np.uint64(47)) ^ secret[128 + 8 * i]) * _P32_1
    _accumulate(acc, tokens, start + n - 16, secret, 121)
    result = np.uint64(4 * n) * _P64_1
    for i in range(4):
        result += folded_product(acc[2 * i] ^ secret[11 + 16 * i], acc[2 * i + 1] ^ secret[19 + 16 * i])
    return _avalanche(result)


@lru_cache(maxsize=256)
def _seeded_secret(seed: int) -> npt.NDArray[np.uint64]:
    """Return uint64[185], the words of the secret derived from a seed, one at every byte offset."""
    words, signs = _SECRET_AT[::8].copy(), np.array([1, -1] * 12, np.int64).view(np.uint64)
    data = (words + signs * np.uint64(seed)).astype("<u8").view(np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(data, 8)
    return np.ascontiguousarray(windows).view("<u8").reshape(-1).astype(np.uint64)


def long_hash_state(width: int, seed: int | np.uint64) -> npt.NDArray[np.uint64]:
    """Return uint64[LONG_STATE_WORDS], which `hash_windows` needs for windows of more than 60 tokens; [0] for others.

    Threads must not share it.
    """
    if width <= _MAX_SHORT:
        return _NO_STATE
    return np.concatenate((_seeded_secret(int(seed)), np.zeros(_NUM_LANES, np.uint64)))


@array_function
def hash_each_window(tokens, width, stride, seed, state, out):
    """See `hash_windows`."""
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


@array_kernel(types.void, U32_IN, types.int64, types.int64, types.uint64, U64_OUT, U64_OUT)
def hash_windows(tokens, width, stride, seed, state, out):
    """Compute XXH3-64 of windows of a token array.

    tokens: uint32, C order, with at least (len(out) - 1) * stride + width elements. width: tokens per window, >= 1.
    stride: tokens between the starts of adjacent windows. state: `long_hash_state` of this width and seed. out: uint64;
    out[i] receives the hash of tokens[i * stride :][:width] as little-endian bytes.
    """
    hash_each_window(tokens, width, stride, seed, state, out)


@array_helper
def roll_each(local, base, parent, has_parent, out):
    """See `roll`."""
    previous = parent
    for i in range(local.shape[0]):
        previous = hash_pair(previous, local[i], base) if has_parent or i > 0 else local[0]
        out[i] = previous


@array_kernel(types.void, U64_IN, types.uint64, types.uint64, types.boolean, U64_OUT)
def roll(local, base, parent, has_parent, out):
    """Roll local hashes into sequence hashes: out[i] = XXH3-64(out[i - 1] ‖ local[i]).

    local, out: uint64 of equal lengths, which may be the same array. base: the hash seed, equal for all namespaces.
    parent: the sequence hash of the page before the first one, used if has_parent is set. Otherwise, out[0] = local[0].
    """
    roll_each(local, base, parent, has_parent, out)


@array_kernel(
    types.void, U32_IN, types.int64, types.int64, types.uint64, U64_OUT, types.uint64, types.uint64, types.boolean,
    U64_OUT,
)  # fmt: skip
def hash_prompt(tokens, width, stride, seed, state, base, parent, has_parent, out):
    """Hash windows as `hash_windows` and roll the hashes as `roll`. Parameters as there."""
    hash_each_window(tokens, width, stride, seed, state, out)
    roll_each(out, base, parent, has_parent, out)
