"""Blocks: pages by the engine's identifier (block hash XOR the salt of its namespace), with their media.

A ledger has a table of blocks. The bridge, which remembers hashes longer than pages are held, may supply the table; it
then owns insertion and removal of entries, and the ledger only marks which blocks are held on a medium.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kv_events import page_table
from kv_events.bundles import I64Vector, U32Matrix
from kv_events.kernels import array_helper
from kv_events.page_table import Table
from kv_events.schema import NUM_MEDIA

# columns
PAGE, STATE = range(2)

# bits of a state, after bits m: held on medium m
ON_MEDIA = 2**NUM_MEDIA - 1
REMEMBERED = 1 << NUM_MEDIA
"""The entry stays when the block is no longer held."""
ASKED_FOR = 2 << NUM_MEDIA
"""The entry was used since the last search for entries to drop."""

# elements of tally
HELD, MOST_HELD, IS_SHARED = range(3)


class Blocks(NamedTuple):
    """The table and the columns of its entries."""

    table: Table
    columns: U32Matrix
    """[capacity + 1, 2] entry of the block's page, valid while the block is held; state, 0 for a free entry. The last
    row stays free."""
    tally: I64Vector
    """[3] number of blocks held; the largest such number, as far as recorded; 1 if the table is shared, so that the
    ledger does not insert and remove its entries."""


def make_blocks(capacity: int, *, is_shared: bool = False) -> Blocks:
    """Create an empty table for at most `capacity` entries. Reserves address space, not memory."""
    tally = np.zeros(3, np.int64)
    tally[IS_SHARED] = is_shared
    return Blocks(page_table.make_table(capacity), np.zeros((capacity + 1, 2), np.uint32), tally)


def states(blocks: Blocks) -> npt.NDArray[np.uint32]:
    """Return a view of the states, uint32[entries ever used]."""
    used: npt.NDArray[np.uint32] = blocks.columns[: page_table.high_water(blocks.table), STATE]
    return used


def put_down(blocks: Blocks) -> None:
    """Clear all residency.

    A shared table keeps its entries and marks those that were held as used, because the engine may still hold them.
    This takes a few ms for each million entries; otherwise all entries are dropped at once.
    """
    if blocks.tally[IS_SHARED]:
        used = states(blocks)
        lay = used & np.uint32(ON_MEDIA) != 0
        used &= np.uint32(REMEMBERED | ASKED_FOR)
        used[lay] |= np.uint32(ASKED_FOR)
    else:
        page_table.clear(blocks.table)
    blocks.tally[MOST_HELD] = max(blocks.tally[MOST_HELD], blocks.tally[HELD])
    blocks.tally[HELD] = 0


def forget_all(blocks: Blocks) -> None:
    """Drop all entries."""
    states(blocks)[:] = 0
    page_table.clear(blocks.table)
    blocks.tally[[HELD, MOST_HELD]] = 0


@array_helper
def is_held(blocks, entry):
    """Return whether a block is held on any medium."""
    return blocks.columns[entry, STATE] & np.uint32(ON_MEDIA) != 0
