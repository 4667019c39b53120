"""The undocumented parts of numba that kernels use still exist. A failure shows what a new version changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba import njit, typeof, types
from numba.core.errors import NumbaError
from numba.extending import intrinsic as numba_intrinsic

from kv_events.kernels import numba_internals
from kv_events.kernels.numba_internals import FOR_KERNELS_ONLY, NO_MEMORY_RUNTIME, KernelCode, cache_dir

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


def test_callers_get_the_code_of_a_function_as_it_was_lowered() -> None:
    double: Any = njit(forceinline=True, **FOR_KERNELS_ONLY)(lambda number: 2 * number)

    @njit(types.int64(types.int64))
    def entry(number: int) -> Any:
        return double(number) + 1

    assert entry(20) == 41
    (compiled,) = double.overloads.values()
    linked = str(compiled.library._get_module_for_linking())
    is_translated = compiled.library._codegen._engine.is_symbol_defined(compiled.fndesc.llvm_func_name)
    assert not is_translated, "numba translates functions of kernels by themselves: see _UntranslatedLibrary"
    assert "cpython" not in linked, "njit ignores no_cpython_wrapper: functions of kernels take longer to compile"
    assert "cfunc" not in linked, "njit ignores no_cfunc_wrapper: functions of kernels take longer to compile"


def test_kernels_are_kept_in_a_given_folder_and_found_there(tmp_path: Path) -> None:
    signature: Any = types.int64()

    def answer() -> int:
        return 42

    for was_kept in (False, True):
        kernel: Any = njit(answer)
        code = KernelCode(kernel, tmp_path, is_writable=True)
        assert code.is_kept(signature) is was_kept, "numba.core.caching keeps or finds nothing in the folder"
        code.compile(signature)
        assert kernel() == 42
        assert sum(kernel.stats.cache_hits.values()) == was_kept
    assert [*tmp_path.glob("*.nbi")], "numba.core.caching ignores the locator"


def test_the_variable_that_names_the_cache_folder() -> None:
    assert cache_dir() == os.environ.get("NUMBA_CACHE_DIR", ""), "numba.core.config.CACHE_DIR has another name"


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
