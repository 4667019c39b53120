"""What each batch of a log shows about its stream: gaps, restarts, resyncs and wrong digests."""

from typing import NamedTuple

from indexer.kernels import views as column
from indexer.views import View
from kv_events.codec import DecodedBatch
from kv_events.http.explanations import BatchPosition
from kv_events.records import LogRecord


class StreamChange(NamedTuple):
    """What happened to a stream between two batches that were applied."""

    gap: range | None
    """Numbers of the batches that are missing. Empty: the batch is out of order. None: there is no gap."""
    begins_epoch: bool
    is_restart: bool
    """Whether the worker has begun again, with the same page size or another one, and is heard."""
    is_resynced: bool
    """Whether a resync has ended."""
    is_wrong: bool
    """Whether the view differs from the publisher's digest."""


_NOTHING = StreamChange(None, begins_epoch=False, is_restart=False, is_resynced=False, is_wrong=False)


class StreamHistory:
    """The last batch of a stream, and what its view had counted by then."""

    def __init__(self, view: View | None = None) -> None:
        """view: of a stream that was read before. None: the stream is new."""
        self._view = view
        self._epoch, self.seq = (-1, -1) if view is None else (view.epoch, view.next_seq - 1)
        self._counts = _counts(view)

    def note(self, view: View, batch: DecodedBatch) -> StreamChange:
        """Compare a view with what it was before a batch that has been applied."""
        now = _counts(view)
        if now == self._counts and batch.epoch == self._epoch and view is self._view:
            self.seq = batch.seq
            return _NOTHING
        is_new_view, begins_epoch = view is not self._view, batch.epoch != self._epoch
        before = _counts(None) if is_new_view else self._counts
        has_gap, is_restart, is_resynced, is_wrong = (new > old for new, old in zip(now, before, strict=True))
        gap = range(0 if begins_epoch else self.seq + 1, batch.seq) if has_gap else None
        is_restart = is_restart or (is_new_view and self._view is not None)
        self._view, self._epoch, self.seq, self._counts = view, batch.epoch, batch.seq, now
        return StreamChange(gap, begins_epoch, is_restart, is_resynced, is_wrong)


def batch_position(index: int | None, record: LogRecord, batch: DecodedBatch, time_s: float) -> BatchPosition:
    """Return where a batch is in its log. index: None in a topic. time_s: seconds since 1970."""
    pages = batch.pages()
    return BatchPosition(
        index=index,
        partition=record.partition,
        offset=record.offset,
        time=time_s,
        epoch=batch.epoch,
        seq=batch.seq,
        pages_stored=pages.stored.total(),
        pages_removed=pages.removed.total(),
    )


def _counts(view: View | None) -> tuple[int, int, int, int]:
    if view is None:
        return 0, 0, 0, 0
    numbers = view.numbers  # read one by one, because a copy of all counts would take a third of an audit's time
    return numbers[column.GAPS], numbers[column.RESTARTS], numbers[column.RESYNCS], numbers[column.MISMATCHES]
