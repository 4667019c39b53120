"""Numbers read from JSON text equal those of the `json` module, and other text is read by msgspec."""

import json
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.queries.kernels.numbers import read_hashes, read_tokens
from tests.support.effort import num_examples

MOST = 256


def _read_hashes(are_signed: bool, data: Any, start: int, out: Any) -> Any:
    return read_hashes(data, start, out, are_signed)


def _read_tokens(data: bytes, start: int, out: Any) -> Any:
    return read_tokens(np.frombuffer(data, np.uint8), start, out)


class Reader(NamedTuple):
    """A kernel, the type of its numbers and their range."""

    read: Any
    dtype: str
    low: int
    high: int


READERS = {
    "u32": Reader(_read_tokens, "<u4", 0, 2**32 - 1),
    "u64": Reader(partial(_read_hashes, False), "<u8", 0, 2**64 - 1),
    "i64": Reader(partial(_read_hashes, True), "<i8", -(2**63), 2**63 - 1),
}
readers = st.sampled_from(sorted(READERS))
PIECES = [*"0123456789-+.,[]{}e \t\n\r\"'x", "12345678", "4294967295", "18446744073709551615", "\0", "\ff", "٣"]


def read(name: str, text: str, start: int = 1) -> list[int] | None:
    """Return the numbers of an array and check that what follows it was not read. None: left to the decoder."""
    kernel, dtype, _, _ = READERS[name]
    data = text.encode()
    out = np.zeros(MOST, dtype)
    count, end = kernel(data, start, out.view(dtype.replace("i", "u")))
    if end < 0:
        return None
    assert data[end : end + 1] == b"]"
    return out[:count].tolist()  # type: ignore[no-any-return]


def expected(name: str, text: str) -> list[int] | None:
    """Return what a JSON decoder reads, or None for anything but integers in range."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    low, high = READERS[name].low, READERS[name].high
    fits = isinstance(value, list) and all(type(each) is int and low <= each <= high for each in value)
    return value if fits else None


@given(readers, st.data(), st.sampled_from([",", ", ", " ,", "\n,\t"]))
def test_integers_in_range_are_read(name: str, data: st.DataObject, comma: str) -> None:
    numbers = st.integers(READERS[name].low, READERS[name].high) | st.integers(0, 2**20)
    values = data.draw(st.lists(numbers, min_size=1, max_size=150))
    assert read(name, f"[{comma.join(map(str, values))}]") == values


@settings(max_examples=num_examples(2000))
@given(
    readers,
    st.lists(st.integers(0, 2**17) | st.integers(0, 10**9), max_size=40),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.integers(0, 40),
    st.sampled_from([",", ", "]),
)
def test_whatever_is_read_is_what_a_json_decoder_reads(
    name: str, numbers_around: list[int], inside: str, place: int, comma: str
) -> None:
    parts = [str(number) for number in numbers_around]
    parts.insert(place, inside)
    text = f"[{comma.join(parts)}]"
    numbers = read(name, text)
    if numbers is not None:
        end = text.index("]") + 1
        assert numbers == expected(name, text[:end])


@pytest.mark.parametrize("name", READERS)
def test_the_ends_of_the_range(name: str) -> None:
    low, high = READERS[name].low, READERS[name].high
    assert read(name, f"[{low},{high}]") == [low, high]
    assert read(name, f"[{high + 1}]") is None
    assert read(name, f"[{low - 1}]") is None


NO_NUMBERS = """[] [01] [00] [1.0] [1e3] [+1] [--1] [1,] [,1] [1 [1, ["1"] [null] [[1]] [99999999999999999999]
    [100000000000000000000] [123456789012345678901234567890]"""


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", [*NO_NUMBERS.split(), "[ ]", "[1 2]"])
def test_anything_else_is_read_by_the_decoder(name: str, text: str) -> None:
    assert read(name, text) is None


def test_more_numbers_than_there_is_room_for_are_read_by_the_decoder() -> None:
    assert read("u32", f"[{','.join(['1'] * MOST)}]") == [1] * MOST
    assert read("u32", f"[{','.join(['1'] * (MOST + 1))}]") is None


@given(st.integers(0, 20), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20), st.integers(0, 20))
def test_an_array_is_read_at_any_place_of_a_text(before: int, values: list[int], after: int) -> None:
    text = " " * before + f"[{','.join(map(str, values))}]" + "9" * after
    assert read("u32", text, before + 1) == values
