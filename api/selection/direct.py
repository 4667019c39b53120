"""Selections over direct connections: a kernel chooses and answers as `routes` and `answers` do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from api.fast.kernels.connections import SocketBuffers
from api.fast.kernels.query import Times
from api.fast.writer import Plan, texts
from api.selection.answers import worker_name
from api.selection.kernels.select import SelectionTable, select_requests
from indexer.namespaces import Namespace
from kv_events.http.selection import Overlap, Selection
from kv_events.kernels.bundles import pin
from selection.book import Book
from selection.kernels.booked import Bookings, make_bookings
from selection.policies import next_turns
from selection.roster import Roster
from selection.selector import MOST_SHOWN

_BYTES_PER_RANK = 64
"""Bound on the text of a rank, and on that of two of the other numbers."""
_GAP = 1000001
_GAPS = re.compile(rb'"%d":%d|%d' % (_GAP, _GAP, _GAP))
_OVERLAP = Overlap(longest_matched=_GAP, gpu=_GAP, dp={_GAP: _GAP}, cpu=_GAP, disk=_GAP, predicted=_GAP)
_BEGIN = b',"overlap":{'  # in a JSON string, the quotes would be escaped
MOST_CHOICES, MOST_HASHES, _HASH_BYTES = 32, 2**13, 21
"""Bounds on what is booked in one call of the kernel. A longer prompt is booked in Python."""


_OPENINGS = b'","sequence_hashes":[', b'],"isl_tokens":', b',"track_prefill_tokens":true,'


class DirectTable(NamedTuple):
    """What answers say about a roster."""

    pinned: SelectionTable
    bookings: Bookings
    """Those of the table."""
    answer_bytes: int
    """Bound on the size of an answer."""


class SelectionPlan(NamedTuple):
    """How requests are answered that ask the same about different prompts."""

    found: Plan
    scale: float  # see `least_work`
    table: DirectTable
    name: int
    """Number of the first reservation."""
    until: float
    """Until when its pages count as held."""
    note: Callable[[], None]
    """Called when choices have been booked."""

    def answer_requests(self, sockets: SocketBuffers, count: int, head_size: int, times: Times) -> int:
        """Call `select_requests`."""
        found, sizes = self.found, (count, head_size, self.answer_bytes)
        query = found.numbers, found.seeds, found.lookup, found.buffers, found.table, found.layout, times
        choice = self.scale, next_turns(count), self.name, self.until
        answered = select_requests(sockets, sizes, *query, self.table.pinned, choice)
        if self.table.bookings.made[0]:
            self.note()
        return answered

    @property
    def answer_bytes(self) -> int:
        """See `DirectTable`."""
        return self.table.answer_bytes


def direct_table(roster: Roster, book: Book, namespace: Namespace, names: str | None) -> DirectTable:
    """Return what answers say about a roster. names: beginning of those of reservations. None: nothing is booked."""
    (model, tenant, block_size), beginnings, pieces = namespace.key, list[bytes](), list[bytes]()
    openings, opening, is_booking = list[bytes](), b"{", names is not None
    if names is not None:
        *openings, opening = b'{"selection_id":' + msgspec.json.encode(names).removesuffix(b'"'), *_OPENINGS
    bookings = make_bookings(is_booking * MOST_CHOICES, is_booking * MOST_HASHES, min(len(roster.workers), MOST_SHOWN))
    for worker, dp_rank, endpoint in zip(roster.workers, roster.dp_ranks, roster.endpoints, strict=True):
        answer = Selection(
            model_name=model,
            routing_group=tenant,
            worker_id=worker_name(worker),
            dp_rank=dp_rank,
            endpoint=endpoint,
            block_size=block_size,
            overlap=_OVERLAP,
            effective_prefill_tokens=_GAP,
            potential_decode_blocks=_GAP,
        )
        begin, found, end = msgspec.json.encode(answer).replace(b"{", opening, 1).partition(_BEGIN)
        first, *pieces = _GAPS.split(end)
        beginnings.append(begin + found + first)
    most_bytes = len(b"".join(openings + pieces)) + max(map(len, beginnings), default=0)
    most_bytes += _BYTES_PER_RANK * (4 + len(beginnings)) + _HASH_BYTES * len(bookings.hashes)
    table = SelectionTable(
        book.pages,
        book.loads,  # others come with another roster
        roster.columns,
        bookings,
        texts(openings),
        texts(beginnings),
        texts(pieces),
        np.zeros(len(beginnings)),
        np.zeros(most_bytes, np.uint8),
    )
    return DirectTable(pin(table), bookings, most_bytes)
