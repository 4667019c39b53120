"""Bundles: named tuples of arrays as arguments of kernels.

numba accepts named tuples from Python, but unpacks each of their arrays at every call. This costs 180 ns per array; a
bare array costs 30 ns. A bundle that outlives a call is therefore made `resident` once: the addresses and shapes of its
arrays are written to one array of words, and this array is the only argument. A bundle that is created for each call is
`spread` over bare arrays.

The annotations of a bundle's fields declare their types for mypy and for numba: `U64Vector`, `U32Matrix` and so on.
"""

from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypeAlias, get_type_hints
from zlib import crc32

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import typeof, types
from numba.extending import intrinsic

# one-dimensional, in C order
U8Vector: TypeAlias = Annotated[npt.NDArray[np.uint8], types.uint8[::1]]
U16Vector: TypeAlias = Annotated[npt.NDArray[np.uint16], types.uint16[::1]]
U32Vector: TypeAlias = Annotated[npt.NDArray[np.uint32], types.uint32[::1]]
U64Vector: TypeAlias = Annotated[npt.NDArray[np.uint64], types.uint64[::1]]
I32Vector: TypeAlias = Annotated[npt.NDArray[np.int32], types.int32[::1]]
I64Vector: TypeAlias = Annotated[npt.NDArray[np.int64], types.int64[::1]]
F64Vector: TypeAlias = Annotated[npt.NDArray[np.float64], types.float64[::1]]
BoolVector: TypeAlias = Annotated[npt.NDArray[np.bool_], types.boolean[::1]]

# the same, for reading only; read-only arrays are accepted as well
U8Input: TypeAlias = Annotated[npt.NDArray[np.uint8], types.Array(types.uint8, 1, "C", readonly=True)]
U32Input: TypeAlias = Annotated[npt.NDArray[np.uint32], types.Array(types.uint32, 1, "C", readonly=True)]
U64Input: TypeAlias = Annotated[npt.NDArray[np.uint64], types.Array(types.uint64, 1, "C", readonly=True)]
I64Input: TypeAlias = Annotated[npt.NDArray[np.int64], types.Array(types.int64, 1, "C", readonly=True)]

BYTES = types.Bytes(types.uint8, 1, "C", readonly=True)
"""Parameter of kernels that accept `bytes`: 0.3 us less than a `U8Input` made by `np.frombuffer`."""

# two-dimensional, in C order
U32Matrix: TypeAlias = Annotated[npt.NDArray[np.uint32], types.uint32[:, ::1]]
U64Matrix: TypeAlias = Annotated[npt.NDArray[np.uint64], types.uint64[:, ::1]]
I64Matrix: TypeAlias = Annotated[npt.NDArray[np.int64], types.int64[:, ::1]]
U64MatrixInput: TypeAlias = Annotated[npt.NDArray[np.uint64], types.Array(types.uint64, 2, "C", readonly=True)]

Resident: TypeAlias = npt.NDArray[np.uint64]
"""A resident bundle: the number of its class, followed by the bundle in numba's layout. It keeps the arrays alive."""

RESIDENT_TYPE = types.uint64[::1]

_WORD = ir.IntType(64)
_typeof: Any = typeof
_types: Any = types


class Spread(NamedTuple):
    """A parameter of a kernel that is a bundle whose arrays are passed one by one."""

    bundle: type


def spread(bundle: type) -> Spread:
    """Declare a parameter for bundles that are created for each call. They contain arrays only, no other bundles."""
    return Spread(bundle)


@lru_cache
def numba_type(annotation: Any) -> Any:
    """Return the numba type of a field or a parameter.

    annotation: the class of a bundle, an annotated array, or a numba type. Raises TypeError for anything else.
    """
    if isinstance(annotation, type) and issubclass(annotation, tuple):
        hints = get_type_hints(annotation, include_extras=True)
        members = tuple(numba_type(hints[name]) for name in field_names(annotation))
        return _types.BaseTuple.from_types(members, annotation)
    if hasattr(annotation, "__metadata__"):
        return annotation.__metadata__[0]
    if not isinstance(annotation, types.Type):
        raise TypeError(f"{annotation!r} is neither a named tuple, nor an annotated array, nor a type of numba's")
    return annotation


def field_names(bundle: Any) -> tuple[str, ...]:
    """Return the field names of a named tuple's class."""
    names: tuple[str, ...] = bundle._fields
    return names


def resident(bundle: NamedTuple) -> Resident:
    """Make a bundle resident, for kernels that accept its class. Takes microseconds.

    Kernels see what is written into the arrays later, but not arrays that replace them in the bundle. Raises TypeError
    if an array does not have the type that its field declares.
    """
    declared = numba_type(type(bundle))
    if _typeof(bundle) != declared:
        raise TypeError(f"{_typeof(bundle)} is not {declared}")
    values = _native_words(bundle)
    words = _KeepingWords(8 * (1 + len(values)))
    words.bundle = bundle
    block = np.frombuffer(words, np.uint64)
    block[:] = [class_number(type(bundle)), *values]
    return block


def _native_words(value: Any) -> list[int]:
    """Return an array, or a named tuple of arrays, as numba's words: two owners, which are not needed, and the rest."""
    if isinstance(value, tuple):
        return [word for member in value for word in _native_words(member)]
    return [0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides]


class _KeepingWords(bytearray):
    """The memory of a resident bundle. Arrays on it keep it alive, and it keeps the bundle's arrays alive."""

    bundle: tuple[Any, ...]


@lru_cache
def class_number(bundle: type) -> int:
    """Return a number that identifies a class of bundles by its name and types. It is equal in every process."""
    return crc32(str(numba_type(bundle)).encode())


@lru_cache
def reader(bundle: type) -> Any:
    """Return an intrinsic that converts a resident bundle to a named tuple.

    In the kernel, it raises TypeError for a bundle of another class.
    """
    bundle_type, number = numba_type(bundle), class_number(bundle)
    message = f"not a resident {bundle.__name__}"

    def refuse_unless(context: Any, builder: Any, condition: Any) -> None:
        with builder.if_then(builder.not_(condition), likely=False):
            context.call_conv.return_user_exc(builder, TypeError, (message,))

    @intrinsic
    def read(_typing: Any, block: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            view = context.make_array(signature.args[0])(context, builder, args[0])
            native = context.get_value_type(bundle_type)
            wanted = view.nitems.type(1 + context.get_abi_sizeof(native) // 8)
            refuse_unless(context, builder, builder.icmp_unsigned("==", view.nitems, wanted))
            refuse_unless(context, builder, builder.icmp_unsigned("==", builder.load(view.data), _WORD(number)))
            place = builder.bitcast(builder.gep(view.data, [_WORD(1)]), native.as_pointer())
            return builder.load(place, align=8)

        return bundle_type(block), codegen

    return read
