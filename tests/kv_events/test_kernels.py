"""What kernels are made of: bundles of arrays, machine instructions, small memory pages, and private parts of numba."""

import gc
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numba import njit, types
from numba.core.errors import NumbaError, TypingError

from indexer.index import OverlapIndex
from kv_events.digest import add_page, digest_bytes, empty_digest, page_counts, remove_page
from kv_events.kernels import instructions
from kv_events.kernels.arrays import give_back, zeros
from kv_events.kernels.bundles import I64Input, Spread, U8Vector, U32Matrix, U64Input, U64Vector, pin
from kv_events.kernels.declare import kernel
from kv_events.kernels.msgpack import put_array, put_bin, put_float, put_integer, put_short_text
from kv_events.kernels.numba_parts import HelperDispatcher, KernelDispatcher
from kv_events.kernels.numbers import int64, uint8, uint64
from tests.support.log.records import digest_of

# --- bundles --------------------------------------------------------------------------------------------------------


class Inner(NamedTuple):
    words: U64Vector
    rows: U32Matrix


class Outer(NamedTuple):
    inner: Inner
    flags: U8Vector


class Other(NamedTuple):
    inner: Inner
    marks: U8Vector


class Events(NamedTuple):
    hashes: U64Input
    lengths: I64Input


@kernel
def change(outer: Outer, events: Spread[Events], step: int) -> int:
    """What a kernel says of itself."""
    outer.inner.words[0] += uint64(step)
    total: int = outer.inner.rows[1, 2] + outer.flags[outer.flags.shape[0] - 1] + events.hashes[0]
    total += int64(events.lengths[1]) + 1000 * outer.inner.rows.shape[0]
    return total


def outer() -> Outer:
    rows = np.arange(6, dtype=np.uint32).reshape(2, 3)
    return Outer(Inner(np.zeros(3, np.uint64), rows), np.array([1, 2, 7], np.uint8))


def events() -> Events:
    return Events(np.frombuffer((10).to_bytes(8, "little"), np.uint64), np.array([20, 30]))


def test_a_kernel_reads_and_writes_the_arrays_of_a_pinned_bundle_which_keeps_them_alive() -> None:
    held = outer()
    block, words = pin(held), held.inner.words
    assert change(block, events(), 5) == 2000 + 5 + 7 + 10 + 30
    assert words.tolist() == [5, 0, 0]
    held.flags[2] = 8
    del held
    gc.collect()
    assert change(block, events(), 1) == 2000 + 5 + 8 + 10 + 30
    assert words[0] == 6


def wrong_number(block: Any) -> Any:
    block[0] += 1
    return block


@pytest.mark.parametrize(
    "block",
    [
        pin(Other(*outer())),
        pin(outer().inner),
        pin(outer())[1:],
        wrong_number(pin(outer())),
        np.zeros(0, np.uint64),
    ],
    ids=["of equal shape", "of another shape", "cut", "of another class", "empty"],
)
def test_a_kernel_refuses_what_is_not_a_pinned_bundle_of_its_class(block: Any) -> None:
    with pytest.raises(TypeError, match="not a pinned Outer"):
        change(block, events(), 1)


@pytest.mark.parametrize(
    "flags",
    [np.zeros(3), np.zeros((3, 1), np.uint8), np.zeros(6, np.uint8)[::2], np.frombuffer(b"abc", np.uint8)],
    ids=["of another type", "of two dimensions", "with gaps", "read-only"],
)
def test_only_arrays_that_are_what_their_fields_state_are_pinned(flags: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(TypeError, match="Outer"):
        pin(outer()._replace(flags=flags))


def _unknown(array: npt.NDArray[np.float64]) -> int:
    return len(array)


def test_what_is_declared_and_what_is_spread_is_checked() -> None:
    assert (change.__name__, change.__doc__) == ("change", "What a kernel says of itself.")
    with pytest.raises(TypeError, match="No matching definition"):
        change(pin(outer()), events()._replace(lengths=np.zeros(2, np.int32)), 1)
    with pytest.raises(TypeError, match="neither a number"):
        kernel(_unknown)(np.zeros(3))


# --- instructions ---------------------------------------------------------------------------------------------------


def compiled(name: str, parameters: str) -> Any:
    """Return a function that Python can call, with one instruction in it."""
    names = {name: getattr(instructions, name)}
    exec(f"def run({parameters}): return {name}({parameters})", names)  # numba inlines no variable arguments
    return njit(names["run"])


_lanes_equal = compiled("lanes_equal", "array, index, mask, wanted")
_lowest_bit, _leading_zeros = compiled("lowest_bit", "word"), compiled("leading_zeros", "word")
_upper_product = compiled("upper_product", "word, low, high")
_eight_bytes, _put_eight = compiled("eight_bytes", "data, at"), compiled("put_eight", "target, at, word")
_bytes_between = compiled("bytes_between", "data, at, first, last")
_copy_sixteen = compiled("copy_sixteen", "target, at, source, start")
U64 = st.integers(0, 2**64 - 1)
FEW = st.sampled_from([0, 1, 2, 2**32, 2**32 + 1, 2**63, 2**64 - 1])


@given(st.lists(FEW, min_size=8, max_size=20), st.data(), FEW, FEW)
def test_lanes_are_compared_in_their_order(words: list[int], data: st.DataObject, mask: int, wanted: int) -> None:
    index = data.draw(st.integers(0, len(words) - 8))
    expected = sum(1 << i for i, lane in enumerate(words[index : index + 8]) if lane & mask == wanted)
    assert _lanes_equal(np.array(words, np.uint64), index, np.uint64(mask), np.uint64(wanted)) == expected


@pytest.mark.parametrize("array", [np.zeros(16, np.uint32), np.zeros(32, np.uint64)[::2], np.zeros((2, 8), np.uint64)])
def test_lanes_of_other_arrays_are_refused_when_compiled(array: npt.NDArray[Any]) -> None:
    with pytest.raises(TypingError):
        _lanes_equal(array, 0, np.uint64(1), np.uint64(1))


@given(U64.filter(bool), U64, U64)
def test_bits_are_counted_from_both_ends_and_words_multiplied(word: int, low: int, high: int) -> None:
    assert _lowest_bit(np.uint64(word)) == f"{word:b}"[::-1].index("1")
    assert _leading_zeros(np.uint64(word)) == 64 - word.bit_length()
    product = word * (high << 64 | low) % 2**128 >> 64
    assert int(_upper_product(np.uint64(word), np.uint64(low), np.uint64(high))) == product


@given(st.binary(min_size=64, max_size=90), st.binary(min_size=16, max_size=40), st.data())
def test_bytes_are_read_compared_and_copied_at_their_place_and_nowhere_else(
    text: bytes, other: bytes, data: st.DataObject
) -> None:
    array, at = np.frombuffer(bytearray(text), np.uint8), data.draw(st.integers(0, len(text) - 64))
    assert _eight_bytes(np.frombuffer(text, np.uint8), at) == int.from_bytes(text[at : at + 8], "big")
    first, last = sorted(data.draw(st.tuples(st.sampled_from(text), st.integers(0, 255))))
    expected = sum(1 << i for i, each in enumerate(text[at : at + 64]) if first <= each <= last)
    assert int(_bytes_between(array, at, np.uint8(first), np.uint8(last))) == expected
    start, target = data.draw(st.integers(0, len(other) - 16)), np.frombuffer(bytearray(other), np.uint8)
    _copy_sixteen(target, start, array, at)
    assert target.tobytes() == other[:start] + text[at : at + 16] + other[start + 16 :]
    _put_eight(target, start, np.uint64(2**63 + 5))
    assert target[start : start + 9].tobytes() == (2**63 + 5).to_bytes(8, "little") + text[at + 8 : at + 9]


# --- msgpack --------------------------------------------------------------------------------------------------------


@kernel
def _packed(out: U8Vector, integer: int, number: float, text: U64Input) -> int:
    """Write an array of an integer, a number, and the same text as bytes and as text."""
    at = put_float(out, put_integer(out, put_array(out, int64(0), 4), integer), number)
    at = put_bin(out, at, text.shape[0])
    for i in range(text.shape[0]):
        out[at + i] = uint8(text[i])
    at = put_short_text(out, at + text.shape[0], text.shape[0])
    for i in range(text.shape[0]):
        out[at + i] = uint8(text[i])
    end: int = at + text.shape[0]
    return end


@given(st.sampled_from([0, 2**7, 2**16, 2**32]) | st.integers(0, 2**63 - 1), st.floats(), st.text("ab", max_size=255))
@example(2**7 - 1, -0.0, "")
@example(2**16 - 1, 1e300, "a" * 255)
def test_what_kernels_write_as_msgpack_is_read_by_others(integer: int, number: float, text: str) -> None:
    out = np.full(1000, 0xC1, np.uint8)
    end = _packed(out, integer, number, np.frombuffer(text.encode(), np.uint8).astype(np.uint64))
    read = msgspec.msgpack.decode(out[:end].tobytes())
    assert [read[0], *read[2:]] == [integer, text.encode(), text]
    assert np.float64(read[1]).tobytes() == np.float64(number).tobytes()


# --- the digest -----------------------------------------------------------------------------------------------------


@kernel
def _add(digest: U64Vector, medium: int, hashes: U64Input) -> None:
    for i in range(hashes.shape[0]):
        add_page(digest, medium, hashes[i])


@kernel
def _remove(digest: U64Vector, medium: int, hashes: U64Input) -> None:
    for i in range(hashes.shape[0]):
        remove_page(digest, medium, hashes[i])


PAGES = st.sets(st.tuples(U64, st.integers(0, 3)), max_size=20)


@given(PAGES, PAGES)
def test_adding_and_removing_in_any_order_equals_counting_from_scratch(
    kept: set[tuple[int, int]], gone: set[tuple[int, int]]
) -> None:
    digest = empty_digest()
    gone -= kept
    for page, medium in [*gone, *kept]:
        _add(digest, medium, np.array([page], np.uint64))
    for page, medium in gone:
        _remove(digest, medium, np.array([page], np.uint64))
    assert digest_bytes(digest) == digest_of(kept)
    assert page_counts(digest) == [sum(medium == m for _, medium in kept) for m in range(4)]


def test_pages_are_mixed_by_splitmix_whose_outputs_do_not_cancel_out() -> None:
    digest = empty_digest()
    _add(digest, 0, np.array([0], np.uint64))
    assert int(digest[4]) == 0xE220A8397B1DCDAF  # the published first output
    _add(digest, 1, np.array([1, 2, 3], np.uint64))
    assert int(digest[5]) != 0


# --- zeros in small memory pages ------------------------------------------------------------------------------------

MANY = 2**23


@pytest.mark.parametrize("shape", [0, 10, MANY, (4, MANY)])
def test_zeros_can_be_written(shape: int | tuple[int, ...]) -> None:
    array = zeros(shape, np.uint64)
    assert array.shape == np.zeros(shape, np.uint64).shape
    assert array.dtype == np.uint64
    assert not array.reshape(-1)[-1:].any()
    array[-1:] = 7
    assert (array[-1:] == 7).all()


def test_large_memory_pages_are_not_used() -> None:
    """The first write to a huge page takes milliseconds, and a store would wait for it."""
    array = zeros(MANY, np.uint64)
    before = _mappings()
    (flags,) = [flags for (first, end), flags in before.items() if first <= array.ctypes.data < end]
    assert "nh" in flags
    index = OverlapIndex(2**20)
    new = [flags for (first, end), flags in _mappings().items() if (first, end) not in before and end - first >= 2**21]
    assert index.num_pages == 0
    assert any("nh" in flags for flags in new)
    assert not any("hg" in flags for flags in new)


def _mappings() -> dict[tuple[int, int], list[str]]:
    """Return the flags of each anonymous mapping that can be written. The system joins mappings that are alike."""
    found = re.finditer(
        r"^([0-9a-f]+)-([0-9a-f]+) rw-p \w+ \S+ 0 [^\n]*\n(?:[A-Z]\w+:[^\n]*\n)*?VmFlags: ([^\n]*)$",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE,
    )
    return {(int(each[1], 16), int(each[2], 16)): each[3].split() for each in found}


def test_memory_is_given_back_in_steps() -> None:
    array = zeros((MANY, 2), np.uint64)
    array[:] = 1
    used = array[: MANY // 2]
    assert sum(1 for _ in give_back(used)) == used.nbytes // 2**22
    assert not used.any()
    assert array[MANY // 2 :].all()
    assert list(give_back(zeros(10, np.uint64))) == []
    with pytest.raises(MemoryError):
        zeros(2**62, np.uint8)


# --- private parts of numba; a failure shows what a new version changed ---------------------------------------------


def made(function: Any) -> Any:
    """Return a kernel that nobody has loaded."""
    inner = HelperDispatcher(function, lambda: types.int64(types.int64), is_inlined=True)
    return KernelDispatcher(function, lambda: types.int64(types.int64), inner, KernelDispatcher.load)


def test_the_option_that_leaves_the_memory_runtime_out() -> None:
    def allocates(number: int) -> Any:
        return np.zeros(number)[0]

    assert njit(allocates)(3) == 0
    with pytest.raises((NumbaError, NotImplementedError)):
        made(allocates)(3)


@pytest.mark.parametrize("number", [20, np.uint8(20), np.uint64(20), True], ids=lambda each: type(each).__name__)
def test_the_first_call_loads_a_kernel_and_converts_numbers_as_all_others_do(number: int) -> None:
    double = made(lambda number: 2 * number)
    first = double(number)
    assert first == double(number) == 2 * number
    for wrong in ("20", np.zeros(1), None):
        with pytest.raises(TypeError, match="No matching definition"):
            double(wrong)
        with pytest.raises(TypeError, match="No matching definition"):
            made(lambda number: 2 * number)(wrong)


def test_a_helper_has_one_signature() -> None:
    double: Any = HelperDispatcher(lambda number: 2 * number, lambda: types.int64(types.int64), is_inlined=False)
    assert made(lambda number: double(number) + double(3) + double(np.uint8(1)))(20) == 48
    assert len(double.overloads) == 1, "numba compiles a function for more than its declared types"


def test_callers_get_the_code_of_a_function_as_it_was_lowered() -> None:
    double: Any = HelperDispatcher(lambda number: 2 * number, lambda: types.int64(types.int64), is_inlined=True)
    assert made(lambda number: double(number) + 1)(20) == 41
    (overload,) = double.overloads.values()
    linked = str(overload.library._get_module_for_linking())
    is_translated = overload.library._codegen._engine.is_symbol_defined(overload.fndesc.llvm_func_name)
    assert not is_translated, "numba translates functions of kernels by themselves: see _UntranslatedLibrary"
    assert "cpython" not in linked, "numba ignores no_cpython_wrapper: functions of kernels take longer to compile"
    assert "cfunc" not in linked, "numba ignores no_cfunc_wrapper: functions of kernels take longer to compile"


def answer(number: int) -> int:
    return 42 + number


def test_kernels_are_kept_in_a_given_folder_and_found_there(tmp_path: Path) -> None:
    for was_kept in (False, True):
        kept = made(answer)
        kept.keep_in(tmp_path, is_writable=True)
        assert kept.kept_in.exists() is was_kept, "numba.core.caching keeps or finds nothing in the folder"
        kept.load()
        assert kept(0) == 42
        assert sum(kept.stats.cache_hits.values()) == was_kept
    assert [*tmp_path.glob("*.nbc")] == [kept.kept_in], "numba.core.caching ignores the locator"
