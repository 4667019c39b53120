"""Aliases shared by trees, allocators and pools."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IndexArray: TypeAlias = npt.NDArray[np.int64]
"""[n] pool rows, one per logical unit."""


def no_indices() -> IndexArray:
    """Return a new empty index array."""
    return np.empty(0, dtype=np.int64)
