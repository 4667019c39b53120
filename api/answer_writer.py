"""Answers to usual questions, written by a kernel. They equal the encoded structs byte for byte."""

from __future__ import annotations

from typing import NamedTuple
from weakref import finalize

import msgspec
import numpy as np
import numpy.typing as npt

from api.answer_kernels import BYTES_PER_RANK, BYTES_PER_WORKER, Roster, write_answer
from api.answer_layouts import PEER, RFC, texts
from api.questions import Numbers, Question
from indexer.freshness import Freshness
from indexer.index import Matches
from indexer.namespaces import Namespace
from indexer.reuse import reusable_pages
from kv_events.bundles import Resident, resident
from kv_events.schema import NUM_MEDIA

_PEER_BEGIN = b'{"scores":{'
_FRAME_BYTES = 256
_NO_REUSE = np.zeros(0, np.int64)
_NO_WEIGHTS = np.zeros(0)


class AnswerWriter:
    """Writes into one buffer, so one thread calls it."""

    def __init__(self) -> None:
        self._peer, self._rfc = resident(PEER), resident(RFC)
        self._rosters: dict[int, _KeptRoster] = {}  # by the id of a namespace, while it exists
        self._out, self._begin = np.empty(0, np.uint8), b""
        self._streams, self._pages = np.empty(0, np.int32), np.empty((0, NUM_MEDIA), np.uint32)

    def write(
        self, question: Question, numbers: Numbers, namespace: Namespace, freshness: Freshness, now: float
    ) -> bytes | None:
        """Return the answer about all workers as JSON, or None if one of its numbers needs the general encoder.

        numbers: those of the prompt. now: seconds since 1970.
        """
        block_size, index = namespace.key.block_size, namespace.index
        hashes = question.hashes(numbers, block_size)
        if len(self._streams) < index.most_streams:
            self._streams = np.empty(index.most_streams, np.int32)
            self._pages = np.empty((index.most_streams, NUM_MEDIA), np.uint32)
        found = index.find_into(hashes, self._streams, self._pages)
        reusable = _NO_REUSE
        if namespace.groups:
            matches = Matches(self._streams[:found], self._pages[: index.most_streams])
            reusable = reusable_pages(namespace, hashes, matches, freshness)
        kept = self._rosters.get(id(namespace))
        if kept is None or kept.num_changes != namespace.num_changes:
            if kept is None:
                finalize(namespace, self._rosters.pop, id(namespace))
            kept = self._rosters[id(namespace)] = _KeptRoster.of(namespace)
        begin = _PEER_BEGIN if question.is_peer else b"{%s:{" % msgspec.json.encode(question.tenant)
        out = self._begun(begin, kept.most_bytes)
        length = write_answer(
            kept.roster,
            self._peer if question.is_peer else self._rfc,
            (now, freshness.expired_before(), freshness.syncing_before(), freshness.late_before()),
            found,
            self._streams,
            self._pages,
            reusable,
            block_size,
            _NO_WEIGHTS if question.weights is None else np.array(question.weights, np.float64),
            len(begin),
            out,
        )
        return None if length < 0 else out[:length].tobytes()

    def _begun(self, begin: bytes, most_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the buffer with the beginning of an answer, and room for `most_bytes` more."""
        if len(self._out) < len(begin) + most_bytes:
            self._out, self._begin = np.empty(2 * (len(begin) + most_bytes), np.uint8), b""
        if begin != self._begin:
            self._out[: len(begin)] = np.frombuffer(begin, np.uint8)
            self._begin = begin
        return self._out


class _KeptRoster(NamedTuple):
    """The roster of a namespace until its views are others."""

    roster: Resident
    num_changes: int
    """`Namespace.num_changes`."""
    most_bytes: int
    """Bound on the text about all workers."""

    @classmethod
    def of(cls, namespace: Namespace) -> _KeptRoster:
        columns, size = namespace.columns, len(namespace.columns.states)
        workers, ranks, following = (np.full(size, -1, np.int32) for _ in range(3))
        numbers: dict[str, int] = {}
        last: dict[str, int] = {}
        for stream, view in sorted(namespace.views.items()):
            worker = view.stream.worker
            workers[stream] = numbers.setdefault(worker, len(numbers))
            ranks[stream] = view.stream.dp_rank
            if worker in last:
                following[last[worker]] = stream
            last[worker] = stream
        names = texts(map(msgspec.json.encode, numbers))
        roster = Roster(
            states=columns.states,
            faults=columns.faults,
            heard_at=columns.heard_at,
            heard_tick=columns.heard_tick,
            workers=workers,
            ranks=ranks,
            following=following,
            names=names,
            shown=np.zeros(size, np.uint8),
            found_in=np.zeros(size, np.int64),
            written_in=np.zeros(len(numbers), np.int64),
            query=np.zeros(1, np.int64),
        )
        text_bytes = BYTES_PER_WORKER * len(numbers) + BYTES_PER_RANK * len(namespace.views)
        return cls(resident(roster), namespace.num_changes, 2 * len(names.data) + text_bytes + _FRAME_BYTES)
