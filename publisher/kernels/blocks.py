"""Blocks: pages by the engine's identifier (block hash XOR the salt of its namespace), with their media."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kv_events.kernels import page_table
from kv_events.kernels.arrays import zeros
from kv_events.kernels.bundles import I64Vector, U32Matrix
from kv_events.kernels.declare import inline_helper
from kv_events.kernels.numbers import uint32
from kv_events.kernels.page_table import Table
from kv_events.schema import NUM_MEDIA

# columns
PAGE, STATE = range(2)

# bits of a state, after bits m: held on medium m
ON_MEDIA = 2**NUM_MEDIA - 1
REMEMBERED = 1 << NUM_MEDIA
"""Set for each entry of a shared table, which remembers blocks that are no longer held."""
RECENTLY_USED = 2 << NUM_MEDIA
"""The entry was used since the last search for entries to drop."""
COPIED = 4 << NUM_MEDIA
"""The block was stored again while it was held: its row of `more_copies` is valid."""

# elements of tally
HELD, MOST_HELD, IS_SHARED = range(3)


class Blocks(NamedTuple):
    """The table and the columns of its entries."""

    table: Table
    columns: U32Matrix
    """[capacity + 1, 2] entry of the block's page, valid while the block is held; state, 0 for a free entry. The last
    row stays free."""
    more_copies: U32Matrix
    """[capacity + 1, 4] copies of the block on each medium beyond the first. Only written for blocks with copies, so
    that it costs no memory otherwise."""
    tally: I64Vector
    """[3] number of blocks held; the largest such number, as far as recorded; whether another object owns the table."""


@inline_helper
def is_held(blocks: Blocks, entry: int) -> bool:
    """Return whether a block is held on any medium."""
    return blocks.columns[entry, STATE] & uint32(ON_MEDIA) != 0


class BlockTable:
    """The blocks of a ledger. It holds those that the worker holds, and no others, unless its table is shared.

    The owner of a shared table inserts and removes entries, and remembers blocks that are no longer held. The ledger
    only marks which blocks are held on a medium. It treats the store of a block without an entry like one beyond its
    capacity.
    """

    def __init__(self, capacity: int, *, is_shared: bool = False) -> None:
        """capacity: most entries. Reserves address space, not memory. is_shared: whether another object owns it."""
        self.arrays = Blocks(
            page_table.make_table(capacity),
            zeros((capacity + 1, 2), np.uint32),
            zeros((capacity + 1, NUM_MEDIA), np.uint32),
            np.array([0, 0, is_shared], np.int64),
        )

    def states(self) -> npt.NDArray[np.uint32]:
        """Return a view of the states, uint32[entries ever used]."""
        used: npt.NDArray[np.uint32] = self.arrays.columns[: page_table.high_water(self.arrays.table), STATE]
        return used

    def clear_residency(self) -> None:
        """Record that no block is on any medium. Takes a few ms per million entries of a shared table.

        A shared table keeps all entries. Those that were held become used, because the engine may still hold them.
        """
        tally = self.arrays.tally
        if tally[IS_SHARED]:
            used = self.states()
            was_held = used & uint32(ON_MEDIA) != 0
            used &= uint32(REMEMBERED | RECENTLY_USED)
            used[was_held] |= uint32(RECENTLY_USED)
            tally[MOST_HELD] = max(tally[MOST_HELD], tally[HELD])
        else:
            page_table.clear(self.arrays.table)
        tally[HELD] = 0

    def clear(self) -> None:
        """Drop all entries."""
        self.states()[:] = 0
        page_table.clear(self.arrays.table)
        self.arrays.tally[[HELD, MOST_HELD]] = 0
