"""Zeros in small memory pages."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from kv_events.small_pages import zeros

MANY = 2**23


@pytest.mark.parametrize("shape", [0, 10, MANY, (4, MANY)])
def test_they_are_zeros_that_can_be_written(shape: int | tuple[int, ...]) -> None:
    array = zeros(shape, np.uint64)
    assert array.shape == np.zeros(shape, np.uint64).shape
    assert array.dtype == np.uint64
    assert not array.reshape(-1)[-1:].any()
    array[-1:] = 7
    assert (array[-1:] == 7).all()


def test_an_element_that_is_used_takes_one_small_page() -> None:
    array = zeros(MANY, np.uint64)
    array[MANY // 2] = 1
    assert _resident_kib(array.ctypes.data) == mmap.PAGESIZE // 1024


def _resident_kib(address: int) -> int:
    """Resident part of the mapping that begins at an address."""
    mapping = Path("/proc/self/smaps").read_text().partition(f"{address:x}-")[2]
    return int(mapping.partition("Rss:")[2].split()[0])


def test_more_than_the_address_space_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        zeros(2**62, np.uint8)
