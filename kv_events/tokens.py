"""Conversion of tokens to uint32. Needs only numpy, so that a client loads no kernels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kv_events.errors import InvalidValueError
from kv_events.limits import MAX_TOKEN_ID

U32Array: TypeAlias = npt.NDArray[np.uint32]


def token_array(token_ids: Sequence[int] | npt.NDArray[np.integer], field: str = "token_ids") -> U32Array:
    """Return tokens as uint32[n], C order. Raises InvalidValueError naming the first position out of 0 .. 2**32 - 1."""
    try:
        wide = np.asarray(token_ids if isinstance(token_ids, np.ndarray) else array("q", token_ids))
    except (OverflowError, TypeError):
        raise _first_bad_token(token_ids, field) from None
    if wide.dtype == np.uint32 and wide.ndim == 1:
        return np.ascontiguousarray(wide, dtype=np.uint32)
    if wide.ndim != 1 or wide.dtype.kind not in "iu":
        raise InvalidValueError(field, token_ids, "a flat list of integers")
    if wide.size and (wide.min() < 0 or wide.max() > MAX_TOKEN_ID):
        raise _first_bad_token(token_ids, field)
    return np.ascontiguousarray(wide, dtype=np.uint32)


def _first_bad_token(token_ids: Sequence[int] | npt.NDArray[np.integer], field: str) -> InvalidValueError:
    for position, token in enumerate(token_ids):
        if not isinstance(token, int | np.integer) or not 0 <= token <= MAX_TOKEN_ID:
            return InvalidValueError(f"{field}[{position}]", token, "an integer in 0 .. 4294967295")
    return InvalidValueError(field, token_ids, "a flat list of integers")
