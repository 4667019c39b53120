"""Whether the next batch of an engine is the one that follows. Judged by sequence number and content; no I/O.

The protocol does not mark restarts. An engine was restarted if its numbers went back, or if a number came again with
different content. So a hash of the content is kept, of the last batch and of those that were replayed before it.
"""

import math
import time
from collections import OrderedDict, deque
from enum import Enum, auto

import numpy as np
import xxhash

from kv_events.engine_wire import Payload
from kv_events.hashing import U64Array

_MAX_AHEAD = 100_000
_MANY_RESTARTS, _MANY_WITHIN_S, _QUIET_S = 10, 10.0, 30.0


class BatchOrder(Enum):
    """What a live batch is, given those before it."""

    APPLY = auto()
    """The expected one."""
    DUPLICATE = auto()
    """It was applied before, from a replay."""
    GAP = auto()
    """Batches before it are missing."""
    RESTART = auto()
    """It is of another incarnation of the engine."""


class SequenceCheck:
    """What was applied of one engine incarnation, and what of it came live."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin with another incarnation, whose numbers start again."""
        self.expected = 0
        """Number of the next batch to apply."""
        self._last_applied: int | None = None  # content hash of the batch before it
        self._last_live, self._last_live_content = -1, 0
        self._ahead: OrderedDict[int, int] = OrderedDict()  # number -> content hash, of replayed batches

    @property
    def has_begun(self) -> bool:
        """Whether a batch of this incarnation was applied."""
        return self._last_applied is not None

    def classify(self, seq: int, payload: Payload) -> BatchOrder:
        """Judge a live batch. Changes nothing."""
        if seq <= self._last_live:
            is_last_again = seq == self._last_live and _content_hash(payload) == self._last_live_content
            return BatchOrder.DUPLICATE if is_last_again else BatchOrder.RESTART
        if seq < self.expected:
            known = self._ahead.get(seq)
            return BatchOrder.DUPLICATE if known is None or known == _content_hash(payload) else BatchOrder.RESTART
        return BatchOrder.APPLY if seq == self.expected else BatchOrder.GAP

    def num_in_order(self, seqs: U64Array) -> int:
        """How many of these live batches, from the first one on, are to be applied: each is the expected one."""
        if not len(seqs) or int(seqs[0]) != self.expected or self._last_live >= self.expected:
            return 0
        follows = (np.diff(seqs) == 1) & (seqs[1:] > 0)  # the highest number is followed by none
        return len(seqs) if follows.all() else int(np.argmin(follows)) + 1

    def applied_live(self, seq: int, payload: Payload) -> None:
        """Note the last one of several live batches that were in order and were applied."""
        self.note_live(seq, payload)
        self._last_applied, self.expected = self._last_live_content, seq + 1

    def note_live(self, seq: int, payload: Payload) -> None:
        self._last_live, self._last_live_content = seq, _content_hash(payload)
        while self._ahead and next(iter(self._ahead)) <= seq:
            self._ahead.popitem(last=False)

    def applied(self, seq: int, payload: Payload) -> None:
        """Note a batch that was applied. Batches missing before it are no longer expected."""
        self.expected = seq + 1
        content = self._last_applied = _content_hash(payload)
        if seq > self._last_live:
            self._ahead[seq] = content
            if len(self._ahead) > _MAX_AHEAD:
                self._ahead.popitem(last=False)

    def is_last_applied(self, payload: Payload) -> bool:
        """Whether this is the content of the batch before the expected one."""
        return _content_hash(payload) == self._last_applied


class RestartLimit:
    """Detects several engines that send on one address: each makes the other look restarted."""

    def __init__(self) -> None:
        self._restarts: deque[float] = deque(maxlen=_MANY_RESTARTS)
        self._quiet_until = -math.inf

    def is_exceeded(self) -> bool:
        """Whether batches should be ignored at present."""
        return time.monotonic() < self._quiet_until

    def restarted(self) -> bool:
        """Count a restart. Returns True if that exceeds the limit; batches should then be ignored for a while."""
        now = time.monotonic()
        self._restarts.append(now)
        if len(self._restarts) < _MANY_RESTARTS or now - self._restarts[0] >= _MANY_WITHIN_S:
            return False
        self._restarts.clear()
        self._quiet_until = now + _QUIET_S
        return True


def _content_hash(payload: Payload) -> int:
    return xxhash.xxh3_64_intdigest(payload)
