"""Selections over direct connections: a kernel chooses and answers as `routes` and `answers` do."""

from __future__ import annotations

import re
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
from selection.policies import next_turns
from selection.roster import Roster

_BYTES_PER_RANK = 64
"""Bound on the text of a rank, and on that of two of the other numbers."""
_GAP = 1000001
_GAPS = re.compile(rb'"%d":%d|%d' % (_GAP, _GAP, _GAP))
_OVERLAP = Overlap(longest_matched=_GAP, gpu=_GAP, dp={_GAP: _GAP}, cpu=_GAP, disk=_GAP, predicted=_GAP)
_BEGIN = b',"overlap":{'  # in a JSON string, the quotes would be escaped


class SelectionPlan(NamedTuple):
    """How requests are answered that ask the same about different prompts."""

    found: Plan
    scale: float  # see `least_work`
    table: SelectionTable
    answer_bytes: int

    def answer_requests(self, sockets: SocketBuffers, count: int, head_size: int, times: Times) -> int:
        """Call `select_requests`."""
        found, sizes = self.found, (count, head_size, self.answer_bytes)
        query = found.numbers, found.seeds, found.lookup, found.buffers, found.table, found.layout, times
        return select_requests(sockets, sizes, *query, self.table, self.scale, next_turns(count))


def selection_table(roster: Roster, book: Book, namespace: Namespace) -> tuple[SelectionTable, int]:
    """Return what answers say about a roster, pinned, and a bound on the size of one."""
    (model, tenant, block_size), beginnings, pieces = namespace.key, list[bytes](), list[bytes]()
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
        begin, found, end = msgspec.json.encode(answer).partition(_BEGIN)
        first, *pieces = _GAPS.split(end)
        beginnings.append(begin + found + first)
    most_bytes = len(b"".join(pieces)) + max(map(len, beginnings), default=0) + _BYTES_PER_RANK * (4 + len(beginnings))
    table = SelectionTable(
        book.pages,
        book.loads,  # others come with another roster
        roster.columns,
        texts(beginnings),
        texts(pieces),
        np.zeros(len(beginnings)),
        np.zeros(most_bytes, np.uint8),
    )
    return pin(table), most_bytes
