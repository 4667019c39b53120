"""Machine instructions that numba does not provide, as functions for kernels."""

import sys
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

NUM_LANES = 8
"""Number of u64 that `lanes_equal` compares at once: one cache line."""

_BYTE, _WORD32, _WORD64, _WORD128 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.IntType(128)
_LANES = ir.VectorType(_WORD64, NUM_LANES)
_cgutils: Any = cgutils
intrinsic: Any = extending.intrinsic


@intrinsic
def lowest_bit(_typing: Any, word: Any) -> Any:
    """Return the number of the lowest set bit of a non-zero u64, as an int64."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


@intrinsic
def leading_zeros(_typing: Any, word: Any) -> Any:
    """Return the number of zero bits above the highest set bit of a non-zero u64, as an int64."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


@intrinsic
def upper_product(_typing: Any, word: Any, low: Any, high: Any) -> Any:
    """Return the upper half of `word * (high << 64 | low)` modulo 2**128. All are u64."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word, low, high = (builder.zext(each, _WORD128) for each in args)
        product = builder.mul(word, builder.or_(low, builder.shl(high, _WORD128(64))))
        return builder.trunc(builder.lshr(product, _WORD128(64)), _WORD64)

    return types.uint64(types.uint64, types.uint64, types.uint64), codegen


@intrinsic
def folded_product(_typing: Any, a: Any, b: Any) -> Any:
    """Return the lower half XOR the upper half of the product of two u64."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        product = builder.mul(*(builder.zext(each, _WORD128) for each in args))
        return builder.trunc(builder.xor(product, builder.lshr(product, _WORD128(64))), _WORD64)

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def vector_of(_typing: Any, data: Any) -> Any:
    """Return `bytes` as a read-only u8 array, so that helpers know one type of text."""

    def codegen(_context: Any, _builder: Any, _signature: Any, args: Any) -> Any:
        return args[0]  # numba has one layout for both

    return types.Array(types.uint8, 1, "C", readonly=True)(data), codegen


@intrinsic
def eight_bytes(_typing: Any, data: Any, at: Any) -> Any:
    """Load eight bytes of a u8 array, from index `at` on, as a big-endian u64. The caller checks the bounds."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.load(_place(context, builder, signature, args, _WORD64), align=1)
        return builder.bswap(word) if sys.byteorder == "little" else word

    return types.uint64(data, types.int64), codegen


@intrinsic
def bytes_between(_typing: Any, data: Any, at: Any, first: Any, last: Any) -> Any:
    """Find the bytes from `first` to `last` among 64 bytes of a u8 array, from index `at` on.

    Bit i of the result, a u64, is set if element at + i is one. The caller checks the bounds. For little-endian
    machines.
    """
    lanes = ir.VectorType(_BYTE, 64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.load(_place(context, builder, signature, args, lanes), align=1)
        above = builder.sub(found, _splat(builder, args[2], lanes))
        most = _splat(builder, builder.sub(args[3], args[2]), lanes)
        return builder.bitcast(builder.icmp_unsigned("<=", above, most), _WORD64)

    return types.uint64(data, types.int64, types.uint8, types.uint8), codegen


@intrinsic
def copy_sixteen(_typing: Any, target: Any, at: Any, source: Any, start: Any) -> Any:
    """Copy 16 bytes between u8 arrays, from index `start` to index `at`. The caller checks the bounds."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(_BYTE, 16)
        found = builder.load(_place(context, builder, signature, args, kind, 2), align=1)
        builder.store(found, _place(context, builder, signature, args, kind), align=1)
        return context.get_dummy_value()

    return types.none(target, types.int64, source, types.int64), codegen


@intrinsic
def put_eight(_typing: Any, target: Any, at: Any, word: Any) -> Any:
    """Store a u64 as eight bytes of a u8 array, from index `at` on, lowest byte first. The caller checks the bounds."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = args[2] if sys.byteorder == "little" else builder.bswap(args[2])
        builder.store(word, _place(context, builder, signature, args, _WORD64), align=1)
        return context.get_dummy_value()

    return types.none(target, types.int64, types.uint64), codegen


@intrinsic
def swapped(_typing: Any, word: Any) -> Any:
    """Return a u64 with its bytes in reverse order."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bswap(args[0])

    return types.uint64(types.uint64), codegen


@intrinsic
def float_bits(_typing: Any, value: Any) -> Any:
    """Return the bits of a float64 as a u64."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _WORD64)

    return types.uint64(types.float64), codegen


@intrinsic
def prefetch(_typing: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of an array's element. The call does not wait, and an index out of bounds is harmless."""
    if not isinstance(array, types.Array):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _place(context, builder, signature, args, _BYTE)
        kind = ir.FunctionType(ir.VoidType(), [address.type, _WORD32, _WORD32, _WORD32])
        function = _cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [address, _WORD32(0), _WORD32(3), _WORD32(1)])  # for reading, to keep, data
        return context.get_dummy_value()

    return types.none(array, types.int64), codegen


@intrinsic
def address_of(_typing: Any, array: Any, index: Any) -> Any:
    """Return the address of an array's element as a u64. The caller checks the bounds."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(_place(context, builder, signature, args, _BYTE), _WORD64)

    return types.uint64(array, types.int64), codegen


@intrinsic
def call_native(_typing: Any, function: Any, first: Any, second: Any, third: Any) -> Any:
    """Call a C function by its address, with three u64 as integers or pointers. Returns its result as a u64.

    A function with fewer parameters ignores the others. The upper half of a 32-bit result is not defined.
    """

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_WORD64, [_WORD64] * 3)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.uint64(types.uint64, types.uint64, types.uint64, types.uint64), codegen


@intrinsic
def lanes_equal(_typing: Any, array: Any, index: Any, mask: Any, wanted: Any) -> Any:
    """Compare NUM_LANES elements of a u64 array, from `index` on.

    Bit i of the result, a u64, is set if element index + i AND `mask` equals `wanted`. The caller checks the bounds.
    For little-endian machines.
    """
    if not isinstance(array, types.Array) or (array.dtype, array.ndim, array.layout) != (types.uint64, 1, "C"):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.load(_place(context, builder, signature, args, _LANES), align=8)
        lanes = builder.and_(found, _splat(builder, args[2], _LANES))
        equal = builder.icmp_unsigned("==", lanes, _splat(builder, args[3], _LANES))
        return builder.zext(builder.bitcast(equal, ir.IntType(NUM_LANES)), _WORD64)

    return types.uint64(array, types.int64, types.uint64, types.uint64), codegen


def _place(context: Any, builder: Any, signature: Any, args: Any, kind: ir.Type, first: int = 0) -> Any:
    """Return a pointer to a `kind` at element args[first + 1] of the array args[first]."""
    view = context.make_array(signature.args[first])(context, builder, args[first])
    return builder.bitcast(builder.gep(view.data, [args[first + 1]]), kind.as_pointer())


def _splat(builder: Any, value: Any, lanes: ir.VectorType) -> Any:
    """Return a vector with all lanes set to one value."""
    nothing = ir.Constant(lanes, ir.Undefined)
    first = builder.insert_element(nothing, value, _WORD32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_WORD32, lanes.count), [0] * lanes.count))
