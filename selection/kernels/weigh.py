"""The kernel that makes the columns of candidates: what each rank holds of a prompt, and what is booked there."""

from typing import NamedTuple

import numpy as np

from indexer.kernels.views import FAULT_CLOSED
from kv_events.kernels.bundles import (
    BoolVector,
    F64Vector,
    I32Vector,
    I64Matrix,
    I64Vector,
    U8Vector,
    U32Matrix,
    U64Input,
)
from kv_events.kernels.declare import kernel
from kv_events.kernels.numbers import int32, int64
from kv_events.schema import NUM_MEDIA
from selection.kernels.booked import booked_lengths
from selection.kernels.reservations import BookColumns

HOST = 1
"""Column of the host in `RosterColumns.held`."""
HOST_CREDIT, DISK_CREDIT = 0.75, 0.25
"""Worth of a token on the host and on disks, where one on the device is worth 1: those of Dynamo 1.6.1."""


class RosterColumns(NamedTuple):
    """The ranks that may be chosen, and room for what is found about them. All have n rows."""

    streams: I32Vector
    """Number of the rank's view in its index."""
    places: I32Vector
    """Number of its place in the book, -1: none."""
    is_allowed: BoolVector
    """Whether the rank may be chosen for the request that is weighed."""
    faults: U8Vector
    """[streams] `ViewColumns.faults`."""
    last_batch_tick: F64Vector
    """[streams] `ViewColumns.last_batch_tick`."""
    other_requests: I64Vector
    """Requests of the rank's engine that are not booked here."""
    other_blocks: I64Vector
    """Their pages."""
    found: I32Vector
    """[streams] scratch: 1 for those that hold a part of the prompt, else 0."""
    lengths: I64Matrix
    """[n, 2] scratch: see `booked_lengths`."""
    rows: I32Vector
    """Output: rows of the roster."""
    held: I64Matrix
    """[n, 4] output, as those that follow: see `Candidates`."""
    predicted: I64Vector
    computed: F64Vector
    prefill_tokens: I64Vector
    decode_blocks: I64Vector
    requests: I64Vector


@kernel
def weigh(
    book: BookColumns,
    hashes: U64Input,
    streams: I32Vector,
    pages: U32Matrix,
    roster: RosterColumns,
    numbers: tuple[int, int, int],
    expired_before: float,
) -> int:
    """Write the columns of the candidates, and return how many there are: all allowed ranks but expired ones.

    hashes: uint64[pages of the prompt]. streams, pages: what `find` found. numbers: tokens of a page, pages of the
    prompt with the last, incomplete one, and its tokens. expired_before: see `Freshness`.
    """
    block_size, prompt_blocks, prompt_tokens = numbers
    booked_lengths(book.pages, hashes, roster.places, roster.lengths)
    for i in range(streams.shape[0]):
        roster.found[streams[i]] = int32(1)
    count = int64(0)
    for row in range(roster.streams.shape[0]):
        stream, place = int64(roster.streams[row]), int64(roster.places[row])
        if (
            not roster.is_allowed[row]
            or roster.faults[stream] == FAULT_CLOSED
            or roster.last_batch_tick[stream] < expired_before
        ):
            continue
        roster.rows[count] = int32(row)
        for tier in range(NUM_MEDIA):
            roster.held[count, tier] = int64(pages[stream, tier]) * block_size if roster.found[stream] else int64(0)
        roster.predicted[count] = max(roster.held[count, 0], roster.lengths[row, 1] * block_size)
        device, host = roster.predicted[count], max(roster.predicted[count], roster.held[count, HOST])
        saved = device + HOST_CREDIT * (host - device) + DISK_CREDIT * max(0, roster.held[count, NUM_MEDIA - 1] - host)
        roster.computed[count] = max(0.0, prompt_tokens - saved)
        roster.decode_blocks[count] = prompt_blocks - roster.lengths[row, 0] + roster.other_blocks[row]
        roster.prefill_tokens[count] = int64(0)
        roster.requests[count] = roster.other_requests[row]
        if place >= 0:
            roster.prefill_tokens[count] = book.loads.prefill_tokens[place]
            roster.decode_blocks[count] += int64(np.floor(book.loads.decode_blocks[place] + 0.5))
            roster.requests[count] += book.loads.requests[place]
        count += 1
    for i in range(streams.shape[0]):
        roster.found[streams[i]] = int32(0)
    return count
