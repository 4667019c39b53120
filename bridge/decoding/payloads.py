"""Encoded batches, one after the other in one buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kv_events.engine_wire import Payload

I64Array = npt.NDArray[np.int64]


class Payloads:
    """A sequence of n payloads. A part of one is a view of the same buffer."""

    __slots__ = ("borders", "data")

    def __init__(self, data: memoryview, borders: I64Array) -> None:
        """borders: int64[n + 1], ascending positions in `data`. Payload i is at `borders[i]:borders[i + 1]`."""
        self.data = data
        self.borders = borders

    @classmethod
    def of(cls, payloads: Sequence[Payload]) -> Payloads:
        """Put payloads into one buffer. A single payload of bytes is not copied."""
        joined = memoryview(b"".join(payloads))
        return cls(joined, np.array([0, *accumulate(map(len, payloads))], np.int64))

    def __len__(self) -> int:
        return len(self.borders) - 1

    def __getitem__(self, number: int) -> memoryview:
        start, stop = self.borders[number : number + 2].tolist()
        return self.data[start:stop]

    def __iter__(self) -> Iterator[memoryview]:
        return map(self.__getitem__, range(len(self)))

    @property
    def num_bytes(self) -> int:
        """Total size."""
        return int(self.borders[-1] - self.borders[0])

    @property
    def longest(self) -> int:
        """Size of the longest payload; 0 if there are none."""
        return int(np.diff(self.borders).max(initial=0))

    def part(self, start: int, stop: int) -> Payloads:
        """Payloads start:stop."""
        return Payloads(self.data, self.borders[start : stop + 1])
