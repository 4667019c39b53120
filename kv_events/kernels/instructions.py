"""Machine instructions that numba does not provide, as functions for kernels."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

NUM_LANES = 8
"""Number of u64 that `lanes_equal` compares at once: one cache line."""

_BYTE, _WORD32, _WORD64, _WORD128 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.IntType(128)
_LANES, _SIXTEEN, _SIXTY_FOUR = ir.VectorType(_WORD64, NUM_LANES), ir.VectorType(_BYTE, 16), ir.VectorType(_BYTE, 64)
_YES = ir.Constant(ir.IntType(1), 1)
_cgutils: Any = cgutils
intrinsic: Any = extending.intrinsic


class _Code(NamedTuple):
    """The place where numba wants the code of an instruction."""

    context: Any
    builder: Any
    signature: Any
    args: Any

    def element(self, kind: ir.Type, first: int = 0) -> Any:
        """Return a pointer to a `kind` at element args[first + 1] of the array args[first]."""
        view = self.context.make_array(self.signature.args[first])(self.context, self.builder, self.args[first])
        return self.builder.bitcast(self.builder.gep(view.data, [self.args[first + 1]]), kind.as_pointer())

    def splat(self, value: Any, lanes: ir.VectorType) -> Any:
        """Return a vector with all lanes set to one value."""
        nothing, order = ir.Constant(lanes, ir.Undefined), ir.VectorType(_WORD32, lanes.count)
        first = self.builder.insert_element(nothing, value, _WORD32(0))
        return self.builder.shuffle_vector(first, nothing, ir.Constant(order, [0] * lanes.count))


def _instruction(returned: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare a function for kernels by the one that builds its code.

    parameters: their types. `types.Array`: arrays of any type. Arrays are not converted.
    """

    def declare(build: Callable[..., Any]) -> Any:
        def typing(context: Any, *given: Any) -> Any:
            kinds = []
            for wanted, each in zip(parameters, given, strict=True):
                is_array = isinstance(each, types.Array)
                if not (is_array if wanted is types.Array else context.can_convert(each, wanted) is not None):
                    return None
                kinds.append(each if is_array else wanted)
            return returned(*kinds), lambda *code: build(_Code(*code), *code[-1])

        return intrinsic(wraps(build)(typing))

    return declare


@_instruction(types.int64, types.uint64)
def lowest_bit(code: _Code, word: Any) -> Any:
    """Return the number of the lowest set bit of a non-zero u64, as an int64."""
    return code.builder.cttz(word, _YES)


@_instruction(types.int64, types.uint64)
def leading_zeros(code: _Code, word: Any) -> Any:
    """Return the number of zero bits above the highest set bit of a non-zero u64, as an int64."""
    return code.builder.ctlz(word, _YES)


@_instruction(types.uint64, types.uint64, types.uint64, types.uint64)
def upper_product(code: _Code, word: Any, low: Any, high: Any) -> Any:
    """Return the upper half of `word * (high << 64 | low)` modulo 2**128. All are u64."""
    builder = code.builder
    word, low, high = (builder.zext(each, _WORD128) for each in (word, low, high))
    product = builder.mul(word, builder.or_(low, builder.shl(high, _WORD128(64))))
    return builder.trunc(builder.lshr(product, _WORD128(64)), _WORD64)


@_instruction(types.uint64, types.uint64, types.uint64)
def folded_product(code: _Code, a: Any, b: Any) -> Any:
    """Return the lower half XOR the upper half of the product of two u64."""
    builder = code.builder
    product = builder.mul(builder.zext(a, _WORD128), builder.zext(b, _WORD128))
    return builder.trunc(builder.xor(product, builder.lshr(product, _WORD128(64))), _WORD64)


@_instruction(types.Array(types.uint8, 1, "C", readonly=True), types.Bytes(types.uint8, 1, "C", readonly=True))
def vector_of(_code: _Code, data: Any) -> Any:
    """Return `bytes` as a read-only u8 array, so that helpers know one type of text. numba has one layout for both."""
    return data


@_instruction(types.uint64, types.Array, types.int64)
def eight_bytes(code: _Code, data: Any, at: Any) -> Any:
    """Load eight bytes of a u8 array, from index `at` on, as a big-endian u64. The caller checks the bounds."""
    word = code.builder.load(code.element(_WORD64), align=1)
    return code.builder.bswap(word) if sys.byteorder == "little" else word


@_instruction(types.uint64, types.Array, types.int64, types.uint8, types.uint8)
def bytes_between(code: _Code, data: Any, at: Any, first: Any, last: Any) -> Any:
    """Find the bytes from `first` to `last` among 64 bytes of a u8 array, from index `at` on.

    Bit i of the result, a u64, is set if element at + i is one. The caller checks the bounds. For little-endian
    machines.
    """
    builder = code.builder
    above = builder.sub(builder.load(code.element(_SIXTY_FOUR), align=1), code.splat(first, _SIXTY_FOUR))
    most = code.splat(builder.sub(last, first), _SIXTY_FOUR)
    return builder.bitcast(builder.icmp_unsigned("<=", above, most), _WORD64)


@_instruction(types.none, types.Array, types.int64, types.Array, types.int64)
def copy_sixteen(code: _Code, target: Any, at: Any, source: Any, start: Any) -> Any:
    """Copy 16 bytes between u8 arrays, from index `start` to index `at`. The caller checks the bounds."""
    found = code.builder.load(code.element(_SIXTEEN, 2), align=1)
    code.builder.store(found, code.element(_SIXTEEN), align=1)
    return code.context.get_dummy_value()


@_instruction(types.none, types.Array, types.int64, types.uint64)
def put_eight(code: _Code, target: Any, at: Any, word: Any) -> Any:
    """Store a u64 as eight bytes of a u8 array, from index `at` on, lowest byte first. The caller checks the bounds."""
    word = word if sys.byteorder == "little" else code.builder.bswap(word)
    code.builder.store(word, code.element(_WORD64), align=1)
    return code.context.get_dummy_value()


@_instruction(types.uint64, types.uint64)
def swapped(code: _Code, word: Any) -> Any:
    """Return a u64 with its bytes in reverse order."""
    return code.builder.bswap(word)


@_instruction(types.uint64, types.float64)
def float_bits(code: _Code, value: Any) -> Any:
    """Return the bits of a float64 as a u64."""
    return code.builder.bitcast(value, _WORD64)


@_instruction(types.none, types.Array, types.int64)
def prefetch(code: _Code, array: Any, index: Any) -> Any:
    """Prefetch the cache line of an array's element. The call does not wait, and an index out of bounds is harmless."""
    address = code.element(_BYTE)
    kind = ir.FunctionType(ir.VoidType(), [address.type, _WORD32, _WORD32, _WORD32])
    function = _cgutils.get_or_insert_function(code.builder.module, kind, "llvm.prefetch.p0")
    code.builder.call(function, [address, _WORD32(0), _WORD32(3), _WORD32(1)])  # for reading, to keep, data
    return code.context.get_dummy_value()


@_instruction(types.uint64, types.Array, types.int64)
def address_of(code: _Code, array: Any, index: Any) -> Any:
    """Return the address of an array's element as a u64. The caller checks the bounds."""
    return code.builder.ptrtoint(code.element(_BYTE), _WORD64)


@_instruction(types.uint64, types.uint64, types.uint64, types.uint64, types.uint64)
def call_native(code: _Code, function: Any, first: Any, second: Any, third: Any) -> Any:
    """Call a C function by its address, with three u64 as integers or pointers. Returns its result as a u64.

    A function with fewer parameters ignores the others. The upper half of a 32-bit result is not defined.
    """
    kind = ir.FunctionType(_WORD64, [_WORD64] * 3)
    return code.builder.call(code.builder.inttoptr(function, kind.as_pointer()), [first, second, third])


@_instruction(types.uint64, types.Array(types.uint64, 1, "C", readonly=True), types.int64, types.uint64, types.uint64)
def lanes_equal(code: _Code, array: Any, index: Any, mask: Any, wanted: Any) -> Any:
    """Compare NUM_LANES elements of a u64 array, from `index` on.

    Bit i of the result, a u64, is set if element index + i AND `mask` equals `wanted`. The caller checks the bounds.
    For little-endian machines.
    """
    builder = code.builder
    lanes = builder.and_(builder.load(code.element(_LANES), align=8), code.splat(mask, _LANES))
    equal = builder.icmp_unsigned("==", lanes, code.splat(wanted, _LANES))
    return builder.zext(builder.bitcast(equal, ir.IntType(NUM_LANES)), _WORD64)
