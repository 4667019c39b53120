"""What answers need to know about each view of a namespace, as arrays by stream number that kernels read."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

FAULT_NONE, FAULT_DOUBTED, FAULT_CLOSED = range(3)
"""What the newest batch shows beside its pages: nothing; that its stream is incomplete, as the publisher said, or that
newer batches are on the way; that no other batch follows."""

_FIRST_SIZE: Final = 64


class ViewColumns:
    """The columns. They double when a stream number does not fit; arrays that were read before are then outdated."""

    def __init__(self) -> None:
        self.states: npt.NDArray[np.uint8] = np.zeros(_FIRST_SIZE, np.uint8)
        """[n] position in `ViewState` of the state from the batches alone: LIVE, SYNCING or STALE."""
        self.faults: npt.NDArray[np.uint8] = np.zeros(_FIRST_SIZE, np.uint8)
        """[n] one of FAULT_NONE, FAULT_DOUBTED, FAULT_CLOSED."""
        self.heard_at: npt.NDArray[np.float64] = np.zeros(_FIRST_SIZE)
        """[n] `View.heard_at`."""
        self.heard_tick: npt.NDArray[np.float64] = np.zeros(_FIRST_SIZE)
        """[n] `View.heard_tick`."""

    def reserve(self, number: int) -> None:
        """Make room for a stream number."""
        while number >= len(self.states):
            self.states = np.concatenate((self.states, np.zeros_like(self.states)))
            self.faults = np.concatenate((self.faults, np.zeros_like(self.faults)))
            self.heard_at = np.concatenate((self.heard_at, np.zeros_like(self.heard_at)))
            self.heard_tick = np.concatenate((self.heard_tick, np.zeros_like(self.heard_tick)))
