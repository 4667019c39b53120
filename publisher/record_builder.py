"""Builds the records of a stream: resyncs, batches and heartbeats, with sequence numbers and digests.

It has no clock, no I/O and no tasks.
"""

import random
from collections import deque
from dataclasses import dataclass

from kv_events.codec import encode_batch, encode_event
from kv_events.digest import Digest, digest_bytes, empty_digest
from kv_events.schema import CLOSED, LEDGER_FULL, ResyncRequest, SnapshotBegin, SnapshotEnd
from publisher.change_tracker import ChangeTracker
from publisher.kernels.changes import PageChanges, advance_digest
from publisher.ledger import resync_changes
from publisher.packing import num_fitting, pack
from publisher.settings import PublisherSettings
from publisher.sinks.base import OutRecord


@dataclass(slots=True)
class _ActiveResync:
    changes: PageChanges
    digest: Digest
    reason: str
    began_at: float
    position: int = 0

    @property
    def num_left(self) -> int:
        return len(self.changes.kinds) - self.position


class RecordBuilder:
    """Turns the changes of the tracker into records. Supports one caller at a time: the drain or a simulation.

    Every epoch begins with a resync, which is usually empty. A resync states what the ledger held at one moment, and
    later changes follow it. If the queue overflows during a resync, another resync follows, so each resync ends. Times
    are seconds since 1970 and are passed by the caller. Due times depend on the time elapsed between calls. If the
    caller's clock was set back, the elapsed time is zero.
    """

    def __init__(self, settings: PublisherSettings, tracker: ChangeTracker, epoch: int) -> None:
        self.epoch = epoch
        self.seq = 0
        """Number of the next record."""
        self.num_resyncs = 0
        self.num_resync_pages = 0
        """Pages sent in resyncs, once for each tier."""
        self.is_resyncing = False
        """Whether the last resync is not sent completely yet. The queue no longer holds changes from before it."""
        self.degraded_reason = ""
        """The degraded reason in every record, before that of the ledger. Any thread may set it. A change is sent."""
        self._settings = settings
        self._stream = settings.stream
        self._key = settings.stream.key.encode()
        self._tracker = tracker
        self._digest = empty_digest()  # state after the last record
        self._sent_degraded_reason = ""  # in the last record
        self._as_of = 0.0  # all changes from before this time are in records
        self._num_taken = 0
        self._marks: deque[tuple[int, float]] = deque()  # total of changes by a time, and that time; both grow
        self._resync: _ActiveResync | None = None
        # reason, and the seconds to wait after the first call that sees the request
        self._pending: tuple[str, float] | None = ("start", 0)
        # times of `_clock`, which never goes back
        self._clock = 0.0
        self._last_now = float("inf")  # the caller's time at the last call
        self._resync_at: float | None = None  # earliest start of the requested resync; None: not set yet
        self._last_resync_at = -float("inf")
        self._last_record_at = -float("inf")
        if settings.with_tokens:  # a resync has no tokens and must not contain events before the first record
            self.begin_resync()

    def take_records(self, now: float, *, force: bool = False, max_records: int | None = None) -> list[OutRecord]:
        """Return the records that are due, in order, or records of everything pending with `force`.

        Another call confirms that the records of the previous call were delivered or dropped, and frees their space in
        the queue.
        """
        self._tracker.record_deferred()
        self._tracker.confirm()
        records: list[OutRecord] = []
        while max_records is None or len(records) < max_records:
            record = self._next_record(now, force)
            if record is None:
                break
            records.append(record)
        return records

    def is_resync_due(self, now: float, *, force: bool = False) -> bool:
        """Return whether the next record begins a resync, which `begin_resync` must prepare first."""
        self._advance(now)
        if self._resync is not None:
            return False
        if self._tracker.queue.is_broken:
            self._set_pending("overflow", 0)
        if self._tracker.pop_lost_events():
            self.request_resync("internal error")
        if self._pending is None:
            return False
        if self._resync_at is None:
            earliest = self._last_resync_at + self._settings.resync_min_interval_s
            self._resync_at = max(self._clock + self._pending[1], earliest)
        return force or self._clock >= self._resync_at

    def begin_resync(self) -> None:
        """Prepare the resync that is due. Takes half a second per million pages.

        `take_records` calls this if needed. Callers can instead call it in another thread, if no other method is called
        at the same time.
        """
        assert self._pending is not None
        reason, _ = self._pending
        self._pending = self._resync_at = None  # before the copy: a later request may concern changes after it
        self._last_resync_at = self._clock
        self.num_resyncs += 1
        self.is_resyncing = True
        self._nothing_waits(self._last_now)
        held = self._tracker.restart()
        self._resync = _ActiveResync(resync_changes(held), held.digest, reason, self._last_now)

    def seconds_until_due(self, now: float) -> float:
        """Return the seconds until something is due if no event arrives. 0 if there are unseen requests."""
        self._advance(now)
        is_requested = self._pending is not None or self._tracker.queue.is_broken or self._tracker.has_lost_events
        unseen_request = is_requested and self._resync_at is None
        if unseen_request or self._is_reason_new:
            return 0.0
        due = [self._last_record_at + self._settings.heartbeat_s]
        if self._tracker.queue.num_queued:
            due.append(self._last_record_at + self._settings.linger_ms / 1000)
        if self._resync_at is not None:
            due.append(self._resync_at)
        return max(0.0, min(due) - self._clock)

    @property
    def _reason(self) -> str:
        return self.degraded_reason or (LEDGER_FULL if self._tracker.ledger.is_incomplete else "")

    @property
    def _is_reason_new(self) -> bool:
        return self._reason != self._sent_degraded_reason

    def closing_record(self, now: float) -> OutRecord:
        """Return the last record of the epoch. Readers then leave the worker out of scores."""
        self.degraded_reason = CLOSED
        return self._heartbeat(now)

    def request_resync(self, reason: str) -> None:
        """Request a resync. It is rate-limited and begins after a random delay. Thread-safe.

        The call has no effect if a resync is requested already.
        """
        self._set_pending(reason, random.uniform(0, self._settings.resync_jitter_s))  # noqa: S311

    def answer(self, request: ResyncRequest) -> bool:
        """Accept a request from the control channel. Returns False if it names another stream or another epoch."""
        if request.stream != self._stream.key or request.epoch != self.epoch:
            return False
        self.request_resync(request.reason or "request")
        return True

    def num_resync_pages_left(self) -> int:
        """Return the number of unsent pages of requested and unfinished resyncs."""
        left = 0 if self._resync is None else self._resync.num_left
        if self._pending is not None or self._tracker.queue.is_broken:
            left += self._tracker.num_held
        return left

    def _advance(self, now: float) -> None:
        self._clock += max(0.0, now - self._last_now)
        self._last_now = now

    def _set_pending(self, reason: str, delay_s: float) -> None:
        if self._pending is None:
            self._pending = reason, delay_s

    def _next_record(self, now: float, force: bool) -> OutRecord | None:
        if self.is_resync_due(now, force=force):
            self.begin_resync()
        if self._resync is not None:
            return self._resync_record(self._resync, now)
        if self._changes_due(force or self._is_reason_new):
            record = self._changes_record(now)
            if record is not None:
                return record
        if self._is_reason_new or self._clock - self._last_record_at >= self._settings.heartbeat_s:
            return self._heartbeat(now)
        return None

    def _resync_record(self, resync: _ActiveResync, now: float) -> OutRecord:
        """Return the next part of a resync. Its digest is that of the whole resync; readers compare it at the end."""
        start = resync.position
        part = resync.changes.part(start, start + self._settings.batch_pages)
        part = part.part(0, num_fitting(part, self._settings.batch_bytes))
        resync.position += len(part.kinds)
        self.num_resync_pages += len(part.kinds)
        events = pack(part)
        if start == 0:
            events.insert(0, encode_event(SnapshotBegin(resync.reason)))
        if resync.num_left == 0:
            events.append(encode_event(SnapshotEnd()))
            self._resync = None
            self.is_resyncing = False
        self._digest = resync.digest
        return self._record(now, events, len(part.kinds), as_of=min(now, resync.began_at))

    def _changes_due(self, force: bool) -> bool:
        """Return whether changes are due: at once after a pause, under load one record per linger time."""
        num_queued = self._tracker.queue.num_queued
        if num_queued == 0:
            return False
        if force or num_queued >= self._settings.batch_pages:
            return True
        return self._clock - self._last_record_at >= self._settings.linger_ms / 1000

    def _changes_record(self, now: float) -> OutRecord | None:
        """Return a batch of changes, or None if an overflow has just dropped all of them."""
        self._marks.append((self._num_taken + self._tracker.queue.num_queued, now))
        changes, tokens, digest = self._tracker.take()
        if not len(changes.kinds):
            return None
        if digest is not None:
            return self._record(now, pack(changes, tokens), len(changes.kinds), digest)
        advance_digest(self._digest, changes.kinds, changes.hashes)
        self._num_taken += len(changes.kinds)
        while self._marks and self._marks[0][0] <= self._num_taken:
            self._as_of = self._marks.popleft()[1]
        return self._record(now, pack(changes, tokens), len(changes.kinds), as_of=min(now, self._as_of))

    def _nothing_waits(self, now: float) -> None:
        self._marks.clear()
        self._as_of = now

    def _heartbeat(self, now: float) -> OutRecord:
        """Return a record without events. If no changes wait, it carries the ledger's digest.

        Readers detect a broken stream by this digest.
        """
        return self._record(now, [], 0, self._tracker.digest_if_idle())

    def _record(
        self, now: float, events: list[bytes], num_pages: int, digest: Digest | None = None, as_of: float | None = None
    ) -> OutRecord:
        """Return the next record. as_of: up to when it states what the worker held. None: now, as no changes wait."""
        self._digest = self._digest if digest is None else digest
        if as_of is None or as_of == now:
            self._nothing_waits(now)
        if self._reason or not self._tracker.queue.num_queued:  # a reason holds for all changes that came under it
            self._sent_degraded_reason = self._reason
        payload = encode_batch(
            self._stream,
            self._settings.block_size,
            self.epoch,
            self.seq,
            now if as_of is None else as_of,
            events,
            digest_bytes(self._digest),
            self._sent_degraded_reason,
        )
        self.seq += 1
        self._last_record_at = self._clock
        return OutRecord(self._key, payload, int(now * 1000), num_pages)
