"""Zeros in small memory pages."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from indexer.index import OverlapIndex
from kv_events.kernels.arrays import give_back, zeros

MANY = 2**23


@pytest.mark.parametrize("shape", [0, 10, MANY, (4, MANY)])
def test_they_are_zeros_that_can_be_written(shape: int | tuple[int, ...]) -> None:
    array = zeros(shape, np.uint64)
    assert array.shape == np.zeros(shape, np.uint64).shape
    assert array.dtype == np.uint64
    assert not array.reshape(-1)[-1:].any()
    array[-1:] = 7
    assert (array[-1:] == 7).all()


def test_large_memory_pages_are_not_used() -> None:
    assert "nh" in _flags(zeros(MANY, np.uint64).ctypes.data)


def _flags(address: int) -> list[str]:
    """Flags of the mapping that contains an address. The kernel joins mappings that are alike."""
    text = Path("/proc/self/smaps").read_text()
    for mapping in re.finditer(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", text, re.MULTILINE | re.DOTALL):
        if int(mapping[1], 16) <= address < int(mapping[2], 16):
            return mapping[3].split()
    raise AssertionError("no mapping")


def test_memory_is_given_back_in_steps() -> None:
    array = zeros((MANY, 2), np.uint64)
    array[:] = 1
    used = array[: MANY // 2]
    assert sum(1 for _ in give_back(used)) == used.nbytes // 2**22
    assert not used.any()
    assert array[MANY // 2 :].all()
    assert list(give_back(zeros(10, np.uint64))) == []


def test_an_index_grows_by_small_pages() -> None:
    """The first write to a huge page takes milliseconds, and a store would wait for it."""
    before = _large_mappings()
    index = OverlapIndex(2**20)
    new = [flags for address, flags in _large_mappings().items() if address not in before]
    assert index.num_pages == 0
    assert any("nh" in flags for flags in new)
    assert not any("hg" in flags for flags in new)


def _large_mappings() -> dict[str, list[str]]:
    """Return the flags of each anonymous mapping of at least 2 MiB that can be written, by its range of addresses."""
    mappings: dict[str, list[str]] = {}
    address, is_large = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if " " in name or "-" in name:
            address = line if line.split()[1] == "rw-p" and line.split()[4] == "0" else ""
        elif name == "Size":
            is_large = int(value.split()[0]) >= 2048
        elif name == "VmFlags" and address and is_large:
            mappings[address.split()[0]] = value.split()
    return mappings


def test_more_than_the_address_space_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        zeros(2**62, np.uint8)
