"""Direct connections of routers: kernels choose, book and answer as `routes`, `answers` and `reservations` do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from api.fast.kernel_connections import MOST_AT_ONCE
from api.fast.kernels.connections import SocketBuffers
from api.fast.kernels.query import Times
from api.fast.kernels.recognise import MAX_NAME_BYTES
from api.fast.writer import Plan, texts
from api.selection.answers import worker_name
from api.selection.kernels.follow import StepTable, follow_requests
from api.selection.kernels.record import NUM_RECORDS, BookedChoices, RecordTexts, make_choices
from api.selection.kernels.select import MOST_EXPLAINED, MOST_HASHES, SelectionTable, select_requests
from indexer.namespaces import Namespace
from kv_events.http.selection import Overlap, Selection, WeighedCandidate
from kv_events.kernels.bundles import BoolVector, U8Vector, pin
from kv_events.limits import MAX_REQUEST_ID_BYTES
from kv_events.reservations import AT_PREFILL, RELEASED, STEPS, record_openings
from kv_events.streams import StreamId
from selection.book import Book
from selection.policies import LEAST_WORK, next_turns
from selection.roster import Roster
from selection.selector import MOST_SHOWN, Selector

_BYTES_PER_RANK = 64
"""Bound on the text of a rank, and on that of two of the other numbers. In a record: on what surrounds the rank."""
_BYTES_PER_RECORD = 128
"""Bound on the numbers of a record, and on what comes before texts."""
_GAP = 1000001
_GAPS = re.compile(rb'"%d":%d|%d' % (_GAP, _GAP, _GAP))
_OVERLAP = Overlap(longest_matched=_GAP, gpu=_GAP, dp={_GAP: _GAP}, cpu=_GAP, disk=_GAP, predicted=_GAP)
_BEGIN, _BEGIN_COST, _LAST = b',"overlap":{', b',"cost":', b"]}"  # in a JSON string, the quotes would be escaped
MOST_CHOICES, _HASH_BYTES = MOST_AT_ONCE, 21
"""Bound on the choices that are booked in one call of the kernel, and on the text of a hash."""
_STEP_ANSWER_BYTES = 2**10


_OPENINGS = b'","sequence_hashes":[', b'],"isl_tokens":', b',"track_prefill_tokens":true,'
_NO_RECORD = RecordTexts(texts(()), texts(()), np.zeros(0, np.int32))


class SelectionPlan(NamedTuple):
    """How requests are answered that ask the same about different prompts."""

    found: Plan
    scale: float  # see `least_work`
    table: SelectionTable
    choices: BookedChoices
    """Those of the table."""
    answer_bytes: int
    """See `direct_table`."""
    name: int
    """Number of the first reservation."""
    moments: tuple[float, float, float]
    """Now, until when the pages of a reservation count as held, and the time-to-live of reservations."""
    session: U8Vector
    """That of the requests, as msgpack, and `MARGIN` bytes."""
    is_allowed: BoolVector
    """Of the roster. All are True between calls."""
    allowed: BoolVector | None
    """Which ranks may be chosen. None: all."""
    note: Callable[[], None]
    """Called when choices have been booked."""

    def answer_requests(self, sockets: SocketBuffers, count: int, head_size: int, times: Times) -> int:
        """Call `select_requests`."""
        found, sizes = self.found, (count, head_size, self.answer_bytes)
        query = found.numbers, found.seeds, found.lookup, found.buffers, found.table, found.layout, times
        choice = self.scale, next_turns(count), self.name, *self.moments
        if self.allowed is not None:
            self.is_allowed[:] = self.allowed
        try:
            answered = select_requests(sockets, sizes, *query, self.table, choice, self.session)
        finally:
            if self.allowed is not None:
                self.is_allowed[:] = True
        if self.choices.made[NUM_RECORDS]:
            self.note()
        return answered


class StepPlan(NamedTuple):
    """How requests are answered that say the same of different reservations."""

    book: Book
    table: StepTable
    pinned: StepTable
    """See `direct_steps`."""
    step: str
    now: float
    """In seconds since 1970."""
    put: Callable[[Mapping[str, int], bytes], None]
    """Gets the records, see `WriteQueue.put_joined`."""

    @property
    def answer_bytes(self) -> int:
        """Room for all answers of a pass, with their heads: each step is noted before it is answered."""
        return MOST_AT_ONCE * _STEP_ANSWER_BYTES

    def answer_requests(self, sockets: SocketBuffers, count: int, head_size: int, _times: Times) -> int:
        """Call `follow_requests`."""
        step, times = STEPS.index(self.step), (self.now, self.book.ttl_s)
        answered = follow_requests(sockets, count, head_size, self.book.pinned, self.pinned, step, times)
        num_steps, num_prefills, num_bytes = self.table.made.tolist()
        if num_steps:
            kinds = Counter({self.step: num_steps})
            kinds[RELEASED] += num_prefills
            self.put(kinds, self.table.records[:num_bytes].tobytes())
        return answered


def direct_steps(replica: str, answer: bytes) -> tuple[StepTable, StepTable]:
    """Return the table of the steps that a replica notes, and the same pinned. answer: to each of the requests."""
    packed = msgspec.msgpack.encode
    _, opening = record_openings(replica)
    pieces = opening, *(packed(step) + packed(None) for step in STEPS), AT_PREFILL.encode()
    most_bytes = 2 * MOST_AT_ONCE * (len(opening) + MAX_REQUEST_ID_BYTES + _BYTES_PER_RECORD)
    rooms = np.zeros(3, np.int64), np.zeros(most_bytes, np.uint8), np.zeros(MAX_REQUEST_ID_BYTES, np.uint8)
    table = StepTable(texts(pieces), *rooms, np.frombuffer(bytearray(answer), np.uint8))
    return table, pin(table)


def direct_table(
    roster: Roster, book: Book, namespace: Namespace, selector: Selector | None, *, is_explained: bool
) -> tuple[SelectionTable, BookedChoices, int]:
    """Return what answers say about a roster, pinned; the choices in it; and a bound on the size of an answer.

    selector: names reservations. None: nothing is booked.
    """
    (model, tenant, block_size), beginnings, pieces = namespace.key, list[bytes](), list[bytes]()
    openings, opening, choices, record = list[bytes](), b"{", make_choices(0, 0, 0), _NO_RECORD
    if selector is not None:
        *openings, opening = b'{"selection_id":"', *_OPENINGS
        record = _record_texts(roster, namespace, selector)
        choices = make_choices(MOST_CHOICES, _num_bytes(record), MAX_REQUEST_ID_BYTES)
    for rank, endpoint in zip(roster.ranks, roster.endpoints, strict=True):
        answer = Selection(
            model_name=model,
            routing_group=tenant,
            worker_id=worker_name(rank.worker),
            dp_rank=rank.dp_rank,
            endpoint=endpoint,
            block_size=block_size,
            overlap=_OVERLAP,
            effective_prefill_tokens=_GAP,
            potential_decode_blocks=_GAP,
            reason=LEAST_WORK if is_explained else UNSET,
            candidates=[] if is_explained else UNSET,
        )
        begin, found, end = msgspec.json.encode(answer).replace(b"{", opening, 1).partition(_BEGIN)
        first, *pieces = _GAPS.split(end)
        beginnings.append(begin + found + first)
    explained = [_candidate_pieces(rank) for rank in roster.ranks] if is_explained else []
    if explained:
        pieces = [*pieces[:-1], pieces[-1].removesuffix(_LAST), *explained[0][1:], _LAST]
    most_bytes = len(b"".join(openings + pieces)) + max(map(len, beginnings), default=0)
    most_bytes += (
        _BYTES_PER_RANK * (4 + len(beginnings)) + MAX_NAME_BYTES + (_HASH_BYTES * MOST_HASHES if openings else 0)
    )
    most_bytes += MOST_EXPLAINED * max((len(b"".join(each)) + 2 * _BYTES_PER_RANK for each in explained), default=0)
    table = SelectionTable(
        book.columns,
        roster.columns,
        choices,
        record,
        texts(openings),
        texts(beginnings),
        texts(pieces),
        texts([begin for begin, *_ in explained]),
        np.zeros(len(beginnings)),
        np.zeros(most_bytes, np.uint8),
    )
    return pin(table), choices, most_bytes


def _candidate_pieces(rank: StreamId) -> list[bytes]:
    """Return what comes before each number of a candidate, from the cost on, and the end."""
    candidate = WeighedCandidate(
        worker_id=worker_name(rank.worker),
        dp_rank=rank.dp_rank,
        cost=_GAP,
        tokens=_GAP,
        prefill_tokens=_GAP,
        requests=_GAP,
    )
    begin, found, end = msgspec.json.encode(candidate).partition(_BEGIN_COST)
    first, *pieces = _GAPS.split(end)
    return [begin + found + first, *pieces]


@lru_cache(256)
def session_text(session: str) -> U8Vector:
    """Return a session as records contain it, see `SelectionPlan`."""
    return texts((msgspec.msgpack.encode(session),)).data


def _record_texts(roster: Roster, namespace: Namespace, selector: Selector) -> RecordTexts:
    packed = msgspec.msgpack.encode
    scope = b"".join(map(packed, namespace.key))
    ranks = [packed(rank.worker) + packed(rank.dp_rank) for rank in roster.ranks]
    pieces = record_openings(selector.replica)[0], selector.names.encode(), scope
    return RecordTexts(texts(pieces), texts(ranks), np.zeros(min(len(ranks), MOST_SHOWN), np.int32))


def _num_bytes(record: RecordTexts) -> int:
    """Return a bound on the size of the records of one call."""
    longest = int(np.diff(record.ranks.ends).max(initial=0))
    most = len(record.pieces.data) + MAX_REQUEST_ID_BYTES + _BYTES_PER_RECORD
    return MOST_CHOICES * (most + (1 + MOST_SHOWN) * (longest + _BYTES_PER_RANK)) + 8 * MOST_HASHES
