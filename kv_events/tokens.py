"""Conversion of tokens and hashes to arrays. Needs only numpy, so that a client loads no kernels."""

import operator
from array import array
from collections.abc import Mapping, Sequence, Set
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kv_events.errors import InvalidValueError
from kv_events.limits import MAX_TOKEN_ID

U32Array: TypeAlias = npt.NDArray[np.uint32]
U64Array: TypeAlias = npt.NDArray[np.uint64]

_U32, _U64 = np.dtype(np.uint32), np.dtype(np.uint64)
_FLAT_LIST = "a flat list of integers"
_HASH = "an integer in 0 .. 18446744073709551615"


def token_array(token_ids: Sequence[int] | npt.NDArray[np.integer], field: str = "token_ids") -> U32Array:
    """Return tokens as uint32[n], C order. Raises InvalidValueError naming the first position out of 0 .. 2**32 - 1."""
    if isinstance(token_ids, np.ndarray) and token_ids.dtype is _U32 and token_ids.ndim == 1:
        return np.ascontiguousarray(token_ids)
    try:
        wide = _integers(token_ids, "I", field)
    except (OverflowError, TypeError):
        raise _first_bad_token(token_ids, field) from None
    if wide.dtype is not _U32 and wide.size and (wide.min() < 0 or wide.max() > MAX_TOKEN_ID):
        raise _first_bad_token(wide.tolist(), field)
    return np.ascontiguousarray(wide, _U32)


def hash_array(hashes: Sequence[int] | npt.NDArray[np.integer], field: str) -> U64Array:
    """Return hashes as uint64[n], C order. Raises InvalidValueError naming the first position out of 0 .. 2**64 - 1."""
    if isinstance(hashes, np.ndarray) and hashes.dtype is _U64 and hashes.ndim == 1:
        return np.ascontiguousarray(hashes)
    try:
        wide = _integers(hashes, "Q", field)
    except (OverflowError, TypeError):
        wide = np.array([hash_word(each, f"{field}[{at}]") for at, each in enumerate(_items(hashes, field))], np.uint64)
    if wide.dtype.kind == "i" and wide.size and wide.min() < 0:
        at = int(np.argmax(wide < 0))
        raise InvalidValueError(f"{field}[{at}]", int(wide[at]), _HASH)
    return np.ascontiguousarray(wide, dtype=np.uint64)


def hash_word(value: int, field: str) -> np.uint64:
    """Return one hash or seed as uint64. Raises InvalidValueError."""
    try:
        return np.uint64(operator.index(value))
    except (OverflowError, TypeError):
        raise InvalidValueError(field, value, _HASH) from None


def _integers(values: Sequence[int] | npt.NDArray[np.integer], typecode: str, field: str) -> npt.NDArray[np.integer]:
    """Return a flat array of integers. Raises InvalidValueError, or OverflowError or TypeError for an element."""
    wide = np.asarray(values if isinstance(values, np.ndarray) else array(typecode, _items(values, field)))
    if wide.ndim != 1 or wide.dtype.kind not in "iu":
        raise InvalidValueError(field, f"{wide.dtype}{list(wide.shape)}", f"{_FLAT_LIST}, of one dimension")
    return wide


def _items(values: Sequence[int] | npt.NDArray[np.integer], field: str) -> Sequence[int] | npt.NDArray[np.integer]:
    if isinstance(values, list):
        return values
    if not hasattr(values, "__len__") or isinstance(values, str | bytes | bytearray | memoryview | Mapping | Set):
        raise InvalidValueError(field, values, _FLAT_LIST)
    return values


def _first_bad_token(token_ids: Sequence[int] | npt.NDArray[np.integer], field: str) -> InvalidValueError:
    for position, token in enumerate(token_ids):
        if not isinstance(token, int | np.integer) or not 0 <= token <= MAX_TOKEN_ID:
            return InvalidValueError(f"{field}[{position}]", token, "an integer in 0 .. 4294967295")
    return InvalidValueError(field, token_ids, _FLAT_LIST)
