"""The columns of views that kernels read and change, and the lateness of a stream's batches."""

from typing import Annotated, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import types

from kv_events.kernels.bundles import F64Vector, I64Matrix, U8Vector
from kv_events.kernels.declare import inline_helper
from kv_events.kernels.numbers import U8, uint8

F64Matrix: TypeAlias = Annotated[npt.NDArray[np.float64], types.float64[:, ::1]]

LIVE, SYNCING, STALE, EXPIRED = range(4)
"""Positions of the states in `views.STATES`."""

FAULT_NONE, FAULT_DEGRADED, FAULT_CLOSED = range(3)
"""What the newest batch shows beside its pages: nothing; that its stream is incomplete, as the publisher said, or that
newer batches are on the way; that no other batch follows."""

NUM_NUMBERS = 16
(
    EPOCH, LAST_SEQ, REFUSED_NOW, BATCHES, STORED, REMOVED, KNOWN, UNKNOWN, REFUSED,
    DUPLICATES, OLD_EPOCHS, GAPS, RESTARTS, MISMATCHES, RESYNCS, CLEARS,
) = range(NUM_NUMBERS)  # fmt: skip
"""Columns of `ViewColumns.numbers`. LAST_SEQ: number of the last batch. BATCHES to CLEARS are the fields of
`views.ViewCounters`, in their order."""

NUM_TIMES = 8
SECONDS, TRANSIT, MADE_AT, TICK, STEADY_SINCE, STEADY_SECONDS, SILENT_FROM, AGREED_AT = range(NUM_TIMES)
"""Columns of `ViewColumns.times`, in seconds. SECONDS: lateness of the newest batch. TRANSIT: from the making of a
punctual batch to its arrival, with the difference of the clocks. MADE_AT, TICK: the times of the newest batch.
STEADY_SINCE: arrival of the batch from which on the lateness is the same. STEADY_SECONDS: its lateness. SILENT_FROM,
AGREED_AT: those of a `View`."""

_DRIFT = 0.001  # of two clocks, seconds a second
_STEADY_S = 2.5
_STEADY_WITHIN_S = 0.3


class ViewColumns(NamedTuple):
    """The state of all views of a namespace, by the stream number of the index."""

    states: U8Vector
    """[streams] position in `ViewState` of the state from the batches alone: LIVE, SYNCING or STALE."""
    faults: U8Vector
    """[streams] one of FAULT_NONE, FAULT_DEGRADED, FAULT_CLOSED."""
    last_batch_at: F64Vector
    """[streams] `View.last_batch_at`."""
    last_batch_tick: F64Vector
    """[streams] `View.last_batch_tick`."""
    times: F64Matrix
    """[streams, NUM_TIMES]"""
    numbers: I64Matrix
    """[streams, NUM_NUMBERS]"""


@inline_helper
def shown_state(
    states: U8Vector, faults: U8Vector, last_batch_tick: F64Vector, stream: int, bounds: tuple[float, float, float]
) -> U8:
    """Return the state to show, as `Freshness.state` does. bounds: `Freshness.bounds`. The others: `ViewColumns`."""
    expired_before, syncing_before, late_before = bounds
    tick, fault, state = last_batch_tick[stream], faults[stream], states[stream]
    if fault == FAULT_CLOSED or tick < expired_before:
        return uint8(EXPIRED)
    if state != LIVE:
        return state
    if tick < syncing_before:
        return uint8(SYNCING)
    return uint8(STALE) if fault != FAULT_NONE or tick < late_before else uint8(LIVE)


def note_lateness(times: F64Vector, made_at: float, at: float, tick: float) -> None:
    """Record the arrival of a batch. Kernels and Python call this.

    times: [NUM_TIMES] of the stream, updated. made_at: by the publisher's clock. at: by ours, in seconds
    since 1970, too. tick: by our clock that never goes back.
    """
    if times[TICK] == -np.inf:
        times[TRANSIT] = tick - at
    else:
        times[TRANSIT] += _DRIFT * (tick - times[TICK])
    transit_s = tick - made_at
    is_punctual = made_at < times[MADE_AT] or transit_s < times[TRANSIT]
    if not is_punctual:
        late_s = transit_s - times[TRANSIT]
        if not abs(late_s - times[STEADY_SECONDS]) <= _STEADY_WITHIN_S:
            times[STEADY_SECONDS], times[STEADY_SINCE] = late_s, tick
        is_punctual = tick - times[STEADY_SINCE] >= _STEADY_S
    if is_punctual:
        times[TRANSIT] = transit_s
    times[SECONDS] = transit_s - times[TRANSIT]
    times[MADE_AT], times[TICK] = made_at, tick
