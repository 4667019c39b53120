"""The types of kernels besides `numbers`: arrays, and bundles, which are named tuples of arrays.

Annotations declare types for mypy and for numba alike. Arrays are `U64Vector`, `U32Matrix` and so on.

numba accepts named tuples from Python, but unpacks each of their arrays at every call. This costs 180 ns per array; a
bare array costs 30 ns. A bundle that outlives a call is therefore pinned once (`pin`): the addresses and shapes of its
arrays are written to one array of words, and this array is the only argument. A bundle that is created for each call is
`Spread` over bare arrays.
"""

from functools import lru_cache
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, cast, get_args, get_origin, get_type_hints
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

BytesInput: TypeAlias = Annotated[Any, types.Bytes(types.uint8, 1, "C", readonly=True)]
"""Parameter of kernels that accept `bytes` from Python: 0.3 us less than a `U8Input` made by `np.frombuffer`. In
kernels it is a `U8Input`."""

# two-dimensional, in C order
F64Matrix: TypeAlias = Annotated[npt.NDArray[np.float64], types.float64[:, ::1]]
U32Matrix: TypeAlias = Annotated[npt.NDArray[np.uint32], types.uint32[:, ::1]]
U64Matrix: TypeAlias = Annotated[npt.NDArray[np.uint64], types.uint64[:, ::1]]
I64Matrix: TypeAlias = Annotated[npt.NDArray[np.int64], types.int64[:, ::1]]
U64MatrixInput: TypeAlias = Annotated[npt.NDArray[np.uint64], types.Array(types.uint64, 2, "C", readonly=True)]

T = TypeVar("T")
Bundle = TypeVar("Bundle", bound=NamedTuple)
_SPREAD = "spread"
Spread: TypeAlias = Annotated[T, _SPREAD]
"""A parameter of a kernel that is a bundle whose arrays are passed one by one. It contains arrays only."""

PINNED_TYPE = types.uint64[::1]

_WORD = ir.IntType(64)
_SCALARS: dict[Any, Any] = {int: types.int64, float: types.float64, bool: types.boolean, NoneType: types.void}
_typeof: Any = typeof
_types: Any = types


def is_bundle(annotation: Any) -> bool:
    """Return whether an annotation is the class of a bundle."""
    return isinstance(annotation, type) and issubclass(annotation, tuple) and hasattr(annotation, "_fields")


def is_spread(annotation: Any) -> bool:
    """Return whether an annotation is a `Spread` bundle."""
    return getattr(annotation, "__metadata__", None) == (_SPREAD,)


@lru_cache
def numba_type(annotation: Any) -> Any:
    """Return the numba type of an annotation. Raises TypeError for what kernels do not know."""
    if is_spread(annotation):
        return numba_type(annotation.__origin__)
    if is_bundle(annotation):
        hints = get_type_hints(annotation, include_extras=True)
        members = tuple(numba_type(hints[name]) for name in annotation._fields)
        return _types.BaseTuple.from_types(members, annotation)
    if get_origin(annotation) is tuple:
        return _types.BaseTuple.from_types(tuple(map(numba_type, get_args(annotation))))
    (found,) = getattr(annotation, "__metadata__", (_SCALARS.get(annotation),))
    if not isinstance(found, types.Type):
        raise TypeError(f"{annotation!r} is neither a number, nor a named tuple, nor an annotated array")
    return found


def pin(bundle: Bundle) -> Bundle:
    """Return what kernels accept in place of a bundle. Takes microseconds.

    For type checkers it is the bundle. In fact it is uint64[words]: the number of the bundle's class, followed by the
    bundle in numba's layout. It keeps the arrays alive. Kernels see what is written into the arrays later, but not
    arrays that replace them in the bundle. Raises TypeError if an array does not have the type that its field declares.
    """
    declared = numba_type(type(bundle))
    if _typeof(bundle) != declared:
        raise TypeError(f"{_typeof(bundle)} is not {declared}")
    values = _native_words(bundle)
    words = _KeepingWords(8 * (1 + len(values)))
    words.bundle = bundle
    block = np.frombuffer(words, np.uint64)
    block[:] = [_class_number(type(bundle)), *values]
    return cast(Bundle, block)


def _native_words(value: Any) -> list[int]:
    """Return an array, or a named tuple of arrays, as numba's words: two owners, which are not needed, and the rest."""
    if isinstance(value, tuple):
        return [word for member in value for word in _native_words(member)]
    return [0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides]


class _KeepingWords(bytearray):
    """The memory of a pinned bundle. Arrays on it keep it alive, and it keeps the bundle's arrays alive."""

    bundle: tuple[Any, ...]


@lru_cache
def _class_number(bundle: type) -> int:
    """Return a number that identifies a class of bundles by its name and types. It is equal in every process."""
    return crc32(str(numba_type(bundle)).encode())


@lru_cache
def reader(bundle: type) -> Any:
    """Return an intrinsic that converts a pinned bundle to a named tuple.

    In the kernel, it raises TypeError for a bundle of another class.
    """
    bundle_type, number = numba_type(bundle), _class_number(bundle)
    message = f"not a pinned {bundle.__name__}"

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
