"""The life of workers as log lines: they join, restart, leave, expire, come back, turn stale and live again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from indexer.freshness import Freshness
from indexer.slices import Interval
from indexer.views import View, ViewState
from kv_events.streams import StreamId

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_MAX_LINES = 20
"""Changes between two looks that are logged one by one. More become one line with their numbers."""

_WARNINGS = frozenset({"is stale", "expired"})


class _Known(NamedTuple):
    """What was logged last about a stream."""

    epoch: int
    state: ViewState


class WorkerChange(NamedTuple):
    """A change in the life of a worker stream."""

    stream: StreamId
    verb: str
    reason: str
    facts: dict[str, object]

    def log(self) -> None:
        """Write the log line."""
        level = logging.WARNING if self.verb in _WARNINGS else logging.INFO
        text = f"{self.stream.key} {self.verb}" + (f": {self.reason}" if self.reason else "")
        logger.log(level, "%s", text, extra=self.facts)


class WorkerLog:
    """Compares each view with what was logged about it. Silent while the records of the past are read."""

    def __init__(self, freshness: Freshness) -> None:
        self._freshness = freshness
        self._interval = Interval(_LOOK_S)
        self._known: dict[StreamId, _Known] | None = None  # None until the service has caught up
        self._changes: list[WorkerChange] = []
        self._counts: Counter[str] = Counter()
        self.on_change: list[Callable[[WorkerChange], None]] = []
        """Called for each change, also for those that are not logged one by one; must not raise."""

    def note(self, view: View) -> None:
        """Compare one view, after a batch or after some time. A resync in progress is no news."""
        if self._known is None:
            return
        before, now = self._known.get(view.stream), _Known(view.epoch, self._freshness.state(view))
        if before == now or (before is not None and before.epoch == now.epoch and now.state is ViewState.SYNCING):
            return
        self._known[view.stream] = now
        self._add(view.stream, _verb(before, now, is_closed=view.is_closed), self._reason(view, now.state), now)

    def look(self, views: Iterable[View], now: float) -> None:
        """Compare all views twice a second, and log what has changed. now: monotonic seconds."""
        if self._freshness.is_catching_up or not self._interval.is_due(now):
            return
        views = list(views)
        if self._known is None:
            self._known = {view.stream: _Known(view.epoch, self._freshness.state(view)) for view in views}
            states = Counter(known.state.value for known in self._known.values())
            logger.info("%d worker streams are known%s", len(views), _numbers(states))
        for view in views:
            self.note(view)
        streams = {view.stream for view in views}
        for stream in [stream for stream in self._known if stream not in streams]:
            self._add(stream, "was forgotten", "", self._known.pop(stream))
        self._flush()

    def _add(self, stream: StreamId, verb: str, reason: str, known: _Known) -> None:
        self._counts[verb] += 1
        facts = {**stream._asdict(), "event": verb, "reason": reason, "epoch": known.epoch, "state": known.state}
        change = WorkerChange(stream, verb, reason, facts)
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
    if before.state is ViewState.EXPIRED:
        return "came back"
    if before.epoch != now.epoch:
        return "restarted"
    return "is live again" if now.state is ViewState.LIVE else "is stale"


def _numbers(counts: Counter[str]) -> str:
    """Return ": 3 live, 1 stale", or "" if there are none."""
    parts = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return parts and f": {parts}"
