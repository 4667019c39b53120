"""Kernels accept named tuples of arrays and access the arrays of their callers."""

from __future__ import annotations

import gc
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from numba import types

from kv_events.kernels.bundles import I64Input, U8Vector, U32Matrix, U64Input, U64Vector, resident, spread
from kv_events.kernels.declare import array_kernel


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


@array_kernel(types.int64, Outer, spread(Events), types.int64)
def change(outer, events, step):
    """What a kernel says of itself."""
    outer.inner.words[0] += np.uint64(step)
    total = outer.inner.rows[1, 2] + outer.flags[outer.flags.shape[0] - 1] + events.hashes[0]
    return np.int64(total) + events.lengths[1] + 1000 * outer.inner.rows.shape[0]


def outer() -> Outer:
    rows = np.arange(6, dtype=np.uint32).reshape(2, 3)
    return Outer(Inner(np.zeros(3, np.uint64), rows), np.array([1, 2, 7], np.uint8))


def events() -> Events:
    return Events(np.frombuffer((10).to_bytes(8, "little"), np.uint64), np.array([20, 30]))


def test_a_kernel_reads_and_writes_the_arrays_of_its_bundles() -> None:
    held = outer()
    assert change(resident(held), events(), 5) == 2000 + 5 + 7 + 10 + 30
    assert held.inner.words.tolist() == [5, 0, 0]


def test_a_resident_bundle_sees_what_is_written_later_and_keeps_its_arrays_alive() -> None:
    held = outer()
    block = resident(held)
    held.flags[2] = 8
    words = held.inner.words
    del held
    gc.collect()
    assert change(block, events(), 1) == 2000 + 5 + 8 + 10 + 30
    assert words[0] == 1


def wrong_number(block: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    block[0] += 1
    return block


@pytest.mark.parametrize(
    "block",
    [
        resident(Other(*outer())),
        resident(outer().inner),
        resident(outer())[1:],
        wrong_number(resident(outer())),
        np.zeros(0, np.uint64),
    ],
    ids=["of equal shape", "of another shape", "cut", "of another class", "empty"],
)
def test_a_kernel_refuses_what_is_not_a_resident_bundle_of_its_class(block: npt.NDArray[np.uint64]) -> None:
    with pytest.raises(TypeError, match="not a resident Outer"):
        change(block, events(), 1)


@pytest.mark.parametrize(
    "flags",
    [np.zeros(3), np.zeros((3, 1), np.uint8), np.zeros(6, np.uint8)[::2], np.frombuffer(b"abc", np.uint8)],
    ids=["of another type", "of two dimensions", "with gaps", "read-only"],
)
def test_only_arrays_that_are_what_their_fields_state_become_resident(flags: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(TypeError, match="Outer"):
        resident(outer()._replace(flags=flags))


def test_arrays_that_are_spread_are_checked_by_numba() -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        change(resident(outer()), events()._replace(lengths=np.zeros(2, np.int32)), 1)


def test_a_kernel_keeps_its_name_and_docstring() -> None:
    assert (change.__name__, change.__doc__) == ("change", "What a kernel says of itself.")


def test_what_is_no_bundle_and_no_array_cannot_be_declared() -> None:
    with pytest.raises(TypeError, match="neither a named tuple"):

        @array_kernel(types.int64, "Outer")
        def _kernel(outer):
            return 0
