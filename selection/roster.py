"""The ranks of a namespace that may be chosen, and the candidates for a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from weakref import finalize

import numpy as np
import numpy.typing as npt

from indexer.freshness import Freshness
from indexer.namespaces import Namespace
from indexer.views import View
from kv_events.hashing import U64Array
from kv_events.http.workers import WorkerRecord
from kv_events.kernels.bundles import pin
from kv_events.schema import NUM_MEDIA
from kv_events.streams import StreamId
from selection.book import Book
from selection.candidates import Candidates, selected
from selection.kernels.weigh import RosterColumns, weigh

_REFRESH_S = 0.1
_NEW_S = 1.5  # an older report may count requests that have ended since


class Found(NamedTuple):
    """A prompt, and which ranks hold how much of it."""

    hashes: U64Array
    """[n] sequence hashes of its complete pages."""
    tokens: int
    """Of the prompt."""
    streams: npt.NDArray[np.int32]
    """Numbers of the ranks' views."""
    pages: npt.NDArray[np.uint32]
    """[streams, 4] leading pages by tier, see `indexer.kernels.find`. Rows of other streams have no meaning."""
    degraded: str = ""
    """Why the prompt is not known, so that only the load counts. Empty: it is."""


class Report(NamedTuple):
    """What an engine says about a rank."""

    at: float
    """When it was read, in seconds since 1970."""
    requests: int
    """Running and waiting."""
    used_pages: int | None
    """None: it is not known."""


class Directory(Protocol):
    """What is known about workers."""

    @property
    def generation(self) -> int:
        """A number that changes whenever an answer of `get` does."""

    def get(self, worker: str, model: str, tenant: str) -> WorkerRecord | None:
        """Return what is known about a worker besides its cache, or None if nothing is."""

    def report(self, rank: StreamId) -> Report | None:
        """Return the newest report of a rank, or None if it is older than a few seconds."""


class Weighed(NamedTuple):
    """The candidates for a prompt. Their columns are valid until the next prompt."""

    roster: Roster
    rows: Sequence[int]
    """[n] rows of the roster."""
    candidates: Candidates

    def among(self, chosen: list[int]) -> Weighed:
        """Return some of them."""
        return Weighed(self.roster, [self.rows[row] for row in chosen], selected(self.candidates, chosen))


@dataclass(slots=True, weakref_slot=True, eq=False)
class Roster:
    """The ranks that may be chosen, in the order of their views' numbers."""

    state: tuple[int, int, int]
    """`Namespace.num_changes`, `Directory.generation` and `Book.num_changes` when this was made."""
    ranks: list[StreamId]
    endpoints: list[str | None]
    rows: dict[str, list[int]]
    """Worker -> its rows."""
    columns: RosterColumns
    pinned: RosterColumns
    candidates: Candidates
    """All ranks, in the memory of `columns`."""
    is_numbered: bool
    """Whether all ranks have a number in the book."""
    reports: list[Report | None]
    refreshed_at: float = -np.inf
    kept: dict[object, Any] = field(default_factory=dict)
    """What others keep of it as long as it exists."""

    def take_reports(self, before: Roster) -> None:
        """Keep what was found from the newest reports. before: the roster until now."""
        rows = {rank: row for row, rank in enumerate(before.ranks)}
        for row, rank in enumerate(self.ranks):
            if (old := rows.get(rank)) is not None:
                self.reports[row] = before.reports[old]
                self.columns.other_requests[row] = before.columns.other_requests[old]
                self.columns.other_blocks[row] = before.columns.other_blocks[old]


class Rosters:
    """Keeps the roster of each namespace until it changes. One thread calls it."""

    def __init__(self, book: Book, directory: Directory | None = None) -> None:
        """directory: None: nothing is known of workers besides their caches, and all of them get requests."""
        self._book = book
        self._directory = directory
        self._kept: dict[int, Roster] = {}  # by the id of a namespace, while it exists

    def of(self, namespace: Namespace, now: float) -> Roster:
        """Return the roster of a namespace. now: seconds since 1970."""
        generation = 0 if self._directory is None else self._directory.generation
        state = namespace.num_changes, generation, self._book.num_changes
        kept = self._kept.get(id(namespace))
        if kept is None:
            finalize(namespace, self._kept.pop, id(namespace), None)
        if kept is None or kept.state != state:
            kept, before = self._made(namespace, state), kept
            self._kept[id(namespace)] = kept
            if before is not None:
                kept.take_reports(before)
        if not 0 <= now - kept.refreshed_at < _REFRESH_S:
            self._refresh(kept, namespace, now)
        return kept

    def candidates(self, namespace: Namespace, freshness: Freshness, found: Found, now: float) -> Weighed:
        """Return the candidates for a prompt: all ranks of the roster that have not expired."""
        roster, block_size = self.of(namespace, now), namespace.key.block_size
        numbers = block_size, -(-found.tokens // block_size), found.tokens
        self._book.expire(now)
        count = weigh(
            self._book.pinned,
            found.hashes,
            found.streams,
            found.pages,
            roster.pinned,
            numbers,
            freshness.expired_before(),
        )
        everyone = roster.candidates
        if count == len(roster.ranks):
            return Weighed(roster, range(count), everyone)
        rows = roster.columns.rows[:count].tolist()
        candidates = selected(everyone, list(range(count)))
        return Weighed(
            roster,
            rows,
            candidates._replace(
                workers=[everyone.workers[row] for row in rows],
                dp_ranks=[everyone.dp_ranks[row] for row in rows],
                pages=everyone.pages[rows],
                roles=[everyone.roles[row] for row in rows],
            ),
        )

    def _made(self, namespace: Namespace, state: tuple[int, int, int]) -> Roster:
        model, tenant, block_size = namespace.key
        known: list[tuple[View, WorkerRecord | None]] = []
        rows: dict[str, list[int]] = {}
        for _, view in sorted(namespace.views.items()):
            worker = view.stream.worker
            info = None if self._directory is None else self._directory.get(worker, model, tenant)
            if info is None or info.is_schedulable:
                rows.setdefault(worker, []).append(len(known))
                known.append((view, info))
        ranks, size = [view.stream for view, _ in known], len(known)
        columns = RosterColumns(
            np.array([view.number for view, _ in known], np.int32),
            np.array([self._book.place(rank) for rank in ranks], np.int32),
            np.ones(size, np.bool_),
            namespace.columns.faults,
            namespace.columns.last_batch_tick,
            np.zeros(size, np.int64),
            np.zeros(size, np.int64),
            np.zeros(namespace.index.most_streams, np.int32),
            np.zeros((size, 2), np.int64),
            np.zeros(size, np.int32),
            np.zeros((size, NUM_MEDIA), np.int64),
            np.zeros(size, np.int64),
            np.zeros(size),
            *(np.zeros(size, np.int64) for _ in range(3)),
        )
        candidates = Candidates(
            [rank.worker for rank in ranks],
            [rank.dp_rank for rank in ranks],
            columns.held,
            columns.predicted,
            columns.computed,
            columns.prefill_tokens,
            columns.decode_blocks,
            columns.requests,
            np.zeros(size, np.int64),
            ["" if info is None else info.role for _, info in known],
            block_size,
        )
        return Roster(
            state=state,
            ranks=ranks,
            endpoints=[None if info is None else info.endpoint for _, info in known],
            rows=rows,
            columns=columns,
            pinned=pin(columns),
            candidates=candidates,
            is_numbered=bool((columns.places >= 0).all()),
            reports=[None] * size,
        )

    def _refresh(self, roster: Roster, namespace: Namespace, now: float) -> None:
        """Read what changes without a change of the roster, and need not be exact."""
        roster.refreshed_at = now
        streams = roster.columns.streams.tolist()
        roster.candidates.pages[:] = [namespace.views[stream].num_pages[0] for stream in streams]
        if self._directory is None:
            return
        loads = self._book.columns.loads
        for row, rank in enumerate(roster.ranks):
            report = self._directory.report(rank)
            if report is not roster.reports[row]:
                number = int(roster.columns.places[row])
                requests, blocks = (loads.requests[number], loads.decode_blocks[number]) if number >= 0 else (0, 0.0)
                said = report if report is not None and now - report.at < _NEW_S else Report(now, 0, 0)
                roster.columns.other_requests[row] = max(0, said.requests - int(requests))
                roster.columns.other_blocks[row] = max(0, (said.used_pages or 0) - round(float(blocks)))
                roster.reports[row] = report
