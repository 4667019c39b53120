"""Changes of worker streams, and log lines about them: they join, restart, leave, expire, turn stale and live again."""

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple

from indexer.freshness import Freshness
from indexer.slices import Interval
from indexer.views import View, ViewState
from kv_events.runtime.words import count
from kv_events.schema import ENGINE_UNHEARD
from kv_events.streams import StreamId

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_MAX_LINES = 20
"""Changes between two looks that are logged one by one. More become one line with their numbers."""

_WARNINGS = frozenset({"is stale", "expired"})


class _Known(NamedTuple):
    """What is known about a stream."""

    epoch: int
    state: ViewState
    shown: ViewState
    """The state at the last change with a verb."""


class WorkerChange(NamedTuple):
    """A change of a worker stream."""

    stream: StreamId
    epoch: int
    before: ViewState | None
    """None: the stream is new."""
    after: ViewState | None
    """None: its view was dropped."""
    verb: str
    """What happened in the life of the worker, in words. Empty: nothing, such as at the beginning of a resync."""
    reason: str

    def log(self) -> None:
        level = logging.WARNING if self.verb in _WARNINGS else logging.INFO
        text = f"{self.stream.key} {self.verb}" + (f": {self.reason}" if self.reason else "")
        state = self.after or self.before
        facts = {"event": self.verb, "reason": self.reason, "epoch": self.epoch, "state": state}
        logger.log(level, "%s", text, extra=self.stream._asdict() | facts)


class WorkerLog:
    """Compares each view with what it was before. No log lines and no verbs while the records of the past are read."""

    def __init__(self, freshness: Freshness) -> None:
        self._freshness = freshness
        self._interval = Interval(_LOOK_S)
        self._known: dict[StreamId, _Known] = {}
        self._is_reading_past = True
        self._changes: list[WorkerChange] = []
        self._counts: Counter[str] = Counter()
        self.on_change: list[Callable[[WorkerChange], None]] = []
        """Called for each change, also for those that are not logged one by one; must not raise."""

    def note(self, view: View) -> None:
        """Compare one view, after a batch or after some time."""
        before, epoch, state = self._known.get(view.stream), view.epoch, self._freshness.state(view)
        if before is None or before.epoch != epoch:  # a bridge gives up the pages of an engine that it still misses
            is_news = before is None or before.state is not state or view.degraded_reason != ENGINE_UNHEARD
        elif before.state is state:
            return
        else:  # a resync in progress is none
            is_news = state is not ViewState.SYNCING and state is not before.shown
        now = _Known(epoch, state, state if is_news or before is None else before.shown)
        self._known[view.stream] = now
        verb = _verb(before, now, is_closed=view.is_closed) if is_news and not self._is_reading_past else ""
        last = None if before is None else before.state
        self._add(WorkerChange(view.stream, epoch, last, state, verb, self._reason(view, state) if verb else ""))

    def look(self, views: Iterable[View], now: float) -> Generator[None, None, None]:
        """Compare all views twice a second, in slices, and log what has changed. now: monotonic seconds.

        Views must not be added or dropped before the end.
        """
        has_caught_up = self._is_reading_past and not self._freshness.is_catching_up
        if not self._interval.is_due(now) and not has_caught_up:
            return
        views = list(views)
        for view in views:
            self.note(view)
            yield
        streams = {view.stream for view in views}
        for stream in [stream for stream in self._known if stream not in streams]:
            known = self._known.pop(stream)
            verb = "" if self._is_reading_past else "was forgotten"
            self._add(WorkerChange(stream, known.epoch, known.state, None, verb, ""))
        self._flush()
        if has_caught_up:
            self._is_reading_past = False
            states = Counter(known.state.value for known in self._known.values())
            logger.info("%s known%s", count(len(views), "worker stream"), _numbers(states))

    def _add(self, change: WorkerChange) -> None:
        if change.verb:
            self._counts[change.verb] += 1
            if len(self._changes) < _MAX_LINES:
                self._changes.append(change)
        for notify in self.on_change:
            notify(change)

    def _flush(self) -> None:
        total = self._counts.total()
        if total > _MAX_LINES:
            logger.warning(
                "%d changes of worker streams%s", total, _numbers(self._counts), extra={"event": "many changes"}
            )
        else:
            for change in self._changes:
                change.log()
        self._changes.clear()
        self._counts.clear()

    def _reason(self, view: View, state: ViewState) -> str:
        if state is ViewState.EXPIRED and not view.is_closed:
            return f"silent for {self._freshness.silence_s(view):.0f} s"
        return "" if state is ViewState.LIVE else self._freshness.reason(view)


def _verb(before: _Known | None, now: _Known, *, is_closed: bool) -> str:
    if now.state is ViewState.EXPIRED:
        return "left" if is_closed else "expired"
    if before is None:
        return "joined"
    if before.shown is ViewState.EXPIRED:
        return "came back"
    if before.epoch != now.epoch:
        return "restarted"
    return "is live again" if now.state is ViewState.LIVE else "is stale"


def _numbers(counts: Counter[str]) -> str:
    """Return ": 3 live, 1 stale", or "" if there are none."""
    parts = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    return parts and f": {parts}"
