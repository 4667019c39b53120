"""How long a bridge remembers the hashes of pages that a worker no longer holds."""

from typing import Any

from tests.rigs.bridge import CPU, GPU, Rig, on
from tests.support.engines.event_payloads import Event, cleared, names_of, removed, stored


def chain(hashes: range, **fields: Any) -> Event:
    """A store of pages of one token each."""
    return stored(hashes, [i % 60_000 for i in hashes], 1, **fields)


def come_and_go(rig: Rig, hashes: range, at_a_time: int = 64) -> None:
    """Store and then remove pages, in batches."""
    for first in hashes[::at_a_time]:
        here = range(first, min(first + at_a_time, hashes.stop))
        rig.take(chain(here))
        rig.take(removed(here))


def test_hashes_of_removed_pages_are_forgotten_when_there_are_too_many() -> None:
    rig = Rig(name_pages=1024, block_size=1)
    come_and_go(rig, range(1, 4097))
    rig.take(stored([9_000], [7], 1))
    assert rig.translator.num_remembered <= 1024 + 1
    rig.take(stored([10_000], [5], 1, parent=1), stored([10_001], [5], 1, parent=4096))
    assert rig.counters.unknown_parents == 1
    assert len(rig.pages) == 2


def test_the_hash_of_a_page_that_is_resident_is_never_forgotten() -> None:
    rig = Rig(name_pages=1024, block_size=1)
    rig.take(chain(range(1, 3001)))
    rig.take(removed(range(1, 2001)))
    rig.take(chain(range(1, 501), medium="CPU"))
    come_and_go(rig, range(10_000, 30_000))
    rig.take(*(stored([50_000 + i], [i], 1, parent=i) for i in (*range(1, 501), *range(2001, 3001))))
    assert rig.counters.unknown_parents == 0
    assert len(rig.pages) == 3000
    assert rig.translator.num_remembered <= 3000 + 1024 + 64


def test_hashes_do_not_grow_with_an_engines_work() -> None:
    rig = Rig(name_pages=1_000_000, block_size=1)
    come_and_go(rig, range(1, 100_001), 5000)
    assert 65_536 <= rig.translator.num_remembered <= 65_536 + 5000


def test_what_a_cleared_engine_held_may_be_forgotten() -> None:
    rig = Rig(name_pages=1024, block_size=1)
    rig.take(chain(range(1, 5001)))
    rig.take(cleared())
    rig.take(stored([9_000], [7], 1))
    assert rig.translator.num_remembered <= 1024 + 1
    assert len(rig.pages) == 1


def test_hashes_of_what_an_engine_may_still_hold_survive_a_drop_of_all_pages() -> None:
    rig = Rig(name_pages=1_000_000, ledger_pages=100_000, block_size=1)
    come_and_go(rig, range(200_000, 270_000), 5000)
    held = range(1, 80_001)
    rig.take(chain(held))
    rig.translator.clear()  # as when a batch is lost
    rig.take(*(stored([10**6 + i], [5], 1, parent=i) for i in held[::400]))
    rig.take(stored(held[::7], [], 0, medium="CPU"))
    assert (rig.counters.unknown_parents, rig.counters.unresolved_pages) == (0, 0)
    for first in range(2 * 10**6, 2 * 10**6 + 50):  # excess pages are forgotten step by step
        rig.take(stored([first], [first], 1))
    assert rig.translator.num_remembered <= 80_000 + len(rig.pages)


def test_a_page_whose_hash_is_anothers_and_that_is_forgotten_does_not_stay_when_it_is_renamed() -> None:
    rig = Rig(name_pages=1, block_size=1)
    rig.take(stored([7], [1], 1, cache_salt="a"), form="map")
    rig.take(stored([7], [1], 1, cache_salt="b", medium="CPU"), form="map")
    rig.take(removed([7], "GPU"))
    come_and_go(rig, range(100, 400))
    rig.take(stored([7], [2], 1, cache_salt="b"), form="map")
    assert rig.pages == on(GPU, names_of([2], 1, salt="b"))
    rig.take(removed([7], "GPU"))
    assert rig.pages == set()


def test_a_page_whose_hash_is_anothers_and_that_comes_back_without_tokens_can_be_removed() -> None:
    rig = Rig(block_size=1)
    for salt in "ab":
        rig.take(stored([7], [1], 1, cache_salt=salt), form="map")
    rig.take(cleared())
    rig.take(stored([7], [], 0, cache_salt="b", medium="CPU"), form="map")
    assert rig.pages == on(CPU, names_of([1], 1, salt="b"))
    rig.take(removed([7], "CPU"))
    assert rig.pages == set()


def test_pages_beyond_the_ledger_are_left_out_and_taken_once_there_is_room() -> None:
    rig = Rig(name_pages=20_000, block_size=1)  # 10,000 pages count as held
    rig.take(*(chain(range(i, i + 1)) for i in range(1, 12_001)))
    assert len(rig.pages) == 10_000
    rig.take(removed(range(1, 5001)))
    rig.take(*(chain(range(i, i + 1)) for i in range(10_001, 12_001)))
    assert len(rig.pages) == 7000


def test_a_prefix_that_is_asked_for_again_and_again_is_not_forgotten() -> None:
    rig = Rig(name_pages=1024, block_size=1).take(stored([1], [1], 1))
    for first in range(2, 5000, 16):
        rig.take(*(stored([i], [i], 1, parent=1) for i in range(first, first + 16)))
    assert rig.counters.unknown_parents == 0
