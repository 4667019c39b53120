"""Is the next batch the next one? The order of one engine's batches, judged by number and content. No I/O.

The protocol has no mark of an incarnation. That an engine was restarted shows when its numbers go back, or when a
number comes again with another content; so the newest batches are remembered, the last one as it is, others by hash.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from enum import Enum, auto

import xxhash

from kv_events.engine_wire import Payload

_MOST_AHEAD = 100_000
_MANY_RESTARTS, _MANY_WITHIN_S, _QUIET_S = 10, 10.0, 30.0


class Verdict(Enum):
    """What to do with a live batch."""

    APPLY = auto()
    DUPLICATE = auto()
    """It was replayed before it came."""
    GAP = auto()
    """Batches before it are missing."""
    RESTART = auto()
    """It is of another incarnation than those before it."""


class Continuity:
    """What was applied, and what came live."""

    def __init__(self) -> None:
        self.expected = 0
        """Number of the next batch to apply."""
        self._last_applied: Payload | None = None  # the batch before it
        self._last_live = -1
        self._last_live_payload: Payload = b""
        self._ahead: OrderedDict[int, int] = OrderedDict()  # number -> content of what was replayed and may come live

    @property
    def has_begun(self) -> bool:
        """Whether a batch was applied in this incarnation."""
        return self._last_applied is not None

    def judge(self, seq: int, payload: Payload) -> Verdict:
        """A live batch; changes nothing."""
        if seq <= self._last_live:
            is_last_again = seq == self._last_live and payload == self._last_live_payload
            return Verdict.DUPLICATE if is_last_again else Verdict.RESTART
        if seq < self.expected:
            known = self._ahead.get(seq)
            return Verdict.DUPLICATE if known is None or known == _content(payload) else Verdict.RESTART
        return Verdict.APPLY if seq == self.expected else Verdict.GAP

    def came_live(self, seq: int, payload: Payload) -> None:
        """A live batch is of this incarnation."""
        self._last_live, self._last_live_payload = seq, payload
        while self._ahead and next(iter(self._ahead)) <= seq:
            self._ahead.popitem(last=False)

    def applied(self, seq: int, payload: Payload) -> None:
        """A batch was applied; whatever is missing before it is given up."""
        self.expected = seq + 1
        self._last_applied = payload
        if seq > self._last_live:
            self._ahead[seq] = _content(payload)
            if len(self._ahead) > _MOST_AHEAD:
                self._ahead.popitem(last=False)

    def is_last_applied(self, payload: Payload) -> bool:
        """Whether this is the content of the batch before the expected one."""
        return payload == self._last_applied

    def restart(self) -> None:
        """Another incarnation: numbers begin anew."""
        self.__init__()  # type: ignore[misc]


class RestartLimit:
    """No engine is restarted so often as several that send on one address seem to be, each by the other's batches."""

    def __init__(self) -> None:
        self._restarts: deque[float] = deque(maxlen=_MANY_RESTARTS)
        self._quiet_until = -math.inf

    def is_exceeded(self) -> bool:
        """Whether nothing should be taken at present."""
        return time.monotonic() < self._quiet_until

    def restarted(self) -> bool:
        """One restart more. True: that were too many, from now on for a while."""
        now = time.monotonic()
        self._restarts.append(now)
        if len(self._restarts) < _MANY_RESTARTS or now - self._restarts[0] >= _MANY_WITHIN_S:
            return False
        self._restarts.clear()
        self._quiet_until = now + _QUIET_S
        return True


def _content(payload: Payload) -> int:
    return xxhash.xxh3_64_intdigest(payload)
