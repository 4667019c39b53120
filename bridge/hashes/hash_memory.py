"""One worker's engine hashes and their sequence hashes, remembered beyond the pages' lives."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bridge.hashes.kernels import hashes as kernels
from kv_events.errors import KvsightError
from kv_events.hash_seed import process_seed
from kv_events.hashing import U64Array
from kv_events.kernels import page_table
from kv_events.kernels.arrays import zeros
from kv_events.kernels.bundles import pin
from kv_events.kernels.page_table import MAX_CAPACITY
from publisher.kernels.blocks import BlockTable
from publisher.kernels.events import PageEvents


class HashNamespace(NamedTuple):
    """Keeps equal engine hashes of one worker apart: an attention group, or the owner of pooled pages."""

    label: str | None
    """The ledger's namespace."""
    number: int
    salt: np.uint64
    """The ledger's salt of that namespace."""


class NamespaceSeed(NamedTuple):
    seed: int
    is_stated: bool
    """Whether the event itself states it. If not, a page inherits the seed of its parent: engines name a cache salt
    only where a prompt begins."""


class AmbiguousPage(NamedTuple):
    """A page whose engine hash is, or was, another page's, too."""

    position: int
    """In the columns."""
    engine_hash: int
    block_hash: int
    """The ledger's hash. Differs from the engine's where pages collide, see `kernels.hashes`."""
    is_reassigned: bool
    """Whether the hash meant another page until now."""


class TranslatedPages(NamedTuple):
    """Pages of events, with sequence hashes."""

    columns: PageEvents
    """Stored pages whose hashes are known, and removed pages, for the publisher. As many events as came, some empty."""
    ambiguous: Sequence[AmbiguousPage] = ()
    num_unknown: int = 0
    """Pages left out because their parent is not known."""
    seed: int = 0
    """Seed of the last event's pages, if they were hashed."""


class AmbiguityError(KvsightError):
    """Pages cannot be told apart by their engine hashes."""


_MAX_AMBIGUOUS = 16_384
"""Bound on the ambiguous pages of one run. Each costs some 30 us."""

_UNAPPLIED_PAGES = 2**20
"""Room for pages that were translated but not yet applied by the ledger. No more than the ledger may hold."""

LocalHashes = Callable[[int, int, int], U64Array]
"""(first stored page, number of pages, seed) -> their local hashes."""


class HashMemory:
    """A bounded map from engine hash to sequence hash. Not thread-safe.

    Holds all pages that the worker holds, and of its former pages those that were used last.
    """

    def __init__(self, held_pages: int, idle_pages: int) -> None:
        """held_pages: most pages that the worker may hold. idle_pages: most former pages that are remembered.

        If several engine hashes mean the same page, each counts.
        """
        capacity = min(held_pages + idle_pages + min(held_pages, _UNAPPLIED_PAGES), MAX_CAPACITY)
        self.blocks = BlockTable(capacity, is_shared=True)
        """For the ledger, which marks the pages that are held."""
        self._arrays = kernels.HashArrays(
            self.blocks.arrays,
            zeros(capacity + 1, np.uint64),
            zeros(capacity + 1, np.uint64),
            zeros(capacity + 1, np.uint16),
            np.array([-1, idle_pages, 0], np.int64),
        )
        self._pinned = pin(self._arrays)
        self._base = np.uint64(process_seed())
        self._cursor = np.zeros(kernels.NUM_CURSORS, np.int64)
        self._translated = _empty_columns(0, 0)
        self._seeds = np.empty(0, np.uint64)

    def __len__(self) -> int:
        return page_table.num_live(self._arrays.blocks.table)

    def translate(
        self, pages: PageEvents, local: U64Array, local_of: LocalHashes, seed: NamespaceSeed, namespace: HashNamespace
    ) -> TranslatedPages:
        """Compute the sequence hashes of stored pages from their parents and tokens, and remember them.

        local: uint64[stored pages], local hashes by `seed`; overwritten with those of `local_of` where a page inherits
        another seed. Returns views of buffers that the next call overwrites.
        """
        num_events = len(pages.lengths)
        out, seeds = self._room(len(pages.block_hashes), num_events)
        cursor = self._cursor
        cursor[:] = 0
        seeds[:] = seed.seed
        while True:
            event = kernels.translate_pages(
                self._pinned, out, pages, local, seeds, cursor, np.uint64(seed.seed), self._base, seed.is_stated,
                namespace.salt, namespace.number,
            )  # fmt: skip
            if event == num_events:
                break
            first, num_pages = int(cursor[kernels.LOCAL_IN]), int(pages.lengths[event])
            local[first : first + num_pages] = local_of(first, num_pages, int(seeds[event]))
        end = int(cursor[kernels.PAGE_OUT])
        columns = PageEvents(
            out.block_hashes[:end],
            out.sequence_hashes[:end],
            out.lengths[:num_events],
            out.parents[:num_events],
            out.has_parent[:num_events],
            pages.kinds,
        )
        is_clear = cursor[kernels.NUM_AMBIGUOUS] == 0
        ambiguous = [] if is_clear else _ambiguous(out.engine_hashes[:end], columns.block_hashes, out.flags[:end])
        return TranslatedPages(columns, ambiguous, int(cursor[kernels.NUM_UNKNOWN]), int(seeds[-1]))

    def look_up(
        self, block_hashes: U64Array, tier: int, seed: NamespaceSeed, namespace: HashNamespace
    ) -> TranslatedPages:
        """Find pages, stored on a tier, by engine hash alone. Those that are not remembered are left out."""
        found = np.empty((3, len(block_hashes)), np.uint64)
        num_known = kernels.look_up_pages(
            self._pinned, block_hashes, found, np.uint64(seed.seed), seed.is_stated, namespace.salt
        )
        engine_hashes, known_as, sequence_hashes = found[:, :num_known]
        flags = np.where(engine_hashes == known_as, kernels.UNIQUE, kernels.COLLIDING)
        columns = single_pages(known_as, sequence_hashes, tier)
        return TranslatedPages(columns, _ambiguous(engine_hashes, known_as, flags))

    def remember(
        self, block_hashes: U64Array, sequence_hashes: U64Array, tier: int, seed: int, namespace: HashNamespace
    ) -> TranslatedPages:
        """Remember pages, stored on a tier, whose sequence hashes the engine itself sent."""
        known_as, flags = np.empty(len(block_hashes), np.uint64), np.empty(len(block_hashes), np.uint8)
        kernels.remember_pages(
            self._pinned, block_hashes, sequence_hashes, known_as, flags, np.uint64(seed), namespace.salt,
            namespace.number,
        )  # fmt: skip
        columns = single_pages(known_as, sequence_hashes, tier)
        return TranslatedPages(columns, _ambiguous(block_hashes, known_as, flags))

    def block_hashes_in(self, namespace: HashNamespace) -> U64Array:
        """The ledger's hashes of all pages remembered in a namespace."""
        known = self.blocks.states() != 0
        here = np.flatnonzero(known & (self._arrays.namespaces[: len(known)] == namespace.number))
        hashes: U64Array = self._arrays.blocks.table.keys[here] ^ namespace.salt
        return hashes

    def clear(self) -> None:
        self.blocks.clear()
        self._arrays.clock[kernels.HAND], self._arrays.clock[kernels.HAS_COLLISIONS] = -1, 0

    def _room(self, num_pages: int, num_events: int) -> tuple[kernels.TranslatedColumns, U64Array]:
        if num_pages > len(self._translated.sequence_hashes) or num_events > len(self._translated.lengths):
            self._translated = _empty_columns(2 * num_pages, 2 * num_events)
            self._seeds = np.empty(2 * num_events, np.uint64)
        return self._translated, self._seeds[:num_events]


def single_pages(block_hashes: U64Array, sequence_hashes: U64Array, kinds: int | npt.NDArray[np.uint8]) -> PageEvents:
    """Return columns of pages whose position in a prompt is not known: one event for each. kinds: of all, or of each"""
    num_pages = len(block_hashes)
    no_parents, has_parent = np.zeros(num_pages, np.uint64), np.zeros(num_pages, np.uint8)
    lengths = np.ones(num_pages, np.int64)
    return PageEvents(
        block_hashes, sequence_hashes, lengths, no_parents, has_parent, np.full(num_pages, kinds, np.uint8)
    )


def _empty_columns(num_pages: int, num_events: int) -> kernels.TranslatedColumns:
    hashes = np.empty((3, num_pages), np.uint64)
    return kernels.TranslatedColumns(
        hashes[0],
        hashes[1],
        hashes[2],
        np.empty(num_pages, np.uint8),
        np.empty(num_events, np.int64),
        np.empty(num_events, np.uint64),
        np.empty(num_events, np.uint8),
    )


def _ambiguous(engine_hashes: U64Array, known_as: U64Array, flags: npt.NDArray[np.uint8]) -> list[AmbiguousPage]:
    pages = np.flatnonzero(flags)
    if len(pages) > _MAX_AMBIGUOUS:
        raise AmbiguityError(
            f"{len(pages)} adjacent pages whose hashes mean other pages, too, at most {_MAX_AMBIGUOUS}"
        )
    is_reassigned = (flags[pages] & kernels.REASSIGNED).astype(np.bool_)
    columns = pages.tolist(), engine_hashes[pages].tolist(), known_as[pages].tolist(), is_reassigned.tolist()
    return [AmbiguousPage(*page) for page in zip(*columns, strict=True)]
