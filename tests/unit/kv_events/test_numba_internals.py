"""The undocumented parts of numba that kernels use still exist. A failure shows what a new version changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba import njit, typeof, types
from numba.core.errors import NumbaError
from numba.extending import intrinsic as numba_intrinsic

from kv_events import numba_internals
from kv_events.numba_internals import NO_MEMORY_RUNTIME, cache_dir, cached_in

intrinsic: Any = numba_intrinsic


class Pair(NamedTuple):
    vector: Any
    matrix: Any


PAIR = Pair(np.arange(3), np.zeros((2, 5)))


def evaluated(build: Any, *arguments: Any, returns: Any = types.int64) -> Any:
    """Run the code that `build(context, builder, types, values)` generates. Returns its result."""

    @intrinsic
    def generated(_typing: Any, values: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            parts = [builder.extract_value(args[0], i) for i in range(len(signature.args[0]))]
            return build(context, builder, list(signature.args[0]), parts)

        return returns(values), codegen

    @njit(**NO_MEMORY_RUNTIME)
    def run(values: Any) -> Any:
        return generated(values)

    return run(arguments)


def test_the_option_that_leaves_the_memory_runtime_out() -> None:
    def allocates() -> Any:
        return np.zeros(3)[0]

    assert njit(allocates)() == 0
    try:
        njit(**NO_MEMORY_RUNTIME)(allocates)()
    except (NumbaError, NotImplementedError):
        return
    pytest.fail("njit ignores the option `_nrt`: kernels count references again")


def test_the_configuration_that_names_the_cache_folder(tmp_path: Path) -> None:
    usual = cache_dir()
    with cached_in(tmp_path):
        assert cache_dir() == str(tmp_path), "numba.core.config.CACHE_DIR does not name the cache folder any more"

        @njit(types.int64(), cache=True)
        def answer() -> int:
            return 42

    assert cache_dir() == usual
    assert [*tmp_path.rglob("*.nbi")], "numba.core.config.CACHE_DIR is not looked at when a function is declared"


def test_addresses_and_lengths_of_arrays() -> None:
    def load(context: Any, builder: Any, kinds: Any, values: Any) -> Any:
        return builder.load(numba_internals.element_address(context, builder, kinds[0], values[0], values[1]))

    def length(context: Any, builder: Any, kinds: Any, values: Any) -> Any:
        return numba_internals.array_length(context, builder, kinds[0], values[0])

    array = np.array([5, 6, 7])
    assert evaluated(load, array, 2) == 7, "context.make_array(type)(...).data is not the address of the first element"
    assert evaluated(length, array) == 3, "context.make_array(type)(...).nitems is not the number of elements"


def test_the_layout_of_named_tuples_in_memory() -> None:
    sizes = []

    def size(context: Any, _builder: Any, kinds: Any, _values: Any) -> Any:
        sizes.append(numba_internals.native_size(context, kinds[0]))
        return context.get_constant(types.int64, 0)

    evaluated(size, PAIR)
    expected = 8 * numba_internals.num_words(typeof(PAIR))
    assert sizes == [expected], "numba describes an array by other words than num_words() counts"


def test_types_of_named_tuples() -> None:
    pair: Any = typeof(PAIR)
    members = numba_internals.member_types(pair)
    assert members == (types.int64[::1], types.float64[:, ::1]), "a tuple's type does not list its members' types"
    assert numba_internals.tuple_type(Pair, members) == pair, (
        "types.BaseTuple.from_types makes another type than typeof"
    )


def test_exceptions_out_of_intrinsics() -> None:
    def refuse(context: Any, builder: Any, _kinds: Any, values: Any) -> Any:
        is_small = builder.icmp_signed("<", values[0], values[0].type(10))
        numba_internals.raise_unless(context, builder, is_small, TypeError, "too large")
        return values[0]

    assert evaluated(refuse, 9) == 9
    with pytest.raises(TypeError, match="too large"):
        evaluated(refuse, 10)


def test_functions_of_llvm() -> None:
    def flip(_context: Any, builder: Any, _kinds: Any, values: Any) -> Any:
        word = values[0].type
        return builder.call(numba_internals.declared_function(builder, "llvm.bswap.i64", word, [word]), [values[0]])

    assert evaluated(flip, 1) == 1 << 56, "cgutils.get_or_insert_function does not declare functions any more"
