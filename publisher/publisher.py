"""The public class of the package: `EventPublisher`."""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, Self

from kv_events.errors import InvalidValueError, KvsightError, check_type
from kv_events.kernels.load import load
from kv_events.limits import MAX_DEGRADED_REASON_BYTES
from kv_events.runtime.event_loops import new_event_loop
from kv_events.schema import EngineEvent
from kv_events.streams import StreamId
from publisher.change_tracker import ChangeTracker
from publisher.drain import Drain
from publisher.kernels.blocks import BlockTable
from publisher.kernels.events import PageEvents
from publisher.record_builder import RecordBuilder
from publisher.settings import PublisherSettings
from publisher.sinks.base import OutRecord, Sink

logger = logging.getLogger(__name__)

_THREAD_GRACE_S = 5.0
_epoch_lock = threading.Lock()  # guards the newest epoch
_newest_epoch = 0


class PublisherStateError(KvsightError):
    """The publisher was started twice, or stopped in the wrong way."""


class PublisherStats(NamedTuple):
    """Statistics for metrics and tests."""

    queued: int
    """Page changes that wait in the queue."""
    in_flight: int
    """Page changes that were taken from the queue and that the sink has not confirmed yet."""
    delivered: int
    """Total page changes that the sink confirmed."""
    dropped: int
    """Total page changes dropped because the queue was full. A resync follows and replaces them."""
    is_broken: bool
    """Whether the queue overflowed and the resync has not begun yet."""
    pages: dict[str, int]
    """Total pages by result; `held`: distinct pages held now."""
    rejected_events: dict[str, int]
    """Events dropped, by reason."""
    next_seq: int
    """Records created in this epoch."""
    resyncs: int
    """Resyncs started in this epoch, including the first one."""
    resync_pages: int
    """Pages sent in them, once for each tier."""
    is_resyncing: bool
    """Whether the last resync is not sent completely yet."""
    rejected_records: int
    """Records that the sink refused for good."""
    skipped_requests: int
    """Messages of the control channel that are not resync requests."""
    is_sink_available: bool
    failure: str | None
    """The newest error of a task, which starts again. None after records were sent again."""

    @property
    def obstacle(self) -> str:
        """Why nothing is published now, as far as is known, or ""."""
        if self.failure is not None:
            return self.failure
        if not self.is_sink_available:
            return "the sink takes no records"
        return "" if self.resyncs else "nothing was sent yet"


class CloseReport(NamedTuple):
    """The result of closing a publisher."""

    flushed_pages: int
    """Page changes that the sink confirmed during the close."""
    unflushed_pages: int
    """Page changes that were not sent, including pages of an unfinished resync."""
    unflushed_batches: int
    """Records that were passed to the sink without confirmation. Any part of them may have arrived."""


class EventPublisher:
    """Publishes one worker's cache events.

    Inside an event loop, use `async with EventPublisher(settings, sink) as publisher`. In an engine without one, use
    `with`, which runs everything on its own daemon thread. Without either, `take_records` returns the records.
    """

    def __init__(self, settings: PublisherSettings, sink: Sink, blocks: BlockTable | None = None) -> None:
        """blocks: a table that the caller fills, such as the bridge's. Only stores of its blocks are accepted, once
        `refuse_events` of a publisher that used the table before has been called. None: its own table.

        Raises InvalidValueError for arguments of other types.
        """
        check_type("settings", settings, PublisherSettings)
        check_type("sink", sink, Sink)
        load()
        self.stream: StreamId = settings.stream
        """The stream that this publisher writes."""
        self.block_size = settings.block_size
        """Tokens per page."""
        self.epoch = next_epoch()
        """Epoch of this publisher: nanoseconds since 1970 at construction."""
        self._settings = settings
        self._tracker = ChangeTracker(settings, blocks)
        self._builder = RecordBuilder(settings, self._tracker, self.epoch)
        self._drain = Drain(settings, self._tracker, self._builder, sink)
        self._is_started = False
        self._thread: threading.Thread | None = None
        self._thread_loop: asyncio.AbstractEventLoop | None = None

    def publish(self, events: Sequence[EngineEvent]) -> None:
        """Publish events in order. Thread-safe. Never waits for the sink and never raises.

        The events belong to the publisher from then on: the caller may change `events`, but not the events in it.
        Invalid events are dropped and counted by reason; all others are published. Costs about 0.5 us per page. A
        running publisher only keeps calls of up to 256 pages, and its own thread records them up to 2 ms later.
        """
        self._tracker.record(events)
        self._drain.poll()

    def publish_columns(self, events: PageEvents, extra_key: str | None) -> None:
        """Publish stores and removals of one namespace that are given as columns. See `publish`."""
        try:
            self._tracker.change(events, extra_key)
        except Exception:
            logger.exception("publisher %s: events lost; a resync follows", self._settings.worker)
            self._builder.request_resync("internal error")
        self._drain.wake()

    def require_groups(self, num_groups: int) -> None:
        """Count a page as held only while so many blocks carry it, one for each attention group. See `Ledger`."""
        self._tracker.require_groups(num_groups)
        self._drain.wake()

    def take_records(self, now: float, *, force: bool = False) -> list[OutRecord]:
        """Return the records due at `now` (seconds since 1970), or all with `force`. For a publisher never started.

        Another call confirms that the records of the previous call were delivered.
        """
        return self._builder.take_records(now, force=force)

    def request_resync(self, reason: str) -> None:
        """Request a resync. Thread-safe."""
        self._builder.request_resync(reason)
        self._drain.wake()

    def set_degraded_reason(self, degraded_reason: str) -> None:
        """Set the degraded reason of all further records; "" if there is none.

        For a publisher that forwards events and knows that it misses some, which a resync cannot repair. A change is
        sent at once. Thread-safe. Raises InvalidValueError.
        """
        if degraded_reason == self._builder.degraded_reason:
            return
        if len(degraded_reason.encode()) > MAX_DEGRADED_REASON_BYTES:
            raise InvalidValueError("degraded_reason", degraded_reason, f"at most {MAX_DEGRADED_REASON_BYTES} bytes")
        self._builder.degraded_reason = degraded_reason
        self._drain.wake()

    def refuse_events(self) -> None:
        """Refuse further events, as `aclose` does first. Those from before are in the ledger from then on."""
        self._tracker.close()

    def stats(self) -> PublisherStats:
        failure = self._drain.failure
        return PublisherStats(
            **self._tracker.stats(),
            next_seq=self._builder.seq,
            resyncs=self._builder.num_resyncs,
            resync_pages=self._builder.num_resync_pages,
            is_resyncing=self._builder.is_resyncing,
            rejected_records=self._drain.num_rejected,
            skipped_requests=self._drain.num_skipped_requests,
            is_sink_available=self._drain.is_sink_available,
            failure=None if failure is None else repr(failure),
        )

    def check(self) -> None:
        """Recount the ledger from scratch. Raises AssertionError with both figures."""
        self._tracker.check()

    # --- inside an event loop ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start to send in the running event loop. An unavailable sink is retried until it is available."""
        if self._is_started:
            raise PublisherStateError(f"publisher {self._settings.worker} was already started")
        self._is_started = True
        self._drain.start()

    async def aclose(self, deadline_s: float = 5.0, *, ends_stream: bool = True) -> CloseReport:
        """Refuse further events, send queued ones for at most `deadline_s` seconds, and stop.

        ends_stream: send a closing record, so that routers stop scoring the worker at once. False if another publisher
        continues under the same name. Returns what was not sent. Belongs to the loop of `start`.
        """
        self.refuse_events()
        before = self.stats()
        if self._is_started:
            await self._drain.stop(deadline_s, ends_stream=ends_stream)
        after = self.stats()
        report = CloseReport(
            flushed_pages=after.delivered - before.delivered,
            unflushed_pages=after.queued + after.in_flight + self._builder.num_resync_pages_left(),
            unflushed_batches=len(self._drain.in_flight),
        )
        if report.unflushed_pages or report.unflushed_batches:
            logger.warning("publisher %s closed without sending all: %s", self._settings.worker, report)
        return report

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- on its own thread ------------------------------------------------------------------------------------------

    def start_in_thread(self) -> None:
        """Start to send on a daemon thread with its own event loop. Raises PublisherStateError."""
        if self._is_started or self._thread is not None:
            raise PublisherStateError(f"publisher {self._settings.worker} was already started")
        loop = self._thread_loop = new_event_loop()
        name = f"publisher:{self._settings.worker}"
        self._thread = threading.Thread(target=_run_loop, args=(loop,), name=name, daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self.start(), loop).result()
        except Exception as error:
            self._end_thread(self._thread, loop)
            message = f"publisher {self._settings.worker}: its thread did not start: {error}"
            raise PublisherStateError(message) from error

    def close(self, deadline_s: float = 5.0, *, ends_stream: bool = True) -> CloseReport:
        """Close a publisher that was started with `start_in_thread`, and wait for its thread. See `aclose`."""
        if self._thread is None or self._thread_loop is None:
            raise PublisherStateError(f"publisher {self._settings.worker} was not started in a thread: use aclose()")
        closing = asyncio.run_coroutine_threadsafe(self.aclose(deadline_s, ends_stream=ends_stream), self._thread_loop)
        report = closing.result(deadline_s + _THREAD_GRACE_S)
        self._end_thread(self._thread, self._thread_loop)
        return report

    def __enter__(self) -> Self:
        self.start_in_thread()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_thread(self, thread: threading.Thread, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_THREAD_GRACE_S)
        self._thread = self._thread_loop = None


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # which tidies up when the loop was stopped
        runner.get_loop().run_forever()


def next_epoch() -> int:
    """Return nanoseconds since 1970, or, if the clock was set back, one more than the newest epoch of this process.

    A view treats the higher epoch as the newer one, so epochs of a process always increase. Thread-safe.
    """
    global _newest_epoch
    with _epoch_lock:
        _newest_epoch = max(_newest_epoch + 1, time.time_ns())
        return _newest_epoch
