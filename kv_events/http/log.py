"""Answers about a log whose past is served: GET /span, GET /moment and GET /diff. Times are seconds since 1970."""

from typing import Annotated, TypeAlias

import msgspec

MarkKind: TypeAlias = Annotated[
    str, msgspec.Meta(extra_json_schema={"enum": ["gap", "digest", "degraded", "rejected", "restart", "resync"]})
]
"""`gap`: batches are missing. `digest`: a view turned out to be wrong. `rejected`: a record cannot be applied.
`degraded`: a publisher reports that it does not know all that its engine holds, or does not hear it.
`restart`: a publisher began anew. `resync`: a publisher has resent everything. Clients accept other words, too."""


class LogMarker(msgspec.Struct, frozen=True, kw_only=True):
    """Something in a log that is worth a look."""

    index: int
    """Of the record in the log. The views with it applied are those at the moment `index + 1`."""
    time: float
    kind: MarkKind
    stream: str
    """Key of the worker stream: tenant/model/worker/rank. Empty if it is not known."""
    worker: str
    text: str
    """One sentence."""


class LogOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The extent of a log, what is worth a look in it, and what of it cannot be used."""

    log: str
    """Name of the log."""
    first_index: int
    next_index: int
    """Index after the newest record."""
    first_time: float
    last_time: float
    """Earliest and latest time of a record."""
    at: str
    """The moment that is shown if a request names none. Empty: the end of the log."""
    marks: list[LogMarker]
    """In the order of the log. At most 2000 of each kind, the earliest ones."""
    num_marks: dict[str, int]
    """Kind of mark -> how many were found."""
    marks_until: int
    """Index up to which the log has been searched for marks so far."""
    marks_failure: str = ""
    """Why the search has ended early, if it has."""
    damage: list[str]
    """What of the log cannot be used. The rest is."""


class BatchOfMoment(msgspec.Struct, frozen=True, kw_only=True):
    """The newest batch of a moment."""

    index: int
    """Of its record in the log."""
    time: float
    stream: str
    worker: str
    epoch: int
    seq: int
    stored: dict[str, int]
    """Medium -> pages stored."""
    removed: dict[str, int]
    """Medium -> pages removed."""


class MomentOfLog(msgspec.Struct, frozen=True, kw_only=True):
    """A moment, by its place in the log."""

    at: str
    """How to ask for it: the value of `at`."""
    index: int
    """Index after the newest record of the moment."""
    time: float
    """Of the views."""
    records: int
    """Records of events applied."""
    batch: BatchOfMoment | None = None
    """None: no record of events is before the moment, or the newest one cannot be decoded."""


class MovedPage(msgspec.Struct, frozen=True):
    """A page that is on other media."""

    sequence_hash: int
    before: list[str]
    """Media, fastest first."""
    after: list[str]


class BatchInLog(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of a stream, and where it is in its log."""

    index: int
    """Of its record."""
    time: float
    epoch: int
    seq: int


class StreamDiff(msgspec.Struct, frozen=True):
    """How the pages of one worker stream differ. The examples are the pages with the lowest hashes."""

    model: str
    tenant: str
    worker: str
    dp_rank: int
    before: int
    """Pages held before, on any medium."""
    after: int
    gained: int
    """Pages that are held after and not before, on any medium."""
    lost: int
    moved: int
    """Pages that are held before and after, on different media."""
    gained_examples: list[int]
    """Sequence hashes."""
    lost_examples: list[int]
    moved_examples: list[MovedPage]
    first_before: BatchInLog | None = None
    """Of two logs that are compared: the first batch in which the stream differs. None: none, or this log has ended."""
    first_after: BatchInLog | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        return not (self.gained or self.lost or self.moved)
