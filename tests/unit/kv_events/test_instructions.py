"""Machine instructions for kernels, compared with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from numba.core.errors import TypingError

from kv_events.kernels.instructions import (
    NUM_LANES,
    copy_sixteen,
    eight_bytes,
    equal_bytes,
    lanes_equal,
    leading_zeros,
    lowest_bit,
)

U64 = st.integers(0, 2**64 - 1)
FEW = st.sampled_from([0, 1, 2, 2**32, 2**32 + 1, 2**63, 2**64 - 1])


@njit
def _lanes_equal(array: Any, index: Any, mask: Any, wanted: Any) -> Any:
    return lanes_equal(array, index, mask, wanted)  # type: ignore[call-arg]  # compiled, without its first parameter


@njit
def _lowest_bit(word: Any) -> Any:
    return lowest_bit(word)  # type: ignore[call-arg]  # compiled, without its first parameter


@njit
def _eight_bytes(data: Any, at: Any) -> Any:
    return eight_bytes(data, at)  # type: ignore[call-arg]  # compiled, without its first parameter


@given(st.lists(FEW, min_size=NUM_LANES, max_size=20), st.data(), FEW, FEW)
def test_lanes_are_compared_in_their_order(words: list[int], data: st.DataObject, mask: int, wanted: int) -> None:
    index = data.draw(st.integers(0, len(words) - NUM_LANES))
    lanes = words[index : index + NUM_LANES]
    expected = sum(1 << i for i, lane in enumerate(lanes) if lane & mask == wanted)
    assert _lanes_equal(np.array(words, np.uint64), index, np.uint64(mask), np.uint64(wanted)) == expected


@pytest.mark.parametrize("array", [np.zeros(16, np.uint32), np.zeros(32, np.uint64)[::2], np.zeros((2, 8), np.uint64)])
def test_lanes_of_other_arrays_are_refused_when_compiled(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(TypingError):
        _lanes_equal(array, 0, np.uint64(1), np.uint64(1))


@given(U64.filter(bool))
def test_the_lowest_bit_is_the_first_that_is_set(word: int) -> None:
    assert _lowest_bit(np.uint64(word)) == f"{word:b}"[::-1].index("1")


@given(st.binary(min_size=8, max_size=30), st.data())
def test_eight_bytes_are_a_big_endian_number(text: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text) - 8))
    assert _eight_bytes(np.frombuffer(text, np.uint8), at) == int.from_bytes(text[at : at + 8], "big")


@njit
def _leading_zeros(word: Any) -> Any:
    return leading_zeros(word)  # type: ignore[call-arg]  # compiled, without its first parameter


@njit
def _equal_bytes(data: Any, at: Any, byte: Any) -> Any:
    return equal_bytes(data, at, np.uint8(byte))  # type: ignore[call-arg]  # compiled, without its first parameter


@njit
def _copy_sixteen(target: Any, at: Any, source: Any, start: Any) -> None:
    copy_sixteen(target, at, source, start)  # type: ignore[call-arg]  # compiled, without its first parameter


@given(st.integers(1, 2**64 - 1))
def test_leading_zeros_are_those_of_64_bits(word: int) -> None:
    assert _leading_zeros(np.uint64(word)) == 64 - word.bit_length()


@given(st.binary(min_size=64, max_size=90), st.data())
def test_64_bytes_are_compared_in_their_order(text: bytes, data: st.DataObject) -> None:
    at, byte = data.draw(st.integers(0, len(text) - 64)), data.draw(st.sampled_from(text))
    expected = sum(1 << i for i, each in enumerate(text[at : at + 64]) if each == byte)
    assert int(_equal_bytes(np.frombuffer(bytearray(text), np.uint8), at, byte)) == expected


@given(st.binary(min_size=16, max_size=40), st.binary(min_size=16, max_size=40), st.data())
def test_16_bytes_are_copied_and_no_others(text: bytes, other: bytes, data: st.DataObject) -> None:
    start, at = data.draw(st.integers(0, len(text) - 16)), data.draw(st.integers(0, len(other) - 16))
    target = np.frombuffer(bytearray(other), np.uint8)
    _copy_sixteen(target, at, np.frombuffer(bytearray(text), np.uint8), start)
    assert target.tobytes() == other[:at] + text[start : start + 16] + other[at + 16 :]
