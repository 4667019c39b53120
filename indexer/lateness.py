"""How late the batches of a publisher arrive, although its clock may differ from ours and may be set."""

from __future__ import annotations

import math

import msgspec

from kv_events.streams import HEARTBEAT_S

LATE_S = 2 * HEARTBEAT_S + 0.5
"""Silence after which two heartbeats are missing. A batch that is later than this tells of the past."""

_JITTER_S = 1.0
_DRIFT = 0.001  # of two clocks, seconds a second
_STEADY_S = 2.5
_STEADY_WITHIN_S = 0.3


class Lateness(msgspec.Struct, array_like=True):  # its fields are part of key frames
    """The lateness of a stream's newest batch, against the most punctual one before it.

    At first, both clocks are believed to be right: the first batch may be late as well.
    After an outage, a publisher first sends the batches that have waited. They are right about a time that has passed.
    A batch whose time is before that of its predecessor shows that a clock was set back; so does a lateness that stays
    the same for some seconds.
    """

    seconds: float = 0.0
    """Lateness of the newest batch."""
    _transit_s: float = math.inf  # of a punctual batch: difference of the clocks included
    _made_at: float = -math.inf
    _tick: float = -math.inf
    _steady_tick: float = 0.0  # of the batch that the steady lateness is counted from
    _steady_s: float = math.inf  # its lateness

    def note(self, made_at: float, at: float, tick: float) -> None:
        """Record the arrival of a batch.

        made_at: by the publisher's clock. at: by ours, in seconds since 1970, too. tick: by our clock that never goes
        back.
        """
        if self._transit_s == math.inf:
            self._transit_s = tick - at
        else:
            self._transit_s += _DRIFT * (tick - self._tick)
        transit_s = tick - made_at
        if made_at < self._made_at or transit_s < self._transit_s or self._is_steady(transit_s - self._transit_s, tick):
            self._transit_s = transit_s
        self.seconds = transit_s - self._transit_s
        self._made_at, self._tick = made_at, tick

    @property
    def is_plain(self) -> bool:
        """Whether the clocks agree, so that no batch that is punctual by both tells of the past."""
        return abs(self._transit_s) < _JITTER_S / 2

    @property
    def lag_s(self) -> float:
        """Seconds by which the newest batch tells of the past, at most LATE_S. Small differences are none."""
        return min(self.seconds, LATE_S) if self.seconds > _JITTER_S else 0.0

    @property
    def is_behind(self) -> bool:
        """Whether the newest batch tells of the past."""
        return self.seconds > LATE_S

    def _is_steady(self, late_s: float, tick: float) -> bool:
        if not abs(late_s - self._steady_s) <= _STEADY_WITHIN_S:
            self._steady_s, self._steady_tick = late_s, tick
        return tick - self._steady_tick >= _STEADY_S
