"""The position of a view in its stream: which batches are applied, and which are duplicates or too old."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class Admission(Enum):
    """What a batch is to a view. `OLD_EPOCH` and `DUPLICATE` are not applied."""

    NEXT = auto()
    """The next batch of the epoch."""
    GAP = auto()
    """A later batch of the epoch: batches before it are missing."""
    STEP_BACK = auto()
    """An earlier batch of the epoch that is not known to be a duplicate: a number before it was wrong."""
    NEW_EPOCH = auto()
    """The first batch of another epoch, with number 0."""
    NEW_EPOCH_LATE = auto()
    """The first batch of another epoch that arrives, with a later number."""
    OLD_EPOCH = auto()
    DUPLICATE = auto()

    @property
    def is_applied(self) -> bool:
        return self not in (Admission.OLD_EPOCH, Admission.DUPLICATE)

    @property
    def begins_epoch(self) -> bool:
        """Whether the batch is the first one of its epoch."""
        return self in (Admission.NEW_EPOCH, Admission.NEW_EPOCH_LATE)

    @property
    def misses_batches(self) -> bool:
        """Whether batches before this one are missing."""
        return self in (Admission.GAP, Admission.STEP_BACK, Admission.NEW_EPOCH_LATE)


class Position(NamedTuple):
    """Epoch and number of the next batch. A value: `after` returns the position behind a batch.

    Applying a batch twice changes nothing, because a number below `next_seq` is a duplicate. There are two exceptions.
    After a gap, a number that the gap skipped was never applied, so the number that jumped ahead was wrong or early.
    After a silence of two heartbeats, whatever arrives is followed: its publisher lives, and the one that was followed
    before does not. So no epoch and no number, forged ones included, can shut out a publisher for longer.
    """

    epoch: int = -1
    next_seq: int = 0
    first_missing: int | None = None
    """The lowest number that was skipped, until a resync has ended with the right digest. None: no number was."""

    def after(self, epoch: int, seq: int, *, is_silent: bool) -> tuple[Admission, Position]:
        """Judge a batch. Returns the verdict and the position behind the batch, or this position if it is refused.

        is_silent: whether no batch has been applied for two heartbeats, while the log could be read.
        """
        if epoch > self.epoch or (epoch < self.epoch and is_silent):
            late = Admission.NEW_EPOCH_LATE if seq else Admission.NEW_EPOCH
            return late, Position(epoch, seq + 1, 0 if seq else None)
        if epoch < self.epoch:
            return Admission.OLD_EPOCH, self
        if seq == self.next_seq:
            return Admission.NEXT, self._replace(next_seq=seq + 1)
        if seq > self.next_seq:
            missing = self.next_seq if self.first_missing is None else self.first_missing
            return Admission.GAP, Position(epoch, seq + 1, missing)
        if is_silent or (self.first_missing is not None and seq >= self.first_missing):
            missing = seq if self.first_missing is None else min(seq, self.first_missing)
            return Admission.STEP_BACK, Position(epoch, seq + 1, missing)
        return Admission.DUPLICATE, self


START = Position()
"""Before the first batch."""
