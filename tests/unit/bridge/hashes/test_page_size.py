"""Detection of the page size of a worker stream."""

from __future__ import annotations

import pytest

from kv_events.errors import KvsightError
from tests.support.bridge.rig import CPU, GPU, Rig, on
from tests.support.engines.event_payloads import names_of, stored

SMALL, LARGE = list(range(4)), list(range(8))


def test_a_store_behind_the_engine_does_not_state_how_large_device_pages_are() -> None:
    rig = Rig().take(stored([9], LARGE, 8, medium="CPU"))
    assert rig.pages == on(CPU, names_of(LARGE, 8))
    rig.take(stored([1], SMALL, medium="GPU"), stored([9], LARGE, 8, medium="CPU"))
    assert rig.translator.block_size == 4
    assert rig.pages == on(GPU, names_of(SMALL))
    assert rig.counters.other_block_sizes == 1


def test_pages_of_several_media_in_one_batch_are_distinguished_by_size() -> None:
    rig = Rig().take(stored([9], LARGE, 8, medium="CPU"), *(stored([i], [i] * 4) for i in range(3)))
    assert rig.pages == on(GPU, [names_of([i] * 4)[0] for i in range(3)])


def test_hashes_of_pages_of_a_size_that_was_wrong_are_forgotten() -> None:
    rig = Rig().take(stored([9], LARGE, 8, medium="CPU"), stored([1], SMALL), stored([2], SMALL, parent=9))
    assert rig.pages == on(GPU, names_of(SMALL))
    assert rig.counters.unknown_parents == 1


def test_a_size_that_no_longer_fits_a_page_is_abandoned() -> None:
    rig = Rig().take(stored([1], LARGE, 8))
    for number in range(200):
        rig.take(stored([number], [number] * 4))
    assert rig.translator.block_size == 4
    assert on(GPU, names_of([199] * 4)) <= rig.pages
    assert not on(GPU, names_of(LARGE, 8)) & rig.pages


def test_a_size_that_pages_fit_now_and_then_stays() -> None:
    rig = Rig()
    for number in range(200):
        rig.take(stored([number], [number] * 8, 8), *(stored([1000 * number + i], [i] * 4) for i in range(20)))
    assert rig.translator.block_size == 8
    assert len(rig.pages) == 200


def test_a_size_that_was_reported_stays_whatever_comes() -> None:
    rig = Rig(block_size=8)
    for number in range(200):
        rig.take(stored([number], [number] * 4))
    assert rig.translator.block_size == 8
    assert rig.pages == set()


def test_a_publisher_that_could_not_be_made_is_made_for_the_next_store() -> None:
    rig = Rig(failures=[KvsightError("no publisher")])
    with pytest.raises(KvsightError):
        rig.take(stored([1], SMALL))
    assert rig.take(stored([2], SMALL)).pages == on(GPU, names_of(SMALL))
