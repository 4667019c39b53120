"""Batches of one engine stream as they arrived, still encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bridge.decoding.payloads import Payloads
from kv_events.engine_wire import Payload
from kv_events.hashing import U64Array


class LiveBatches(NamedTuple):
    """Batches in the order of their arrival."""

    seqs: U64Array
    """[n] sequence numbers."""
    payloads: Payloads
    """n payloads."""

    @classmethod
    def of(cls, batches: Sequence[tuple[int, Payload]]) -> LiveBatches:
        """Join batches that are given as (sequence number, payload)."""
        seqs = np.array([seq for seq, _ in batches], np.uint64)
        return cls(seqs, Payloads.of([payload for _, payload in batches]))

    def one(self, number: int) -> tuple[int, Payload]:
        """Sequence number and payload of one batch."""
        return int(self.seqs[number]), self.payloads[number]

    def part(self, start: int, stop: int) -> LiveBatches:
        """Batches start:stop."""
        return LiveBatches(self.seqs[start:stop], self.payloads.part(start, stop))
