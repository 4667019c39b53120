"""The engine's side of a publisher: accepts events and queues page changes. `record` neither blocks nor raises."""

import logging
import operator
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, TypeVar, cast

from kv_events.digest import Digest
from kv_events.errors import InvalidValueError
from kv_events.limits import MAX_EXTRA_KEY_BYTES
from kv_events.runtime.outages import RateLimitedLogger
from kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent
from publisher import event_columns
from publisher.change_queue import ChangeQueue
from publisher.event_columns import InvalidEventError
from publisher.kernels.blocks import BlockTable
from publisher.kernels.changes import REMOVAL, PageChanges
from publisher.kernels.events import PageEvents
from publisher.ledger import Ledger, LedgerCopy
from publisher.packing import EVENT_BYTES, PageTokens, num_fitting
from publisher.settings import PublisherSettings

logger = logging.getLogger(__name__)

_E = TypeVar("_E", BlockStored, BlockRemoved)

_MAX_DEFERRED_CALLS = 64
_MAX_DEFERRED_PAGES = 256
"""Most pages of a call that is deferred."""
_CATCH_UP_CALLS = 2
"""Calls that a call records if the drain is late, so that it costs little even then."""

_COPY_PASSES = 3
"""Copy passes before the final step. Each pass copies what changed during the previous one."""
_STEP_PAGES = 8192

_place = operator.attrgetter("medium", "extra_key")


class FairLock:
    """A lock for `with`. A thread that acquires a `threading.Lock` in a loop would hardly ever let others acquire it.

    It has a turnstile: a thread that waits for the lock holds the turnstile, and a returning thread must pass it first.
    """

    def __init__(self) -> None:
        self._turnstile = threading.Lock()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._turnstile:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class ChangeTracker:
    """The ledger and the change queue behind one lock. Thread-safe. The lock is only held for short steps.

    An engine calls `record` every few milliseconds, when neither code nor data of this package are in the processor's
    caches any longer: recording one event then takes ten times as long as in a loop. While a drain runs, small calls
    are therefore only kept, without the lock. The drain records several together, on its own thread.
    """

    def __init__(self, settings: PublisherSettings, blocks: BlockTable | None = None) -> None:
        self._worker = settings.worker
        self._block_size = settings.block_size
        self._batch_pages, self._batch_bytes = settings.batch_pages, settings.batch_bytes
        self._token_bytes = 0
        self._tokens: deque[PageTokens] | None = None  # one entry for each waiting store
        if settings.with_tokens:
            self._tokens = deque()
            self._token_bytes = 4 * (settings.block_size + 1) + EVENT_BYTES + MAX_EXTRA_KEY_BYTES
        self._lock = FairLock()  # guards everything below; other modules only read flags and numbers without it
        self.queue = ChangeQueue(settings.queue_pages)
        if blocks is None:
            blocks = BlockTable(settings.ledger_pages)
        self.ledger = Ledger(settings.ledger_pages, self.queue, blocks)
        self._rejected: Counter[str] = Counter()
        self._limited_logger = RateLimitedLogger(logger, f"publisher {settings.worker}")
        self._is_closed = False
        self._deferred: deque[tuple[EngineEvent, ...]] = deque()  # filled without the lock
        self.is_deferring = False
        """Whether `record` may keep small calls. `record_deferred` is then called every few milliseconds."""
        self.has_lost_events = False
        """Whether `pop_lost_events` would return True."""

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def record(self, events: Sequence[EngineEvent]) -> None:
        """Record events in order, or keep them until `record_deferred`. Invalid events are dropped and counted."""
        try:
            call = tuple(events)
        except Exception:  # noqa: BLE001  (whatever it is, it is no list of events)
            self._note_lost_events()
            return
        if self._can_defer(call):
            self._deferred.append(call)
            if len(self._deferred) > _MAX_DEFERRED_CALLS:
                with self._lock:
                    self._record_deferred(min(_CATCH_UP_CALLS, len(self._deferred)))
            return
        with self._lock:
            self._record_deferred()
            self._record(call)

    def change(self, events: PageEvents, extra_key: str | None) -> None:
        """Record stores and removals in order. Raises InvalidValueError if the stream carries tokens.

        The lock is released between steps, because one call may carry a hundred thousand pages and must not block the
        drain's event loop.
        """
        if self._tokens is not None:
            raise InvalidValueError("with_tokens", True, "False where pages come without their tokens")
        for part in events.parts(_STEP_PAGES):
            with self._lock:
                self._record_deferred()
                if self._is_closed:
                    self._reject("closed", len(part.kinds))
                else:
                    self.ledger.change(part, extra_key)

    def require_groups(self, num_groups: int) -> None:
        with self._lock:
            self.ledger.require_groups(num_groups)

    def _can_defer(self, call: tuple[EngineEvent, ...]) -> bool:
        if not self.is_deferring or len(call) > _MAX_DEFERRED_PAGES:
            return False
        try:
            return sum([len(getattr(event, "block_hashes", ())) for event in call]) <= _MAX_DEFERRED_PAGES  # noqa: C419
        except Exception:  # noqa: BLE001  (an invalid event)
            return False

    def _record_deferred(self, max_calls: int | None = None) -> None:
        """Record the oldest deferred calls, or all, together: this costs hardly more than one of them."""
        num_calls = len(self._deferred) if max_calls is None else max_calls
        calls = [self._deferred.popleft() for _ in range(num_calls)]
        self._record(list(chain.from_iterable(calls)))

    def _record(self, events: Sequence[EngineEvent]) -> None:
        if self._is_closed:
            if events:
                self._reject("closed", len(events))
            return
        for kind, run in groupby(events, type):
            if kind is BlockStored:
                self._record_run(self._store, cast(list[BlockStored], list(run)))
            elif kind is BlockRemoved:
                self._record_run(self._remove, cast(list[BlockRemoved], list(run)))
            elif kind is AllBlocksCleared:
                self.ledger.clear()
            else:
                self._reject("type", len(list(run)))

    def _reject(self, reason: str, num_events: int) -> None:
        """Count invalid events, and log the numbers at intervals."""
        self._rejected[reason] += num_events
        self._limited_logger.warning("engine events dropped so far: %s", dict(self._rejected))

    def _note_lost_events(self) -> None:
        logger.exception("publisher %s: events lost; a resync follows", self._worker)
        self.has_lost_events = True

    def _record_run(self, take: Callable[[list[_E], Any, Any], None], run: list[_E]) -> None:
        for (medium, extra_key), events in _by_place(run):
            self._record_together(take, events, medium, extra_key)

    def _record_together(
        self, take: Callable[[list[_E], Any, Any], None], events: list[_E], medium: Any, extra_key: Any
    ) -> None:
        """Record all events at once. If one of them is invalid, record them one by one and drop only invalid ones."""
        try:
            take(events, medium, extra_key)
        except Exception as error:  # noqa: BLE001  (an internal error must not reach the engine)
            if len(events) > 1:
                for event in events:
                    self._record_together(take, [event], medium, extra_key)
            elif isinstance(error, InvalidEventError):
                self._reject(error.reason, 1)
            else:
                self._note_lost_events()

    def _store(self, events: list[BlockStored], medium: Any, extra_key: Any) -> None:
        tier = event_columns.medium_index(medium)
        event_columns.check_extra_key(extra_key)
        columns = self._columns(events)
        tokens = self._page_tokens(events) if self._tokens is not None else None
        queued = self.ledger.change(columns.stored_on(tier), extra_key)
        if self._tokens is not None and tokens is not None:
            self._tokens.extend(entry for entry, is_queued in zip(tokens, queued, strict=True) if is_queued)
            if self.queue.is_broken:
                self._tokens.clear()  # of stores that came after the overflow, too

    def _remove(self, events: list[BlockRemoved], medium: Any, extra_key: Any) -> None:
        tier = event_columns.medium_index(medium)
        event_columns.check_extra_key(extra_key)
        self.ledger.change(PageEvents.removed(event_columns.removed_words(events), tier), extra_key)

    def _columns(self, events: list[BlockStored]) -> PageEvents:
        if len(events) > 1 or events[0].sequence_hashes:
            return event_columns.stored_columns(events, self._block_size)
        event, parent = events[0], None
        if event.parent_block_hash is not None:
            parent = self.ledger.sequence_hash(_integer(event.parent_block_hash), event.extra_key)
            if parent is None:
                raise InvalidEventError("unidentified", f"parent {event.parent_block_hash} is not held")
        return event_columns.derived_columns(event, self._block_size, parent)

    def _page_tokens(self, events: list[BlockStored]) -> list[PageTokens]:
        entries: list[PageTokens] = []
        for event in events:
            rows = [row.astype("<u4").tobytes() for row in event_columns.token_rows(event, self._block_size)]
            rows = rows or [b""] * len(event.block_hashes)
            entries.extend(PageTokens(row, event.extra_key) for row in rows)
        return entries

    # --- the drain --------------------------------------------------------------------------------------------------

    @property
    def needs_sending(self) -> bool:
        """Whether changes wait, or a resync must follow lost ones."""
        return bool(self.queue.num_queued or self.queue.is_broken or self.has_lost_events)

    @property
    def has_deferred(self) -> bool:
        return bool(self._deferred)

    def record_deferred(self) -> None:
        with self._lock:
            self._record_deferred()

    def pop_lost_events(self) -> bool:
        """Return whether events were lost by an internal error since the last call. A resync must follow."""
        has_lost, self.has_lost_events = self.has_lost_events, False
        return has_lost

    def take(self) -> tuple[PageChanges, list[PageTokens] | None, Digest | None]:
        """Take the oldest changes that fit into one batch. They are in flight until the same caller confirms them.

        Returns views of the queue that are valid until then; the tokens of each store, or None for a stream without
        tokens; and the ledger's digest, or None while more changes wait.
        """
        with self._lock:
            changes = self.queue.peek(self._batch_pages)
            changes = changes.part(0, num_fitting(changes, self._batch_bytes, self._token_bytes))
            self.queue.take(len(changes.kinds))
            tokens = None
            if self._tokens is not None:
                tokens = [self._tokens.popleft() for _ in range(int((changes.kinds < REMOVAL).sum()))]
            return changes, tokens, None if self.queue.num_queued else self.ledger.digest()

    def confirm(self) -> None:
        with self._lock:
            self.queue.confirm()

    def restart(self) -> LedgerCopy:
        """Return a copy of the ledger, drop all waiting changes, and queue the changes that follow the copy.

        Takes at least 25 ms per million pages. `record` can be called during this time.
        """
        with self._lock:
            held = self.ledger.start_copy()
        for _ in range(_COPY_PASSES):
            for number in self.ledger.stale_slices():
                with self._lock:
                    self.ledger.copy_slice(number, held)
        with self._lock:
            self.queue.restart()
            if self._tokens is not None:
                self._tokens.clear()
            return self.ledger.finish_copy(held)

    def close(self) -> None:
        with self._lock:
            self.is_deferring = False
            self._record_deferred()
            self._is_closed = True

    @property
    def num_held(self) -> int:
        """Distinct pages that the worker holds, on any tier, with those of deferred calls."""
        with self._lock:
            self._record_deferred()
            return self.ledger.num_pages

    def digest_if_idle(self) -> Digest | None:
        """Return the digest of what the worker holds now, or None while unsent changes wait."""
        with self._lock:
            return None if self.queue.num_queued else self.ledger.digest()

    def stats(self) -> dict[str, Any]:
        """The fields of `PublisherStats` about the engine's side."""
        with self._lock:
            self._record_deferred()
            pages = {**self.ledger.counts(), "held": self.ledger.num_pages}
            own = {"is_broken": self.queue.is_broken, "pages": pages, "rejected_events": dict(self._rejected)}
            return self.queue.stats() | own

    def check(self) -> None:
        """Recount the ledger from scratch. Raises AssertionError with both figures."""
        with self._lock:
            self._record_deferred()
            self.ledger.check()


def _by_place(run: list[_E]) -> Iterator[tuple[tuple[Any, Any], list[_E]]]:
    """Group adjacent events by medium and namespace. If values cannot be compared, each event is its own group."""
    try:
        if len({event.medium for event in run}) == 1 and len({event.extra_key for event in run}) == 1:
            yield _place(run[0]), run
            return
        stretches = [len(list(same)) for _, same in groupby(run, _place)]
    except (TypeError, ValueError):
        stretches = [1] * len(run)
    start = 0
    for length in stretches:
        yield _place(run[start]), run[start : start + length]
        start += length


def _integer(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise InvalidEventError("type", f"parent_block_hash: {error}") from None
