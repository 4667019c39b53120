"""What an audit sees over time, for curves: collected while the log is read, in bounded memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from analysis.audit.report import StreamReport
from analysis.curves import ChartMarker, Levels, Sums, TimeBins
from analysis.kernels.residency import COUNT_NAMES
from analysis.stream_history import StreamChange
from indexer.views import View, ViewState
from kv_events.schema import NUM_MEDIA

MOST_WORKERS = 1024
"""Workers with a curve of their own. The pages of others only count in the sums."""
MOST_MARKS = 4096
_LATEST_MS = 253_402_300_799_000
"""The end of the year 9999. Records after it, or before 1970, come from a broken clock. No axis has room for them."""

GAP, RESTART, DIGEST, RESYNC = "gap", "restart", "wrong digest", "resync"
"""Kinds of marks, besides the states `stale` and `syncing`, which last."""
PROMPT, FLEET, CHOSEN, PREDICTED, ANSWERED, DELIVERED, OFFERED, BEST, TAKEN, MEAN = range(10)
"""What is summed up of requests, in tokens: their prompts, the steps of the funnel, and the prompts of those with an
outcome. Of the requests with candidates: their prompts, and what the best, the chosen and the average candidate held.
"""


@dataclass
class _Stream:
    """What was last seen of a stream."""

    is_new: bool = True
    """Whether the log begins before its first batch, and nothing has happened to it yet."""
    pages: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_MEDIA, np.int64))
    """[NUM_MEDIA] that it holds."""
    had_mismatch: bool = False
    state: ViewState = ViewState.LIVE
    since_ms: int = 0
    until_ms: int = 0


class AuditCurves:
    """Takes batches and decisions in the order of the log. Times are those of the log's records."""

    def __init__(self) -> None:
        self.bins = TimeBins()
        self.pages = Sums(self.bins, len(COUNT_NAMES) * NUM_MEDIA)
        """[bins, names * media] pages by what happened to them, see `analysis.kernels.residency`."""
        self.batches = Sums(self.bins, 1)
        """[bins, 1] batches that were applied, heartbeats included."""
        self.tiers = Levels(self.bins, NUM_MEDIA)
        """[bins, media] pages held, summed over all streams."""
        self.workers: dict[str, Levels] = {}
        """Worker -> [bins, 1] pages held, summed over its streams and the media."""
        self.requests = Sums(self.bins, MEAN + 1)
        """[bins, 10] tokens of requests, by the time of their decision."""
        self.marks: list[ChartMarker] = []
        self.num_more_marks = 0
        """Marks for which there was no room."""
        self._streams: dict[str, _Stream] = {}
        self._held = np.zeros(NUM_MEDIA, np.int64)
        self._held_by: dict[str, int] = {}
        self._counted = np.zeros(len(COUNT_NAMES) * NUM_MEDIA, np.int64)

    def begin_with(self, report: StreamReport, view: View) -> None:
        """Note what a stream held before the log."""
        stream = self._streams[report.stream] = _Stream(is_new=False)
        self._note_pages(None, report.worker, stream, np.array(view.num_pages, np.int64))

    def note_batch(
        self,
        ms: int,
        report: StreamReport,
        view: View,
        counts: npt.NDArray[np.int64],
        change: StreamChange,
        *,
        is_sound: bool,
    ) -> None:
        """Note a batch that was applied.

        counts: [names * media] pages so far, of all streams. change: what the batch showed, less what precedes the log.
        is_sound: whether the view is live, or incomplete only because the log begins after the first batches.
        """
        if not 0 <= ms <= _LATEST_MS:
            return
        place = self.bins.place(ms)
        self.pages.values[place] += counts - self._counted
        self._counted[:] = counts
        self.batches.values[place] += 1
        stream = self._streams.get(report.stream)
        if stream is None:
            stream = self._streams[report.stream] = _Stream()
        self._note_pages(place, report.worker, stream, np.array(view.num_pages, np.int64))
        self._note_change(ms, report, stream, change)
        shown = ViewState.STALE if view.state is ViewState.LIVE else view.state  # a degraded view is stale
        self._note_state(ms, report.stream, stream, ViewState.LIVE if is_sound else shown)

    def note_choice(self, ms: int, prompt: int, best: int, chosen: int, predicted: int, offered: Sequence[int]) -> None:
        """Note a decision. offered: tokens that each candidate held."""
        if not 0 <= ms <= _LATEST_MS:
            return
        place = self.bins.place(ms)
        tokens = self.requests.values[place]
        tokens[[PROMPT, FLEET, CHOSEN, PREDICTED]] += (prompt, best, chosen, predicted)
        if offered:
            tokens[[OFFERED, BEST, TAKEN, MEAN]] += (prompt, max(offered), chosen, round(sum(offered) / len(offered)))

    def note_outcome(self, ms: int, prompt: int, delivered: int) -> None:
        """Note what the engine reused. ms: time of the decision."""
        if 0 <= ms <= _LATEST_MS:
            self.requests.values[self.bins.place(ms)][[ANSWERED, DELIVERED]] += (prompt, delivered)

    def finish(self) -> None:
        """Note the states that last until the end. Called once, after the last record."""
        for name, stream in self._streams.items():
            self._note_state(stream.until_ms, name, stream, ViewState.LIVE)

    def _note_pages(self, place: int | None, worker: str, stream: _Stream, pages: npt.NDArray[np.int64]) -> None:
        """place: None: before the log."""
        change, stream.pages = pages - stream.pages, pages
        self._held += change
        self.tiers.set(place, self._held)
        levels = self._levels(worker)
        if levels is not None:
            self._held_by[worker] += int(change.sum())
            levels.set(place, self._held_by[worker])

    def _levels(self, worker: str) -> Levels | None:
        if worker not in self.workers and len(self.workers) < MOST_WORKERS:
            self.workers[worker], self._held_by[worker] = Levels(self.bins, 1), 0
        return self.workers.get(worker)

    def _note_change(self, ms: int, report: StreamReport, stream: _Stream, change: StreamChange) -> None:
        is_first = stream.is_new and not report.earlier_batches  # a stream begins with a resync
        has = {
            GAP: change.gap is not None,
            RESTART: change.is_restart,
            DIGEST: change.is_wrong,
            RESYNC: change.is_resynced,
        }
        is_repeated = {DIGEST: stream.had_mismatch, RESYNC: is_first}
        for kind in has:
            if has[kind] and not is_repeated.get(kind):
                self._mark(ChartMarker(report.stream, kind, ms, ms))
        stream.had_mismatch, stream.is_new = change.is_wrong, stream.is_new and not any(has.values())

    def _note_state(self, ms: int, name: str, stream: _Stream, state: ViewState) -> None:
        stream.until_ms = max(stream.until_ms, ms)
        if state is not stream.state:
            if stream.state is not ViewState.LIVE:
                self._mark(ChartMarker(name, stream.state.value, stream.since_ms, stream.until_ms))
            stream.state, stream.since_ms, stream.until_ms = state, ms, ms

    def _mark(self, mark: ChartMarker) -> None:
        if len(self.marks) < MOST_MARKS:
            self.marks.append(mark)
        else:
            self.num_more_marks += 1
