"""Blocks: pages by the engine's identifier (block hash XOR the salt of its namespace), with their media.

A ledger either owns its table of blocks (`own_blocks`), or uses one that another object owns (`shared_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kv_events.kernels import page_table
from kv_events.kernels.arrays import zeros
from kv_events.kernels.bundles import I64Vector, U32Matrix
from kv_events.kernels.declare import array_helper
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
HELD, MOST_HELD = range(2)


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
    """[2] number of blocks held; the largest such number, as far as recorded."""


class BlockTable(Protocol):
    """What a ledger needs of a table of blocks: the arrays, and what depends on who owns them."""

    @property
    def arrays(self) -> Blocks:
        """The table and its columns."""
        ...

    @property
    def change_pages(self) -> Callable[..., None]:
        """The kernel for ledgers with such a table, see `ledger_kernels.make_change_pages`."""
        ...

    def clear_residency(self) -> None:
        """Record that no block is on any medium."""
        ...


def make_blocks(capacity: int) -> Blocks:
    """Create an empty table for at most `capacity` entries. Reserves address space, not memory."""
    return Blocks(
        page_table.make_table(capacity),
        zeros((capacity + 1, 2), np.uint32),
        zeros((capacity + 1, NUM_MEDIA), np.uint32),
        np.zeros(2, np.int64),
    )


def states(blocks: Blocks) -> npt.NDArray[np.uint32]:
    """Return a view of the states, uint32[entries ever used]."""
    used: npt.NDArray[np.uint32] = blocks.columns[: page_table.high_water(blocks.table), STATE]
    return used


@array_helper
def is_held(blocks, entry):
    """Return whether a block is held on any medium."""
    return blocks.columns[entry, STATE] & np.uint32(ON_MEDIA) != 0
