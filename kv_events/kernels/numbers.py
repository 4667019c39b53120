"""The numbers of kernels. `int`, `float` and `bool` have 64, 64 and 8 bits there."""

from typing import Annotated, Any, TypeAlias

import numpy as np
from numba import types

# conversions, for mypy of Any to Any: in kernels, numbers of all types mix by numba's rules
uint8: Any = types.uint8
uint16: Any = types.uint16
uint32: Any = types.uint32
uint64: Any = types.uint64
int32: Any = types.int32
int64: Any = types.int64
float64: Any = types.float64

# as annotations
U64: TypeAlias = Annotated[int | np.uint64, types.uint64]
U32: TypeAlias = Annotated[int, types.uint32]
U16: TypeAlias = Annotated[int, types.uint16]
U8: TypeAlias = Annotated[int, types.uint8]
I32: TypeAlias = Annotated[int, types.int32]
