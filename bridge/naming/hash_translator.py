"""The bridge's memory of one worker's pages: the engine's name -> the router's, beyond the page's own life."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bridge.decoding.runs import PageEvents
from bridge.naming.hash_kernels import (
    HAND,
    HAS_VARIANTS,
    LOCAL_IN,
    NUM_CURSORS,
    NUM_SPECIAL,
    NUM_UNKNOWN,
    PAGE_OUT,
    PLAIN,
    RENAMED,
    VARIANT,
    NameArrays,
    Named,
    enter_pages,
    name_pages,
    recall_pages,
)
from kv_events import page_table
from kv_events.hash_seed import process_seed
from kv_events.hashing import U64Array
from kv_events.page_table import MAX_CAPACITY
from publisher.blocks import Blocks, flat_blocks, forget_all, make_blocks, states
from publisher.intake import StoredColumns


class Space(NamedTuple):
    """What keeps equal hashes of one worker apart: an attention group, or the owner of pooled pages."""

    label: str | None
    """The ledger's namespace."""
    number: int
    salt: np.uint64
    """The ledger's salt of that namespace."""


class Wording(NamedTuple):
    """What an event says of its pages' namespace."""

    seed: int
    is_whole_truth: bool
    """Pages have this seed. Otherwise a child inherits its parent's: engines name a salt only where a prompt begins."""


class SpecialPage(NamedTuple):
    """A page whose name needs care."""

    place: int
    """In the columns."""
    base: int
    """The engine's hash."""
    block_hash: int
    """That of the ledger: another one for a variant, see `name_kernels`."""
    is_renamed: bool
    """The hash meant another page until now."""


class NamedPages(NamedTuple):
    """What became of events."""

    columns: StoredColumns
    """Pages that have a name, and removed ones, as the publisher takes them; as many events as came, some empty."""
    special: list[SpecialPage]
    """Those of them that are variants, or renamed."""
    num_unknown: int
    """Pages left out because the page before them is not known."""


_UNHEARD_PAGES = 2**20
"""Room for pages that were named, and that the ledger has still to hear of; no more than it may hold."""

LocalHashes = Callable[[int, int, int], U64Array]
"""(first stored page, number of pages, seed) -> their local hashes."""


class Names:
    """A bounded map. Pages that lie somewhere are in it; of the others, what is not asked for any more is forgotten
    first. Not thread-safe.
    """

    def __init__(self, held_pages: int, idle_pages: int) -> None:
        """held_pages: those that may lie somewhere at a time. idle_pages: most names of pages that lie nowhere.

        Names of the engine's: several may be of one page, and then both bounds share the room.
        """
        capacity = min(held_pages + idle_pages + min(held_pages, _UNHEARD_PAGES), MAX_CAPACITY)
        self.blocks: Blocks = make_blocks(capacity, is_shared=True)
        """For the ledger that is to say which pages lie somewhere."""
        self._arrays = NameArrays(
            self.blocks,
            np.zeros(capacity + 1, np.uint64),
            np.zeros(capacity + 1, np.uint64),
            np.zeros(capacity + 1, np.uint16),
            np.array([-1, idle_pages, 0], np.int64),
        )
        self._flat = (*flat_blocks(self.blocks), *self._arrays[1:])
        self._base = np.uint64(process_seed())
        self._cursor = np.zeros(NUM_CURSORS, np.int64)
        self._named = _empty_named(0, 0)
        self._seeds = np.empty(0, np.uint64)

    def __len__(self) -> int:
        return page_table.num_live(self.blocks.table)

    def name(
        self, pages: PageEvents, local: U64Array, local_of: LocalHashes, wording: Wording, space: Space
    ) -> NamedPages:
        """Give stored pages their sequence hashes, by their parents' and their tokens, and remember them.

        local: uint64[stored pages], local hashes by the wording's seed; changed where another seed is inherited, by
        `local_of`. What is returned are views of buffers that the next call writes over.
        """
        num_events = len(pages.lengths)
        out, seeds = self._room(len(pages.block_hashes), num_events)
        cursor = self._cursor
        cursor[:] = 0
        seeds[:] = wording.seed
        while True:
            event = name_pages(
                *pages, local, seeds, np.uint64(wording.seed), self._base, wording.is_whole_truth, space.salt,
                space.number, cursor, *out, *self._flat,
            )  # fmt: skip
            if event == num_events:
                break
            first, num_pages = int(cursor[LOCAL_IN]), int(pages.lengths[event])
            local[first : first + num_pages] = local_of(first, num_pages, int(seeds[event]))
        end = int(cursor[PAGE_OUT])
        columns = StoredColumns(
            out.block_hashes[:end],
            out.names[:end],
            out.lengths[:num_events],
            out.parents[:num_events],
            out.has_parent[:num_events],
        )
        special = _special(out.bases[:end], columns.block_hashes, out.flags[:end]) if cursor[NUM_SPECIAL] else []
        return NamedPages(columns, special, int(cursor[NUM_UNKNOWN]))

    def recall(self, block_hashes: U64Array, wording: Wording, space: Space) -> NamedPages:
        """The pages that are known by the engine's hashes alone."""
        found = np.empty((3, len(block_hashes)), np.uint64)
        num_known = recall_pages(
            block_hashes, np.uint64(wording.seed), wording.is_whole_truth, space.salt, *found, *self._flat
        )
        bases, hashes, names = found[:, :num_known]
        return NamedPages(
            single_pages(hashes, names), _special(bases, hashes, np.where(bases == hashes, PLAIN, VARIANT)), 0
        )

    def enter(self, block_hashes: U64Array, names: U64Array, wording: Wording, space: Space) -> NamedPages:
        """Remember pages whose engine names them by sequence hashes itself."""
        hashes, flags = np.empty(len(names), np.uint64), np.empty(len(names), np.uint8)
        enter_pages(
            block_hashes, names, np.uint64(wording.seed), space.salt, space.number, hashes, flags, *self._flat
        )  # fmt: skip
        return NamedPages(single_pages(hashes, names), _special(block_hashes, hashes, flags), 0)

    def block_hashes_in(self, space: Space) -> U64Array:
        """The ledger's hashes of all pages remembered of a space."""
        known = states(self.blocks) != 0
        here = np.flatnonzero(known & (self._arrays.groups[: len(known)] == space.number))
        hashes: U64Array = self.blocks.table.keys[here] ^ space.salt
        return hashes

    def clear(self) -> None:
        """Forget everything."""
        forget_all(self.blocks)
        self._arrays.clock[HAND], self._arrays.clock[HAS_VARIANTS] = -1, 0

    def _room(self, num_pages: int, num_events: int) -> tuple[Named, U64Array]:
        """Buffers for the columns, and for one seed an event."""
        if num_pages > len(self._named.names) or num_events > len(self._named.lengths):
            self._named = _empty_named(2 * num_pages, 2 * num_events)
            self._seeds = np.empty(2 * num_events, np.uint64)
        return self._named, self._seeds[:num_events]


def single_pages(block_hashes: U64Array, names: U64Array) -> StoredColumns:
    """Pages whose place in a prompt is not said: each an event of its own."""
    num_pages = len(names)
    zeros = np.zeros(num_pages, np.uint64)
    return StoredColumns(block_hashes, names, np.ones(num_pages, np.int64), zeros, np.zeros(num_pages, np.uint8))


def _empty_named(num_pages: int, num_events: int) -> Named:
    words = np.empty((3, num_pages), np.uint64)
    return Named(
        words[0],
        words[1],
        words[2],
        np.empty(num_pages, np.uint8),
        np.empty(num_events, np.int64),
        np.empty(num_events, np.uint64),
        np.empty(num_events, np.uint8),
    )


def _special(bases: U64Array, block_hashes: U64Array, flags: npt.NDArray[np.uint8]) -> list[SpecialPage]:
    pages = np.flatnonzero(flags)
    columns = pages.tolist(), bases[pages].tolist(), block_hashes[pages].tolist(), (flags[pages] & RENAMED).tolist()
    return [
        SpecialPage(place, base, known_as, bool(renamed))
        for place, base, known_as, renamed in zip(*columns, strict=True)
    ]
