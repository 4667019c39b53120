"""Blocks: pages by the engine's name, block hash XOR the salt of its namespace, and where they lie.

A ledger has a table of them. One that is fed by somebody who names pages, and remembers the names beyond the pages'
lives, shares his table: then he enters and gives up the entries, and the ledger says which of them lie somewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from kv_events import page_table
from kv_events.bundles import I64Vector, U32Matrix
from kv_events.kernels import array_helper
from kv_events.page_table import TABLE_ARRAYS, Table
from kv_events.schema import NUM_MEDIA

# columns
PAGE, STATE = range(2)

# bits of a state, behind bit m: it lies on medium m
ON_MEDIA = 2**NUM_MEDIA - 1
REMEMBERED = 1 << NUM_MEDIA
"""The entry stays when the block lies nowhere any more."""
ASKED_FOR = 2 << NUM_MEDIA
"""Its name was used since somebody last looked for names to give up."""

# elements of tally
HELD, MOST_HELD, IS_SHARED = range(3)


class Blocks(NamedTuple):
    """The table, and what belongs to its entries."""

    table: Table
    columns: U32Matrix
    """[capacity + 1, 2] entry of the page that the block carries, meant while it lies somewhere; state, 0: a free
    entry. The last row stays free."""
    tally: I64Vector
    """[3] blocks that lie somewhere; the most there were, as far as was noted; 1: entries are made and given up by
    another than the ledger."""


BLOCK_ARRAYS = (*TABLE_ARRAYS, types.uint32[:, ::1], types.int64[::1])
"""numba types of the arrays, in the order of `flat_blocks`."""


def make_blocks(capacity: int, *, is_shared: bool = False) -> Blocks:
    """An empty one for at most `capacity` entries. Reserves address space, not memory."""
    tally = np.zeros(3, np.int64)
    tally[IS_SHARED] = is_shared
    return Blocks(page_table.make_table(capacity), np.zeros((capacity + 1, 2), np.uint32), tally)


def flat_blocks(blocks: Blocks) -> tuple[npt.NDArray[np.generic], ...]:
    """The arrays in a row, as kernels take them."""
    return (*blocks.table, blocks.columns, blocks.tally)


def states(blocks: Blocks) -> npt.NDArray[np.uint32]:
    """uint32[entries ever handed out], a view."""
    used: npt.NDArray[np.uint32] = blocks.columns[: page_table.high_water(blocks.table), STATE]
    return used


def put_down(blocks: Blocks) -> None:
    """No block lies anywhere any more. A shared table keeps its entries, and those that lay somewhere as asked for:
    maybe it was not the engine that gave them up. That takes some ms a million; else all go at once.
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
    """Give up all entries."""
    states(blocks)[:] = 0
    page_table.clear(blocks.table)
    blocks.tally[[HELD, MOST_HELD]] = 0


@array_helper
def is_held(blocks, entry):
    """Whether a block lies somewhere."""
    return blocks.columns[entry, STATE] & np.uint32(ON_MEDIA) != 0
