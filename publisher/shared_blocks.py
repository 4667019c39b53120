"""The table of blocks that the bridge owns and a ledger uses. Importing this module compiles its kernel."""

from __future__ import annotations

import numpy as np

from kv_events.kernels import page_table
from publisher.kernels.blocks import HELD, MOST_HELD, ON_MEDIA, RECENTLY_USED, REMEMBERED, make_blocks, states
from publisher.kernels.ledger import make_change_pages


class SharedBlocks:
    """Blocks that are held, and others that the owner remembers. Implements `BlockTable`.

    The owner inserts and removes entries. The ledger only marks which blocks are held on a medium. It treats the store
    of a block without an entry like one beyond its capacity.
    """

    change_pages = staticmethod(make_change_pages(is_shared=True))

    def __init__(self, capacity: int) -> None:
        """capacity: most entries."""
        self.arrays = make_blocks(capacity)

    def clear_residency(self) -> None:
        """Keep all entries. Marks those that were held as used, because the engine may still hold them.

        Takes a few ms per million entries.
        """
        used, tally = states(self.arrays), self.arrays.tally
        was_held = used & np.uint32(ON_MEDIA) != 0
        used &= np.uint32(REMEMBERED | RECENTLY_USED)
        used[was_held] |= np.uint32(RECENTLY_USED)
        tally[MOST_HELD] = max(tally[MOST_HELD], tally[HELD])
        tally[HELD] = 0

    def clear(self) -> None:
        """Drop all entries."""
        states(self.arrays)[:] = 0
        page_table.clear(self.arrays.table)
        self.arrays.tally[[HELD, MOST_HELD]] = 0
