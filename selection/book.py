"""The book: what is reserved on each rank of each worker, from the records of all replicas.

Every replica applies the same records (`kv_events.reservations`), its own ones at once. A record that is
applied twice changes nothing. A reservation of which nothing was heard for the time-to-live expires.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kv_events.errors import KvsightError
from kv_events.kernels.bundles import pin
from kv_events.kernels.load import load
from kv_events.kernels.page_table import num_live
from kv_events.limits import MAX_REQUEST_ID_BYTES
from kv_events.reservations import STEPS, ReservationRecord, Reserved, reservation_id, time_of
from kv_events.streams import StreamId
from selection.kernels import reservations as kernels

MAX_RESERVATIONS = 2**17
MAX_PAGES = 2**23
MAX_PLACES = 2**16
LONGEST_S = 3600.0
"""Age of the oldest records from which a book is rebuilt."""
_NEVER = 0.0


class BookFullError(KvsightError):
    """There is no room for another reservation. Try again later."""

    retriable = True


class Booked(NamedTuple):
    """What is booked on a rank."""

    requests: int = 0
    prefill_tokens: int = 0
    decode_pages: int = 0


class Book:
    """Reservations by id, and their sums. One thread calls it."""

    def __init__(
        self,
        ttl_s: float,
        predict_s: float,
        *,
        max_reservations: int = MAX_RESERVATIONS,
        max_pages: int = MAX_PAGES,
        max_places: int = MAX_PLACES,
    ) -> None:
        """ttl_s: seconds without a record after which a reservation expires. predict_s: seconds for which the pages of
        a new one count as held; 0: they do not.
        """
        load()
        self.ttl_s = ttl_s
        self.predict_s = predict_s
        self.columns = kernels.make_book(max_reservations, max_pages, max_places)
        self.pinned = pin(self.columns)
        """For kernels."""
        self.num_changes = 0
        """Changes with the numbers of places."""
        self._max = max_reservations
        self._max_pages = max_pages
        self._max_places = max_places
        self._places: dict[StreamId, int] = {}
        self._free: list[int] = []  # numbers of places that were forgotten

    @property
    def num_expired(self) -> int:
        """Reservations that expired so far."""
        return int(self.columns.state[kernels.NUM_EXPIRED])

    def __len__(self) -> int:
        return num_live(self.columns.names)

    def __contains__(self, reservation_id: str) -> bool:
        return self._entry(reservation_id) != kernels.NONE

    def __iter__(self) -> Iterator[str]:
        """Yield the ids of all reservations, those that expire first before others."""
        for entry in self._entries().tolist():
            begin = entry * MAX_REQUEST_ID_BYTES
            size = self.columns.numbers.item(entry, kernels.NAME_BYTES)
            yield self.columns.texts[begin : begin + size].tobytes().decode()

    def output_blocks(self, reservation_id: str) -> int:
        """Return how many pages of output a reservation has, 0 if it is unknown or has ended."""
        entry = self._entry(reservation_id)
        return 0 if entry == kernels.NONE else self.columns.numbers.item(entry, kernels.OUTPUT_BLOCKS)

    def _entry(self, reservation_id: str) -> int:
        return kernels.find_reservation(self.pinned, reservation_id.encode())

    def _entries(self) -> npt.NDArray[np.int64]:
        entries = np.empty(len(self), np.int64)
        kernels.list_entries(self.pinned, entries)
        return entries

    def place(self, rank: StreamId) -> int:
        """Return the number of a rank, its place. -1: nothing was ever booked there."""
        return self._places.get(rank, -1)

    def booked(self, rank: StreamId) -> Booked:
        """Return what is booked on a rank."""
        if (place := self.place(rank)) < 0:
            return Booked()
        tokens, pages, requests = (each[place].item() for each in self.columns.loads)
        return Booked(requests, tokens, round(pages))

    def all_booked(self) -> dict[StreamId, Booked]:
        """Return what is booked on each rank that has reservations."""
        return {rank: booked for rank in self._places if (booked := self.booked(rank)).requests}

    def apply(self, record: ReservationRecord, now: float) -> bool:
        """Apply a record. Returns False if it means nothing: a known id is reserved again, or an unknown one goes on.

        Raises BookFullError for a reservation without room.
        """
        self.expire(now)
        if isinstance(record, Reserved) and record.decision.timestamp + self.ttl_s <= now:
            return False
        return self._apply(record, now, now)

    def restore(self, record: ReservationRecord, now: float) -> bool:
        """Apply a record of the past, by its own time. See `apply`. `settle` must follow the last one."""
        kernels.forget_predicted(self.pinned, now)  # of what was released, or the past would fill the book
        name, at = reservation_id(record).encode(), min(time_of(record), now)
        entry = kernels.find_reservation(self.pinned, name)
        if entry != kernels.NONE and self.columns.times[entry, kernels.TOUCHED_AT] + self.ttl_s <= at:
            kernels.progress(self.pinned, name, kernels.AT_END, 0, kernels.UNCHANGED, now)
            self.columns.state[kernels.NUM_EXPIRED] += 1
        return self._apply(record, now, at)

    def settle(self, now: float) -> None:
        """Expire what records of the past left behind."""
        entries = self._entries()
        touched_at = self.columns.times[entries, kernels.TOUCHED_AT]
        kernels.put_in_order(self.pinned, entries[np.argsort(touched_at, kind="stable")])
        self.expire(now)

    def expire(self, now: float) -> None:
        """End reservations that have expired, and forget predictions that have."""
        kernels.expire(self.pinned, now, self.ttl_s)

    def _apply(self, record: ReservationRecord, now: float, at: float) -> bool:
        """at: the time from which on a reservation can expire."""
        name = reservation_id(record).encode()
        if not isinstance(record, Reserved):
            fraction = kernels.UNCHANGED if record.decay_fraction is None else record.decay_fraction
            numbers = STEPS.index(record.step), record.output_blocks, fraction
            return kernels.progress(self.pinned, name, *numbers, at)
        decision = record.decision
        if decision.request_id in self:
            return False
        hashes = np.frombuffer(decision.sequence_hashes, "<u8")
        if len(self) == self._max:
            raise BookFullError(f"{self._max} requests are reserved")
        if num_live(self.columns.pages.table) + len(hashes) > self._max_pages:
            raise BookFullError(f"{self._max_pages} pages are booked")
        place = self.number(StreamId(decision.model, decision.tenant, decision.worker, decision.dp_rank or 0))
        times = at, self.held_until(min(decision.timestamp, now))
        return kernels.reserve(self.pinned, name, hashes, place, record.prefill_tokens, times)

    def held_until(self, at: float) -> float:
        """Return until when the pages of a reservation of a moment count as held, in seconds since 1970."""
        return at + self.predict_s if self.predict_s else _NEVER

    def number(self, rank: StreamId) -> int:
        """Return the place of a rank, a new one if it has none yet. Raises BookFullError."""
        number = self._places.get(rank)
        if number is None:
            if len(self._places) == self._max_places:
                self._free_places()
            number = self._free.pop() if self._free else len(self._places)
            self._places[rank] = number
            self.num_changes += 1
        return number

    def _free_places(self) -> None:
        """Forget places where nothing is booked or predicted. Raises BookFullError if there is none."""
        columns = self.columns
        used = set(columns.numbers[self._entries(), kernels.PLACE].tolist())
        used.update(columns.predicted[: columns.state[kernels.NUM_PREDICTED], 0].tolist())
        self._free = [number for number in self._places.values() if number not in used]
        if not self._free:
            raise BookFullError(f"requests are placed on {self._max_places} ranks of workers")
        self._places = {rank: number for rank, number in self._places.items() if number in used}
