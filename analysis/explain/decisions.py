"""The newest decisions of routers, to name those that sent a prompt somewhere."""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kv_events.decisions import Decision
from kv_events.errors import RecordRejectedError
from kv_events.log.reader import RecordChunk, scan_log
from kv_events.reservations import CHOICES, FOLDERS_BESIDE, decode_choice, singles

_MOST_BYTES = 2**25


def decisions_beside(folder: Path) -> Iterator[RecordChunk]:
    """Yield the decisions and reservations that a service wrote beside an event log."""
    for name in FOLDERS_BESIDE:
        yield from scan_log(folder / name, lambda _: None)


class RecentDecisions:
    """Keeps the encoded decisions and outcomes of the end of a log, at most 32 MiB."""

    def __init__(self) -> None:
        self._payloads: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._found: dict[tuple[int, str, float], Decision | None] = {}

    def __len__(self) -> int:
        return len(self._payloads)

    def take(self, channel: int, payload: bytes) -> None:
        """Remember a record. channel: one of CHOICES."""
        for each in singles(payload):
            self._payloads.append((channel, each))
            self._num_bytes += len(each)
        while self._num_bytes > _MOST_BYTES:
            self._num_bytes -= len(self._payloads.popleft()[1])

    def take_chunk(self, chunk: RecordChunk, wanted: npt.NDArray[np.bool_]) -> None:
        """Remember those decisions of a chunk that are wanted. wanted: bool[n]."""
        for row in np.flatnonzero(np.isin(chunk.channels, CHOICES) & wanted).tolist():
            record = chunk.record(row)
            self.take(record.channel, record.payload)

    def with_page(self, page: int, worker: str, until: float) -> Decision | None:
        """Return the newest decision for a worker, up to a time, whose prompt has a page with this sequence hash.

        Call it after the last record has been taken: answers are kept, as each one takes 30 ms.
        """
        if (page, worker, until) not in self._found:
            self._found[page, worker, until] = self._search(page, worker, until)
        return self._found[page, worker, until]

    def _search(self, page: int, worker: str, until: float) -> Decision | None:
        needle = page.to_bytes(8, "little")
        for channel, payload in reversed(self._payloads):
            if needle in payload:
                with suppress(RecordRejectedError):
                    found = decode_choice(channel, payload)
                    if isinstance(found, Decision) and found.worker == worker and found.timestamp <= until:
                        return found
        return None
