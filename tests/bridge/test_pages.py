"""Translation of engine events to events that routers can rely on, with each pitfall of the engines' protocols."""

from typing import Any

import pytest

from kv_events.errors import KvsightError
from tests.models.stream_reader import Pages
from tests.rigs.bridge import CPU, DISK, EXTERNAL, GPU, NOW, Rig, on
from tests.support.engines.event_payloads import Event, cleared, names_of, removed, stored

TOKENS = list(range(100, 116))
NAMES = names_of(TOKENS)
HASHES = [11, 12, 13, 14]
SMALL, LARGE = list(range(4)), list(range(8))

Steps = list[tuple[list[Event], Pages]]
"""Batches of events, and the pages that are held after each."""


def store(first: int = 0, stop: int = 4, **fields: Any) -> Event:
    """A store of some of the four pages, with their tokens and their parent."""
    parent = HASHES[first - 1] if first else None
    return stored(HASHES[first:stop], TOKENS[4 * first : 4 * stop], parent=parent, **fields)


def offload(medium: str, first: int = 0, stop: int = 4) -> Event:
    """A store of known pages without tokens."""
    return stored(HASHES[first:stop], [], 0, medium=medium)


def remove(first: int = 0, stop: int = 4, medium: str | None = None) -> Event:
    return removed(HASHES[first:stop], medium)


def gpu(first: int = 0, stop: int = 4) -> Pages:
    return on(GPU, NAMES[first:stop])


def cpu(first: int = 0, stop: int = 4) -> Pages:
    return on(CPU, NAMES[first:stop])


# name of the case, batches, counters that are not zero
CASES: list[tuple[str, Steps, dict[str, Any]]] = [
    ("an absent medium is the device", [([store()], gpu())], {}),
    (
        "an unknown medium is not the device",
        [([store(medium="FLOPPY"), remove(1, 2, "FLOPPY")], set())],
        {"unknown_media": {"FLOPPY": 5}},
    ),
    (
        "pages on an unknown medium still name their children",
        [([store(0, 2, medium="FLOPPY"), store(2)], gpu(2))],
        {"unknown_media": {"FLOPPY": 2}},
    ),
    ("a remote machine is external", [([store(medium="STORAGE", locality="REMOTE")], on(EXTERNAL, NAMES))], {}),
    ("a parent may be on another tier", [([store(0, 2, medium="CPU"), store(2)], cpu(0, 2) | gpu(2))], {}),
    ("a parent may be of an earlier life", [([store(0, 2), remove(0, 2), store(2)], gpu(2))], {}),
    (
        "a parent that was never seen leaves its children out until they are stored again",
        [([store(2), stored([1], TOKENS[:4])], gpu(0, 1)), ([store(0, 2), store(2)], gpu())],
        {"unknown_parents": 2},
    ),
    (
        "a store without tokens states that a known page is on one more medium",
        [([store()], gpu()), ([offload("CPU", 1, 3), remove()], cpu(1, 3))],
        {},
    ),
    (
        "a page may be offloaded after it left the device",
        [([store(), remove(), offload("STORAGE", 2, 3)], on(DISK, NAMES[2:3]))],
        {},
    ),
    (
        "a store without tokens of an unknown page is counted",
        [([store(), stored([99, 98], [], 0, medium="CPU")], gpu())],
        {"unresolved_pages": 2},
    ),
    (
        "removing an inner page leaves its descendants",
        [([store(), remove(1, 2)], gpu(0, 1) | gpu(2)), ([store(1, 2)], gpu())],
        {},
    ),
    (
        "stores of known and removals of unknown pages are normal",
        [([removed([55]), store(), store(), removed([55], "DISK")], gpu())],
        {},
    ),
    (
        "a page stays until the last copy is removed",
        [([store(), store(), remove(3)], gpu()), ([remove(3), remove(3)], gpu(0, 3)), ([removed([13, 13])], gpu(0, 2))],
        {},
    ),
    ("a clear removes all copies", [([store(), store(), cleared(), store()], gpu()), ([remove()], set())], {}),
    (
        "engines without groups repeat stores behind the device",
        [
            ([store(medium="CPU_PINNED")] * 2, cpu()),
            ([remove(3, 4, "CPU_PINNED")], cpu(0, 3)),
            ([cleared(), *[store(medium="DISK")] * 2, remove(3, 4, "DISK")], on(DISK, NAMES[:3])),
        ],
        {},
    ),
    (
        "a removal means one medium",
        [
            (
                [store(), offload("CPU"), offload("DISK"), remove(0, 2, "CPU_PINNED"), remove(0, 1)],
                gpu(1) | cpu(2) | on(DISK, NAMES),
            )
        ],
        {},
    ),
    (
        "a clear empties all media and hashes stay",
        [([store(), offload("CPU"), cleared()], set()), ([store(2, 3)], gpu(2, 3))],
        {},
    ),
    ("a last page that is not full is dropped", [([stored(HASHES[:3], TOKENS[:10])], gpu(0, 2))], {"partial_pages": 1}),
    (
        "pages of another size are left out",
        [([store(0, 1), stored([5], TOKENS[:8], 8), stored([6], TOKENS[:3], 3)], gpu(0, 1))],
        {"other_block_sizes": 2},
    ),
    (
        "a number of tokens that fits no number of pages is a mistake",
        [([stored(HASHES[:2], TOKENS), stored([1], TOKENS[:4])], gpu(0, 1))],
        {"bad_events": {"token_count": 1}},
    ),
    (
        "a hash that comes to mean another page does not keep the old one",
        [([stored([1], TOKENS[:4]), stored([1], TOKENS[4:8])], on(GPU, names_of(TOKENS[4:8])))],
        {},
    ),
    (
        "nor if it means another page on a medium that is none",
        [
            ([stored([1], TOKENS[:4]), stored([1], TOKENS[4:8], medium="WEIRD")], set()),
            ([stored([1], TOKENS[4:8])], on(GPU, names_of(TOKENS[4:8]))),
        ],
        {"unknown_media": {"WEIRD": 1}},
    ),
    (  # storage behind the engine may cut pages in its own way
        "a store behind the engine does not state how large device pages are",
        [
            ([stored([9], LARGE, 8, medium="CPU")], on(CPU, names_of(LARGE, 8))),
            ([stored([1], SMALL, medium="GPU"), stored([9], LARGE, 8, medium="CPU")], on(GPU, names_of(SMALL))),
        ],
        {"other_block_sizes": 1},
    ),
    (
        "hashes of pages of a size that was wrong are forgotten",
        [
            (
                [stored([9], LARGE, 8, medium="CPU"), stored([1], SMALL), stored([2], SMALL, parent=9)],
                on(GPU, names_of(SMALL)),
            )
        ],
        {"unknown_parents": 1},
    ),
    (
        "pages of several media in one batch are distinguished by size",
        [
            (
                [stored([9], LARGE, 8, medium="CPU"), *(stored([i], [i] * 4) for i in range(3))],
                on(GPU, [names_of([i] * 4)[0] for i in range(3)]),
            )
        ],
        {},
    ),
]
_ALWAYS = ("batches", "events", "pages_stored", "pages_removed", "clears")


@pytest.mark.parametrize(("steps", "counters"), [pytest.param(*case, id=name) for name, *case in CASES])
def test_what_is_held_and_counted(steps: Steps, counters: dict[str, Any]) -> None:
    rig = Rig()
    for events, pages in steps:
        assert rig.take(*events, form="map").pages == pages
    assert {name: value for name, value in rig.counts().items() if value and name not in _ALWAYS} == counters
    assert rig.counters.clears == sum(events.count(cleared()) for events, _ in steps)


def test_copies_are_not_counted_if_the_registration_says_so() -> None:
    rig = Rig(count_copies=False).take(stored(HASHES, TOKENS), stored(HASHES, TOKENS))
    assert rig.take(removed([14])).pages == on(GPU, NAMES[:3])


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


def test_a_restart_whose_publisher_could_not_be_made_changes_nothing_until_the_next_one() -> None:
    rig = Rig().take(stored([1], SMALL))
    rig.fail_once(KvsightError("no publisher"))
    with pytest.raises(KvsightError):
        rig.translator.restart(is_certain=True)
    assert rig.pages == on(GPU, names_of(SMALL))
    rig.translator.restart(is_certain=True)
    assert rig.pages == set()


@pytest.mark.parametrize("is_certain", [True, False, None])
def test_a_clear_that_an_old_publisher_recorded_late_costs_its_successor_nothing(is_certain: bool | None) -> None:
    rig = Rig().take(stored([1], SMALL, medium="CPU"))
    old = rig.translator.publisher
    assert old is not None
    old._tracker.is_deferring = True  # as while it runs
    rig.take(cleared())
    if is_certain is not None:
        rig.translator.restart(is_certain=is_certain)
    rig.take(stored([2], LARGE, 8))
    old.take_records(NOW, force=True)
    assert rig.pages == on(GPU, names_of(LARGE, 8))
    assert rig.take(removed([2])).pages == set()
