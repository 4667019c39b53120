"""The book: what is reserved on each rank of each worker, from the records of all replicas.

Every replica applies the same records (`kv_events.reservations`), its own ones at once. A record that is
applied twice changes nothing. A reservation of which nothing was heard for the time-to-live expires.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kv_events.errors import KvsightError
from kv_events.hashing import U64Array
from kv_events.kernels.bundles import pin
from kv_events.kernels.load import load
from kv_events.kernels.page_table import num_live
from kv_events.reservations import (
    PREFILL_COMPLETE,
    RELEASED,
    Progressed,
    ReservationRecord,
    Reserved,
    reservation_id,
    time_of,
)
from kv_events.streams import StreamId
from selection.kernels.booked import LoadColumns, count_own, make_pages, release, reserve
from selection.kernels.weigh import RosterColumns, weigh

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


class Reservation(msgspec.Struct, gc=False):
    """A request that has been placed and has not ended. The collector skips it: there can be a hundred thousand."""

    name: str
    placed_at: float
    """Seconds since 1970, as the other times."""
    place: int
    hashes: U64Array
    """Of the pages that were booked."""
    prefill_tokens: int
    """Tokens that are still to be computed."""
    touched_at: float
    """When the newest record about it came."""
    output_blocks: int = 0
    decayed: float = 0.0
    """Pages by which its own ones count less."""


def _loads(size: int) -> LoadColumns:
    return LoadColumns(np.zeros(size, np.int64), np.zeros(size), np.zeros(size, np.int64))


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
        self.num_expired = 0
        """Reservations that expired so far."""
        self.loads = _loads(64)
        """What is booked, by the number of a place. The arrays change with the book."""
        self._max = max_reservations
        self._max_pages = max_pages
        self.num_changes = 0
        """Changes with the numbers of places, and whenever other arrays replace `loads`."""
        self._max_places = max_places
        self._places: dict[StreamId, int] = {}
        self._free: list[int] = []  # numbers of places that were forgotten
        self._reservations: OrderedDict[str, Reservation] = OrderedDict()  # the one that expires first comes first
        self.pages = make_pages(max_pages)
        """For kernels."""
        self._pinned = pin(self.pages)
        self._pin_loads()
        self._predicted: deque[tuple[float, int, U64Array]] = deque()  # pages of ended ones: until, place, hashes

    def __len__(self) -> int:
        return len(self._reservations)

    def __contains__(self, reservation_id: str) -> bool:
        return reservation_id in self._reservations

    def get(self, reservation_id: str) -> Reservation | None:
        """Return a reservation, or None if it is unknown or has ended."""
        return self._reservations.get(reservation_id)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._reservations.values())

    def place(self, rank: StreamId) -> int:
        """Return the number of a rank, its place. -1: nothing was ever booked there."""
        return self._places.get(rank, -1)

    def booked(self, rank: StreamId) -> Booked:
        """Return what is booked on a rank."""
        if (place := self.place(rank)) < 0:
            return Booked()
        tokens, pages, requests = (each[place].item() for each in self.loads)
        return Booked(requests, tokens, round(pages))

    def all_booked(self) -> dict[StreamId, Booked]:
        """Return what is booked on each rank that has reservations."""
        return {rank: booked for rank in self._places if (booked := self.booked(rank)).requests}

    def weigh(
        self,
        hashes: U64Array,
        streams: npt.NDArray[np.int32],
        pages: npt.NDArray[np.uint32],
        roster: RosterColumns,
        numbers: tuple[int, int, int],
        times: tuple[float, float],
    ) -> int:
        """Call the kernel of this name. roster: pinned."""
        return weigh(self._pinned, hashes, streams, pages, roster, self._pinned_loads, numbers, times)

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
        name, at = reservation_id(record), min(time_of(record), now)
        known = self._reservations.get(name)
        if known is not None and known.touched_at + self.ttl_s <= at:
            self._expire(name, now)
        return self._apply(record, now, at)

    def settle(self, now: float) -> None:
        """Expire what records of the past left behind."""
        self._reservations = OrderedDict(sorted(self._reservations.items(), key=lambda item: item[1].touched_at))
        self.expire(now)

    def expire(self, now: float) -> None:
        """End reservations that have expired, and forget predictions that have."""
        while self._reservations:
            first = next(iter(self._reservations))
            if self._reservations[first].touched_at + self.ttl_s > now:
                break
            self._expire(first, now)
        while self._predicted and self._predicted[0][0] <= now:
            _, place, hashes = self._predicted.popleft()
            release(self._pinned, self._pinned_loads, hashes, place, 0, 0, 0.0, now)

    def _apply(self, record: ReservationRecord, now: float, at: float) -> bool:
        """at: the time from which on a reservation can expire."""
        if isinstance(record, Reserved):
            return self._reserve(record, now, at)
        reservation = self._reservations.get(record.reservation_id)
        if reservation is None:
            return False
        if record.step == RELEASED:
            self._end(record.reservation_id, now)
        else:
            self._progress(reservation, record)
            self._touch(reservation, at)
        return True

    def _reserve(self, record: Reserved, now: float, at: float) -> bool:
        decision = record.decision
        if decision.request_id in self._reservations:
            return False
        hashes = np.frombuffer(decision.sequence_hashes, "<u8")
        self.check_room(1, len(hashes))
        place = self.number(StreamId(decision.model, decision.tenant, decision.worker, decision.dp_rank or 0))
        until = self.predicted_until(min(decision.timestamp, now))
        num_booked = reserve(self._pinned, self._pinned_loads, hashes, place, record.prefill_tokens, until)
        name, placed_at = decision.request_id, decision.timestamp
        self.note_reserved(name, placed_at, place, hashes[:num_booked], record.prefill_tokens, at)
        return True

    def check_room(self, num_reservations: int, num_pages: int) -> None:
        """Check that there is room for more. Raises BookFullError."""
        if len(self._reservations) + num_reservations > self._max:
            raise BookFullError(f"{self._max} requests are reserved")
        if num_live(self.pages.table) + num_pages > self._max_pages:
            raise BookFullError(f"{self._max_pages} pages are booked")

    def predicted_until(self, at: float) -> float:
        """Return until when the pages of a reservation of a moment count as held, in seconds since 1970."""
        return at + self.predict_s if self.predict_s else _NEVER

    def note_reserved(
        self, name: str, placed_at: float, place: int, hashes: U64Array, prefill_tokens: int, at: float
    ) -> None:
        """Add a reservation that the kernel `reserve` has booked.

        hashes: of the pages that were booked. at: the time from which on it can expire. An earlier one with the same
        name, which a caller chose, ends.
        """
        if name in self._reservations:
            self._end(name, at)
        self._reservations[name] = Reservation(name, placed_at, place, hashes, prefill_tokens, at)

    def _progress(self, reservation: Reservation, record: Progressed) -> None:
        place = reservation.place
        if record.step == PREFILL_COMPLETE:
            self.loads.prefill_tokens[place] -= reservation.prefill_tokens
            reservation.prefill_tokens = 0
            return
        if record.output_blocks <= reservation.output_blocks:
            return  # it was applied before
        self.loads.decode_blocks[place] += record.output_blocks - reservation.output_blocks
        reservation.output_blocks = record.output_blocks
        if record.decay_fraction is not None:
            own = count_own(self._pinned, reservation.hashes, place) + reservation.output_blocks
            decayed = own * (1 - record.decay_fraction)
            self.loads.decode_blocks[place] += reservation.decayed - decayed
            reservation.decayed = decayed

    def _expire(self, reservation_id: str, now: float) -> None:
        self._end(reservation_id, now)
        self.num_expired += 1

    def _end(self, reservation_id: str, now: float) -> None:
        ended = self._reservations.pop(reservation_id)
        blocks = ended.output_blocks - ended.decayed
        place, tokens = ended.place, ended.prefill_tokens
        release(self._pinned, self._pinned_loads, ended.hashes, place, 1, tokens, blocks, now)
        if (until := min(ended.placed_at, now) + self.predict_s) > now:
            self._predicted.append((until, place, ended.hashes))

    def _touch(self, reservation: Reservation, at: float) -> None:
        if at > reservation.touched_at:
            reservation.touched_at = at
            self._reservations.move_to_end(reservation.name)

    def number(self, rank: StreamId) -> int:
        """Return the place of a rank, a new one if it has none yet. Raises BookFullError."""
        number = self._places.get(rank)
        if number is None:
            if len(self._places) == self._max_places:
                self._free_places()
            number = self._free.pop() if self._free else len(self._places)
            self._places[rank] = number
            self.num_changes += 1
            if number == len(self.loads.requests):
                self._grow()
        return number

    def _free_places(self) -> None:
        """Forget places where nothing is booked or predicted. Raises BookFullError if there is none."""
        used = {each.place for each in self._reservations.values()} | {place for _, place, _ in self._predicted}
        self._free = [number for number in self._places.values() if number not in used]
        if not self._free:
            raise BookFullError(f"requests are placed on {self._max_places} ranks of workers")
        self._places = {rank: number for rank, number in self._places.items() if number in used}

    def _grow(self) -> None:
        grown = _loads(2 * len(self.loads.requests))
        for new, old in zip(grown, self.loads, strict=True):
            new[: len(old)] = old
        self.loads = grown
        self._pin_loads()

    def _pin_loads(self) -> None:
        self._pinned_loads = pin(self.loads)
