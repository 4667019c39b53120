"""The tasks that send records from the builder to the sink and pass the sink's requests to the builder."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kv_events.runtime.supervised import Backoff, cancel, keep_running
from kv_events.runtime.tracing import open_spans
from kv_events.runtime.words import count
from publisher.change_tracker import ChangeTracker
from publisher.record_builder import RecordBuilder
from publisher.settings import PublisherSettings
from publisher.sinks.base import OutRecord, Sink, SinkRejectedError, SinkUnavailableError

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 5.0
_STOP_GRACE_S = 2.0
_MAX_IN_FLIGHT = 32
"""Most records handed to the sink at once."""
_POLL_S = 0.002
"""Longest time for which `publish` may leave events to the drain."""
_POLLING_S = 0.1
"""Time without events after which the drain no longer polls. A waking call would cost an engine as much as all else."""
_SLOW_S = 3.0
"""Time without a confirmation after which the sink counts as unavailable."""


class Drain:
    """Owns the drain task and the control task of one publisher, in one event loop.

    The drain task waits for new events, the end of a linger time, a heartbeat, a due resync, or the close. After errors
    other than `SinkUnavailableError` and `SinkRejectedError`, a task starts again.

    The first event after a pause wakes the drain. While an engine publishes, a timer of the loop collects its events
    instead, so that the engine's thread neither makes a system call nor competes for the interpreter lock.
    """

    def __init__(self, settings: PublisherSettings, tracker: ChangeTracker, builder: RecordBuilder, sink: Sink) -> None:
        self.failure: Exception | None = None
        """The newest error of a task, until records are sent again."""
        self.in_flight: Sequence[OutRecord] = ()
        """Records that the sink has not confirmed."""
        self.num_rejected = 0
        """Records that the sink refused."""
        self.num_skipped_requests = 0
        """Messages of the control channel that are not resync requests."""
        self._worker = settings.worker
        self._tracker = tracker
        self._builder = builder
        self._sink = sink
        self._spans = open_spans()
        self._poll_s = min(_POLL_S, settings.linger_ms / 1000)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._awake = asyncio.Event()
        self._is_signalled = False  # whether the event is set or about to be set
        self._is_polling = False
        self._polling_until = 0.0  # in the loop's time
        self._next_poll: asyncio.Handle | None = None
        self._user = f"{settings.worker}:{id(self)}"  # of the outage, which publishers of one process may share
        self._is_sink_started = False
        self._is_closing = False
        self._ends_stream = False

    @property
    def is_sink_available(self) -> bool:
        """Whether the sink takes records, as far as is known."""
        return not self._sink.outage.is_failing(self._user)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tracker.is_deferring = True
        self._task = self._supervised(self._run, "publisher-drain", self._note_lost_records)

    def wake(self) -> None:
        """Wake the drain task. Thread-safe. Costs almost nothing while the task is awake."""
        if self._loop is not None and not self._is_signalled:
            self._is_signalled = True
            self._call(self._loop, self._awake.set)

    def poll(self) -> None:
        """Collect deferred events soon. Thread-safe. Costs almost nothing while the drain polls."""
        if self._loop is not None and not self._is_polling:
            self._is_polling = True
            self._call(self._loop, self._poll)

    def _call(self, loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
        try:
            loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed, so there is no task to wake
            self._loop = None

    def _poll(self) -> None:
        """Collect deferred events, and repeat it while there are some."""
        assert self._loop is not None
        now = self._loop.time()
        if self._tracker.has_deferred:
            self._tracker.record_deferred()
            self._polling_until = now + _POLLING_S
        if self._tracker.needs_sending and not self._is_signalled:
            self._is_signalled = True
            self._awake.set()
        if self._poll_s and now < self._polling_until:
            self._next_poll = self._loop.call_later(self._poll_s, self._poll)
            return
        self._is_polling = False
        if self._tracker.has_deferred or (self._tracker.needs_sending and not self._is_signalled):
            self.poll()  # it came while the flag was set

    async def stop(self, deadline_s: float, *, ends_stream: bool) -> None:
        """Send pending records for at most `deadline_s` seconds, then end the tasks and stop the sink.

        ends_stream: end with a closing record.
        """
        self._is_closing = True
        self._ends_stream = ends_stream
        self._awake.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=deadline_s)
            await cancel(self._task)
        self._is_polling = True
        if self._next_poll is not None:
            self._next_poll.cancel()
        self._sink.outage.forget(self._user)
        try:
            async with asyncio.timeout(_STOP_GRACE_S):  # `wait_for` of Python 3.11 may swallow a cancellation
                await self._sink.stop()
        except TimeoutError:
            logger.warning("publisher %s: the sink did not stop within %.0f s", self._worker, _STOP_GRACE_S)

    def _supervised(
        self, work: Callable[[], Awaitable[None]], kind: str, on_error: Callable[[Exception], None]
    ) -> asyncio.Task[None]:
        name = f"{kind}:{self._worker}"
        return asyncio.create_task(keep_running(work, name, logger, on_error), name=name)

    def _note_failure(self, error: Exception) -> None:
        self.failure = error

    def _note_lost_records(self, error: Exception) -> None:
        """Send everything again, because the records that the drain task held may be lost."""
        self._note_failure(error)
        self._builder.request_resync("internal error")

    async def _run(self) -> None:
        if not self._is_sink_started:
            await self._until_available(self._sink.start)
            self._is_sink_started = True
        control = self._supervised(self._answer_requests, "publisher-control", self._note_failure)
        try:
            while True:
                if self._builder.is_resync_due(time.time(), force=self._is_closing):
                    await self._begin_resync()
                records = self._builder.take_records(time.time(), force=self._is_closing, max_records=_MAX_IN_FLIGHT)
                if records:
                    await self._send(records)
                elif self._is_closing:
                    if self._ends_stream:
                        await self._send([self._builder.closing_record(time.time())])
                    return
                else:
                    await self._wait()
        finally:
            await cancel(control)

    async def _begin_resync(self) -> None:
        """Prepare the resync in a thread.

        The thread is awaited even if this task is cancelled, because the builder supports one caller at a time.
        """
        making = asyncio.ensure_future(asyncio.to_thread(self._builder.begin_resync))
        try:
            await asyncio.shield(making)
        finally:
            await asyncio.wait({making})

    async def _wait(self) -> None:
        """Wait until something may be due. While changes linger, further events do not wake the task."""
        self._awake.clear()
        self._is_signalled = self._tracker.queue.num_queued > 0
        timeout_s = self._builder.seconds_until_due(time.time())  # 0 if events arrived before `clear`
        timer = asyncio.get_running_loop().call_later(timeout_s, self._awake.set)
        try:
            await self._awake.wait()
        finally:
            timer.cancel()

    async def _send(self, records: list[OutRecord]) -> None:
        self.in_flight = records
        try:
            with self._traced(records) as sent:
                await self._until_available(lambda: self._sink.send(sent))
        except SinkRejectedError as error:
            self.num_rejected += len(records)
            refused = count(len(records), "record")
            logger.error("publisher %s: %s refused for good: %s", self._worker, refused, error)  # noqa: TRY400
            self._builder.request_resync("rejected")
            await asyncio.sleep(_FIRST_RETRY_S)
        else:
            self.failure = None
        self.in_flight = ()
        await asyncio.sleep(0)  # a sink that never waits must not block the loop

    @contextmanager
    def _traced(self, records: Sequence[OutRecord]) -> Iterator[Sequence[OutRecord]]:
        """Run a block that sends records, each in a span. Yields them with the contexts of their spans."""
        if self._spans is None:
            yield records
            return
        with ExitStack() as stack:
            traced = []
            for seq, record in enumerate(records, self._builder.seq - len(records)):
                attributes: dict[str, str | int] = {
                    "kvsight.stream": record.key.decode(),
                    "kvsight.epoch": self._builder.epoch,
                    "kvsight.seq": seq,
                    "kvsight.pages": record.num_pages,
                    "messaging.message.body.size": len(record.payload),
                }
                span = stack.enter_context(self._spans.span("publish", "producer", attributes))
                traced.append(record._replace(headers=self._spans.headers(span)))
            yield traced

    async def _until_available(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Repeat an attempt with growing pauses until the sink is available. An attempt may also wait for the sink."""
        backoff = Backoff(_FIRST_RETRY_S, _LAST_RETRY_S)
        outage, loop = self._sink.outage, asyncio.get_running_loop()
        while True:
            reason = f"nothing was confirmed for {_SLOW_S:.0f} s"
            slow = loop.call_later(_SLOW_S, outage.note_failure, reason, self._user)
            try:
                await attempt()
            except SinkUnavailableError as error:
                outage.note_failure(error, self._user)
                await backoff.pause()
            else:
                outage.note_success(self._user)
                return
            finally:
                slow.cancel()

    async def _answer_requests(self) -> None:
        async for request in self._sink.requests():
            if request is None:
                self.num_skipped_requests += 1
            elif self._builder.answer(request):
                self._awake.set()
