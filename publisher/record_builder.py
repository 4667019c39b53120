"""What goes out next: snapshots, batches, heartbeats; numbered, with their digests. No clock, no I/O, no task."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from kv_events.codec import encode_batch, encode_event
from kv_events.digest import Digest, digest_bytes, empty_digest
from kv_events.schema import ResyncRequest, SnapshotBegin, SnapshotEnd
from publisher.change_kernels import advance_digest
from publisher.change_queue import PageChanges
from publisher.change_tracker import ChangeTracker
from publisher.packing import BatchLimits, pack
from publisher.resync import resync_changes
from publisher.settings import PublisherSettings
from publisher.sinks.base import OutRecord

_FIRST_REASON = "start"


@dataclass(slots=True)
class _Snapshot:
    """One that is being sent."""

    changes: PageChanges
    digest: Digest
    reason: str
    position: int = 0

    @property
    def num_left(self) -> int:
        return len(self.changes.kinds) - self.position


class _Wanted(NamedTuple):
    """A snapshot that has still to begin."""

    reason: str
    delay_s: float
    """From when it is first seen."""


class RecordBuilder:
    """Turns what the tracker holds into records. One caller at a time: the drain, or a simulation.

    Every epoch begins with a snapshot, usually an empty one. A snapshot states what the ledger held at one moment;
    changes from that moment on follow behind it, so a queue that overflows meanwhile leads to another snapshot, not
    to an endless one. Times are seconds since 1970, given by the caller. What is due is reckoned by the time that
    went by between two calls, and a clock that was set back counts as none.
    """

    def __init__(self, settings: PublisherSettings, tracker: ChangeTracker, epoch: int) -> None:
        self.epoch = epoch
        self.seq = 0
        """Number of the next record."""
        self.num_snapshots = 0
        self.is_snapshot_begun = False
        """Whether the last of them is not told to its end: changes from before it wait in no queue any more."""
        self.degraded_reason = ""
        """What every record says against itself. Any thread may set it; a change makes a record due."""
        self._settings = settings
        self._stream = settings.stream
        self._key = settings.stream.key.encode()
        self._limits = BatchLimits(settings.batch_pages, settings.batch_bytes)
        self._tracker = tracker
        self._digest = empty_digest()  # after the last record
        self._sent_degraded_reason = ""  # by the last record
        self._snapshot: _Snapshot | None = None
        self._wanted: _Wanted | None = _Wanted(_FIRST_REASON, 0)
        # by `_clock`, which never goes back
        self._clock = 0.0
        self._last_now = float("inf")  # the caller's time at that moment
        self._resync_at: float | None = None  # begin no wanted snapshot before; None: not known yet
        self._last_snapshot_at = -float("inf")
        self._last_record_at = -float("inf")
        self._waiting_since: float | None = None  # first seen with changes that wait for company
        if settings.with_tokens:  # a snapshot has none: what comes before the first record must not end up in it
            self.begin_snapshot()

    def take_records(self, now: float, *, force: bool = False, max_records: int | None = None) -> list[OutRecord]:
        """Records that are due, in order; with `force`, of everything there is. Calling again says that the records
        of the call before were delivered, or given up: their room in the queue is free then.
        """
        self._tracker.confirm()
        records: list[OutRecord] = []
        while max_records is None or len(records) < max_records:
            record = self._next_record(now, force)
            if record is None:
                break
            records.append(record)
        return records

    def is_snapshot_due(self, now: float, *, force: bool = False) -> bool:
        """Whether the next record is the first of a snapshot that has still to be made."""
        self._advance(now)
        if self._snapshot is not None:
            return False
        if self._tracker.is_broken:
            self._want_snapshot("overflow", 0)
        if self._wanted is None:
            return False
        if self._resync_at is None:
            earliest = self._last_snapshot_at + self._settings.resync_min_interval_s
            self._resync_at = max(self._clock + self._wanted.delay_s, earliest)
        return force or self._clock >= self._resync_at

    def begin_snapshot(self) -> None:
        """Make the snapshot that is due. `take_records` does so by itself; but it takes half a second a million pages,
        which may be spent in another thread while nobody else calls.
        """
        assert self._wanted is not None
        reason = self._wanted.reason
        self._wanted = self._resync_at = None  # first: a wish of now may be about what the copy does not see
        self._last_snapshot_at = self._clock
        self.num_snapshots += 1
        self.is_snapshot_begun = True
        held = self._tracker.restart()
        self._snapshot = _Snapshot(resync_changes(held), held.digest, reason)
        self._waiting_since = None

    @property
    def is_lingering(self) -> bool:
        """Whether changes wait for company."""
        return self._waiting_since is not None

    def seconds_until_due(self, now: float) -> float:
        """How long nothing will be due if no further event comes; 0 if there is something not looked at yet."""
        self._advance(now)
        unseen_wish = self._resync_at is None and (self._wanted is not None or self._tracker.is_broken)
        unseen_changes = self._tracker.num_queued and not self.is_lingering
        if unseen_wish or unseen_changes or self.degraded_reason != self._sent_degraded_reason:
            return 0.0
        due = [self._last_record_at + self._settings.heartbeat_s]
        if self._waiting_since is not None:
            due.append(self._waiting_since + self._settings.linger_ms / 1000)
        if self._resync_at is not None:
            due.append(self._resync_at)
        return max(0.0, min(due) - self._clock)

    def request_resync(self, reason: str) -> None:
        """Want a snapshot, soon: rate-limited, after a random time. One already wanted is enough. Any thread."""
        self._want_snapshot(reason, random.uniform(0, self._settings.resync_jitter_s))  # noqa: S311

    def answer(self, request: ResyncRequest) -> bool:
        """Take a request from the control channel. False: meant for another stream or incarnation."""
        if request.stream != self._stream.key or request.epoch != self.epoch:
            return False
        self.request_resync(request.reason or "request")
        return True

    def num_snapshot_pages_left(self) -> int:
        """Pages of snapshots that are wanted or not sent to their end."""
        left = 0 if self._snapshot is None else self._snapshot.num_left
        if self._wanted is not None or self._tracker.is_broken:
            left += self._tracker.counts()["held"]
        return left

    def _advance(self, now: float) -> None:
        self._clock += max(0.0, now - self._last_now)
        self._last_now = now

    def _want_snapshot(self, reason: str, delay_s: float) -> None:
        if self._wanted is None:
            self._wanted = _Wanted(reason, delay_s)

    def _next_record(self, now: float, force: bool) -> OutRecord | None:
        if self.is_snapshot_due(now, force=force):
            self.begin_snapshot()
        if self._snapshot is not None:
            return self._snapshot_record(self._snapshot, now)
        if self._changes_due(force):
            record = self._changes_record(now)
            if record is not None:
                return record
        if (
            self.degraded_reason != self._sent_degraded_reason
            or self._clock - self._last_record_at >= self._settings.heartbeat_s
        ):
            return self._heartbeat(now)
        return None

    def _snapshot_record(self, snapshot: _Snapshot, now: float) -> OutRecord:
        """The next part. Its digest is the whole snapshot's: compared by readers at the end only."""
        start = snapshot.position
        part = snapshot.changes.part(start, start + self._limits.pages)
        part = part.part(0, self._limits.fitting(part))
        snapshot.position += len(part.kinds)
        events = pack(part)
        if start == 0:
            events.insert(0, encode_event(SnapshotBegin(snapshot.reason)))
        if snapshot.num_left == 0:
            events.append(encode_event(SnapshotEnd()))
            self._snapshot = None
            self.is_snapshot_begun = False
        self._digest = snapshot.digest
        return self._record(now, events, len(part.kinds))

    def _changes_due(self, force: bool) -> bool:
        num_queued = self._tracker.num_queued
        if num_queued == 0:
            self._waiting_since = None
            return False
        if force or num_queued >= self._limits.pages:
            return True
        if self._waiting_since is None:
            self._waiting_since = self._clock
        return self._clock - self._waiting_since >= self._settings.linger_ms / 1000

    def _changes_record(self, now: float) -> OutRecord | None:
        """A batch of changes; None if an overflow has just dropped them all."""
        changes, tokens, digest = self._tracker.take()
        self._waiting_since = None if digest is not None else self._clock
        if not len(changes.kinds):
            return None
        if digest is None:
            advance_digest(self._digest, changes.kinds, changes.hashes)
        else:
            self._digest = digest
        return self._record(now, pack(changes, tokens), len(changes.kinds))

    def _heartbeat(self, now: float) -> OutRecord:
        """States what the ledger holds, unless changes wait: a stream that is broken says so by its digest."""
        return self._record(now, [], 0, self._tracker.digest_if_idle())

    def _record(self, now: float, events: list[bytes], num_pages: int, digest: Digest | None = None) -> OutRecord:
        digest = self._digest if digest is None else digest
        self._sent_degraded_reason = self.degraded_reason
        payload = encode_batch(
            self._stream,
            self._settings.block_size,
            self.epoch,
            self.seq,
            now,
            events,
            digest_bytes(digest),
            self._sent_degraded_reason,
        )
        self.seq += 1
        self._last_record_at = self._clock
        return OutRecord(self._key, payload, int(now * 1000), num_pages)
