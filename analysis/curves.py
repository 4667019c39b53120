"""Curves over a span of time that is not known in advance, in bounded memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MOST_BINS = 512
_NARROWEST_MS = 125


class ChartMarker(NamedTuple):
    """Something that happened to a stream."""

    stream: str
    kind: str
    begin_ms: int
    end_ms: int


class TimeBins:
    """Equal bins of time. When the span outgrows them, each is joined with its neighbour, in all columns."""

    def __init__(self) -> None:
        self.width_ms = _NARROWEST_MS
        self.origin_ms: int | None = None
        """Beginning of bin 0. None until the first time."""
        self.first_ms = self.last_ms = 0
        """The earliest and the latest time."""
        self._columns: list[Sums | Levels] = []

    @property
    def shown(self) -> slice:
        """The bins from the earliest to the latest time."""
        if self.origin_ms is None:
            return slice(0, 0)
        first, last = ((ms - self.origin_ms) // self.width_ms for ms in (self.first_ms, self.last_ms))
        return slice(first, last + 1)

    @property
    def middles_ms(self) -> npt.NDArray[np.float64]:
        """[shown] the middle of each bin, in milliseconds since 1970."""
        begins = np.arange(MOST_BINS, dtype=np.float64)[self.shown] * self.width_ms
        return begins + (self.origin_ms or 0) + self.width_ms / 2

    @property
    def seconds(self) -> npt.NDArray[np.float64]:
        """[shown] the duration of each bin. The last one has only begun."""
        durations = np.full(MOST_BINS, self.width_ms / 1000)[self.shown]
        if self.origin_ms is not None:
            durations[-1] = ((self.last_ms - self.origin_ms) % self.width_ms + 1) / 1000
        return durations

    def place(self, ms: int) -> int:
        """Return the bin of a time. Bins that were placed before may be joined."""
        if self.origin_ms is None:
            self.origin_ms = self.first_ms = self.last_ms = ms
        self.first_ms, self.last_ms = min(self.first_ms, ms), max(self.last_ms, ms)
        while not 0 <= (found := (ms - self.origin_ms) // self.width_ms) < MOST_BINS:
            start = 0 if found > 0 else MOST_BINS // 2
            self.origin_ms -= start * 2 * self.width_ms
            self.width_ms *= 2
            for column in self._columns:
                column.join(start)
        return found

    def add(self, column: Sums | Levels) -> None:
        """Join the bins of this column, too, from now on."""
        self._columns.append(column)


class Sums:
    """Amounts that are summed up in each bin."""

    def __init__(self, bins: TimeBins, width: int) -> None:
        self.values = np.zeros((MOST_BINS, width), np.int64)
        """[MOST_BINS, width]"""
        bins.add(self)

    def join(self, start: int) -> None:
        """Join each bin with its neighbour, and move the result to `start` and behind."""
        joined = self.values[::2] + self.values[1::2]
        self.values[:] = 0
        self.values[start : start + len(joined)] = joined


class Levels:
    """A level at the end of each bin. A bin without any keeps the level before it."""

    def __init__(self, bins: TimeBins, width: int) -> None:
        self._values = np.full((MOST_BINS, width), -1, np.int64)
        self._before = np.zeros(width, np.int64)
        bins.add(self)

    def set(self, number: int | None, values: npt.ArrayLike) -> None:
        """Set the newest level of a bin; None: the level before the first one. values: [width], not negative."""
        if number is None:
            self._before[:] = values
        else:
            self._values[number] = values

    @property
    def values(self) -> npt.NDArray[np.int64]:
        """[MOST_BINS, width]"""
        known = np.where(self._values[:, 0] >= 0, np.arange(MOST_BINS), -1)
        newest = np.maximum.accumulate(known)
        return np.where(newest[:, None] >= 0, self._values[newest], self._before)

    def join(self, start: int) -> None:
        """Join each bin with its neighbour, and move the result to `start` and behind."""
        earlier, later = self._values[::2], self._values[1::2]
        joined = np.where(later >= 0, later, earlier)
        self._values[:] = -1
        self._values[start : start + len(joined)] = joined


class Groups:
    """Consecutive bins, joined into few enough groups for a smooth curve."""

    def __init__(self, bins: TimeBins, most: int) -> None:
        """most: of groups. bins: at least one is shown."""
        self._shown = bins.shown
        seconds = bins.seconds
        size = -(-len(seconds) // most)
        starts = np.arange(0, len(seconds), size)
        if len(starts) > 2 and seconds[starts[-1] :].sum() < seconds[:size].sum() / 2:
            starts = starts[:-1]  # a group that has hardly begun would show anything
        self._starts = starts
        self.seconds: npt.NDArray[np.float64] = np.add.reduceat(seconds, starts)
        """[groups] durations"""
        self.at_ms = bins.middles_ms[starts] - bins.width_ms / 2 + self.seconds * 500
        """[groups] the middle of each group"""
        self.width_s = size * bins.width_ms / 1000

    def sums(self, sums: Sums) -> npt.NDArray[np.int64]:
        """Return the amounts of each group, [groups, width]."""
        joined: npt.NDArray[np.int64] = np.add.reduceat(sums.values[self._shown], self._starts, axis=0)
        return joined
