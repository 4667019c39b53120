"""The table of blocks that a ledger owns. Importing this module compiles its kernel."""

from __future__ import annotations

from kv_events.kernels import page_table
from publisher.kernels.blocks import HELD, make_blocks
from publisher.kernels.ledger import make_change_pages


class OwnBlocks:
    """The blocks that are held, and no others. Implements `BlockTable`."""

    change_pages = staticmethod(make_change_pages(is_shared=False))

    def __init__(self, capacity: int) -> None:
        """capacity: most blocks that can be held."""
        self.arrays = make_blocks(capacity)

    def clear_residency(self) -> None:
        """Drop all entries at once."""
        page_table.clear(self.arrays.table)
        self.arrays.tally[HELD] = 0
