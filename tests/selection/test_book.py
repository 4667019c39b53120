"""The book of reservations, compared with sets that are counted from scratch."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_events.kernels.bundles import pin
from kv_events.kernels.page_table import num_live
from kv_events.reservations import (
    OUTPUT_BLOCK,
    PREFILL_COMPLETE,
    RELEASED,
    STEPS,
    VERSION,
    Progressed,
    ReservationRecord,
    Reserved,
    time_of,
)
from kv_events.streams import StreamId
from selection.book import Book, BookFullError
from selection.kernels.booked import booked_lengths
from tests.support.effort import num_examples
from tests.support.replica_process import reserved

TTL_S, PREDICT_S = 30.0, 4.0
RANKS = {"w1": None, "second": 1}
WORKERS = tuple(RANKS)
PROMPTS = [[1, 2, *range(branch, branch + 4)][:length] for branch in (10, 20) for length in (1, 3, 6)]
"""Two prompts with a common beginning, of three lengths."""


def rank(worker: str) -> StreamId:
    return StreamId("m", "default", worker, RANKS.get(worker) or 0)


@dataclass
class Live:
    """A reservation of the model."""

    record: Reserved
    touched_at: float
    tokens: int
    blocks: int = 0
    decayed: float = 0.0

    @property
    def pages(self) -> set[int]:
        return set(np.frombuffer(self.record.decision.sequence_hashes, "<u8").tolist())


@dataclass
class Model:
    """What a book should say."""

    live: dict[str, Live] = field(default_factory=dict)
    predicted: list[tuple[str, set[int], float]] = field(default_factory=list)

    def expire(self, now: float) -> None:
        self.live = {name: each for name, each in self.live.items() if each.touched_at + TTL_S > now}

    def of(self, worker: str) -> list[Live]:
        return [each for each in self.live.values() if each.record.decision.worker == worker]

    def apply(self, record: ReservationRecord, now: float) -> bool:
        self.expire(now)
        if isinstance(record, Reserved):
            decision = record.decision
            if decision.request_id in self.live or decision.timestamp + TTL_S <= now:
                return False
            live = self.live[decision.request_id] = Live(record, now, record.prefill_tokens)
            self.predicted.append((decision.worker, live.pages, decision.timestamp + PREDICT_S))
            return True
        if record.reservation_id not in self.live:
            return False
        live = self.live[record.reservation_id]
        if record.step == RELEASED:
            del self.live[record.reservation_id]
            return True
        live.touched_at = now
        if record.step == PREFILL_COMPLETE:
            live.tokens = 0
        elif record.output_blocks > live.blocks:
            live.blocks = record.output_blocks
            if record.decay_fraction is not None:
                others = [each.pages for each in self.of(live.record.decision.worker) if each is not live]
                own = len(live.pages - set().union(*others)) + live.blocks
                live.decayed = own * (1 - record.decay_fraction)
        return True

    def booked(self, worker: str) -> tuple[int, int, float]:
        found = self.of(worker)
        pages = len(set().union(*(each.pages for each in found)))
        decode = pages + sum(each.blocks - each.decayed for each in found)
        return len(found), sum(each.tokens for each in found), decode

    def lengths(self, worker: str, prompt: list[int], now: float) -> tuple[int, int]:
        booked = set().union(*(each.pages for each in self.of(worker)))
        predicted = set().union(*(pages for name, pages, until in self.predicted if name == worker and until > now))
        return leading(prompt, booked), leading(prompt, predicted)


def leading(prompt: list[int], held: set[int]) -> int:
    return next((number for number, page in enumerate(prompt) if page not in held), len(prompt))


def check(book: Book, model: Model, now: float) -> None:
    book.expire(now)
    model.expire(now)
    assert set(book) == set(model.live)
    for worker in WORKERS:
        place = book.place(rank(worker))
        loaded = book.columns.loads
        columns = loaded.requests, loaded.prefill_tokens, loaded.decode_blocks
        loads = tuple(0 if place < 0 else column[place] for column in columns)
        assert loads == pytest.approx(model.booked(worker))
    workers = (*WORKERS, *reversed(WORKERS))
    places = np.array([book.place(rank(worker)) for worker in workers], np.int32)
    for prompt in PROMPTS:
        out = np.zeros((len(workers), 2), np.int64)
        booked_lengths(pin(book.columns.pages), np.array(prompt, np.uint64), places, out)
        assert [tuple(row) for row in out] == [model.lengths(worker, prompt, now) for worker in workers]


names, fractions = st.sampled_from("abcd"), st.none() | st.floats(0, 1)


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[float, ReservationRecord]]:
    """Times and records, in the order in which a replica gets them: late ones and repeated ones among them."""
    now, found = 1000.0, list[tuple[float, ReservationRecord]]()
    for _ in range(draw(st.integers(1, 40))):
        now += draw(st.sampled_from([0.0, 0.5, 3.0, 12.0, 40.0]))
        kind, name, age_s = draw(st.integers(0, 4)), draw(names), draw(st.sampled_from([0.0, 0.0, 2.0, 29.0, 31.0]))
        if kind == 0 and found:
            record = draw(st.sampled_from([record for _, record in found]))
        elif kind <= 2:
            worker, prompt = draw(st.sampled_from(WORKERS)), draw(st.sampled_from(PROMPTS))
            record = reserved(name, worker, prompt, now - age_s, dp_rank=RANKS[worker])
        else:
            step = draw(st.sampled_from(STEPS))
            blocks = draw(st.integers(1, 5)) if step == OUTPUT_BLOCK else 0
            record = Progressed(VERSION, "x", name, now - age_s, step, draw(fractions), blocks)
        found.append((now, record))
    return found


@settings(max_examples=num_examples(400))
@given(arrivals())
def test_records_of_replicas_in_any_order_give_what_sets_give(found: list[tuple[float, ReservationRecord]]) -> None:
    book, model = Book(TTL_S, PREDICT_S, max_pages=2**10), Model()
    for now, record in found:
        assert book.apply(record, now) == model.apply(record, now)
        check(book, model, now)
    check(book, model, found[-1][0] + TTL_S)
    assert len(book) == 0
    for column in book.columns.loads:
        assert column == pytest.approx(0)


@settings(max_examples=num_examples(150))
@given(arrivals())
def test_a_book_that_is_rebuilt_from_the_log_is_that_of_a_replica_that_was_there(
    found: list[tuple[float, ReservationRecord]],
) -> None:
    punctual = [(time_of(record), record) for now, record in found if time_of(record) == now]
    there, rebuilt = Book(TTL_S, PREDICT_S, max_pages=2**10), Book(TTL_S, PREDICT_S, max_pages=2**10)
    now = found[-1][0]
    for at, record in punctual:
        there.apply(record, at)
    for _, record in punctual:
        rebuilt.restore(record, now)
    rebuilt.settle(now)
    there.expire(now)
    assert set(rebuilt) == set(there)
    assert rebuilt.columns.loads.requests.sum() == there.columns.loads.requests.sum()
    for worker in WORKERS:
        assert rebuilt.booked(rank(worker))[:2] == there.booked(rank(worker))[:2]


def released(name: str, at: float) -> Progressed:
    return Progressed(VERSION, "x", name, at, RELEASED)


prompts = st.lists(st.integers(1, 6), max_size=8)


@settings(max_examples=num_examples(400))
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), prompts, st.booleans()), max_size=40))
def test_prompts_that_contradict_each_other_leave_nothing_behind(booked: list[tuple[str, list[int], bool]]) -> None:
    """Callers can send any hashes: a page twice in a prompt, or after other pages than in another prompt."""
    book, now = Book(TTL_S, PREDICT_S, max_reservations=8, max_pages=2**10), 0.0
    for name, pages, is_late in booked:
        now += 5.0 if is_late else 1.0
        if not book.apply(reserved(name, "w1", pages, now), now):
            assert book.apply(Progressed(VERSION, "x", name, now, RELEASED), now)
        requests, _, held = book.booked(rank("w1"))
        assert (requests == 0) == (len(book) == 0)
        assert 0 <= held <= num_live(book.columns.pages.table) <= 6
    book.expire(now + TTL_S)
    book.expire(now + TTL_S + PREDICT_S)
    assert num_live(book.columns.pages.table) == len(book) == 0
    assert all((column == 0).all() for column in book.columns.loads)


def test_more_prompts_are_predicted_than_are_remembered() -> None:
    """The oldest ones are forgotten early."""
    book = Book(TTL_S, 600.0, max_reservations=4)
    for number in range(10):
        assert book.apply(reserved(str(number), "w1", [1, number + 2], number), number)
        assert book.apply(Progressed(VERSION, "x", str(number), number, RELEASED), number)
    out, places = np.zeros((1, 2), np.int64), np.array([book.place(rank("w1"))], np.int32)
    for number in range(10):
        booked_lengths(pin(book.columns.pages), np.array([1, number + 2], np.uint64), places, out)
        assert out.tolist() == [[0, 2 if number >= 6 else 1]]


@pytest.mark.parametrize("is_replay", [False, True])
def test_a_past_of_many_prompts_leaves_room_for_those_that_still_run(is_replay: bool) -> None:
    """A start restores records at one time, a replay each at its own."""
    book, now = Book(TTL_S, PREDICT_S, max_pages=20), 1000.0
    for number in range(100):
        at = now - 100 + number
        for record in (reserved(f"r{number}", "w1", [number, 1000 + number], at), released(f"r{number}", at)):
            assert book.restore(record, at if is_replay else now)
    for number in range(5):
        assert book.restore(reserved(f"live-{number}", "w1", [2000 + number], now), now)
    book.settle(now)
    assert set(book) == {f"live-{number}" for number in range(5)}


def test_the_prediction_that_ends_first_is_forgotten_first() -> None:
    book = Book(TTL_S, PREDICT_S, max_reservations=1)
    out, places = np.zeros((1, 2), np.int64), np.zeros(1, np.int32)
    for name, page, at in (("a", 1, 10.0), ("late", 2, 8.0)):
        assert book.apply(reserved(name, "w1", [page], at), 10.0)
        assert book.apply(released(name, 10.0), 10.0)
    for page, is_predicted in ((1, 1), (2, 0)):
        booked_lengths(pin(book.columns.pages), np.array([page], np.uint64), places, out)
        assert out.tolist() == [[0, is_predicted]]


def test_a_full_book_refuses_and_has_room_again() -> None:
    book = Book(TTL_S, 0, max_reservations=2, max_pages=100)
    assert book.apply(reserved("a", "w1", [1], 0.0), 0.0)
    with pytest.raises(BookFullError, match="100 pages are booked"):
        book.apply(reserved("b", "w1", list(range(100)), 0.0), 0.0)
    assert book.apply(reserved("b", "w1", [2], 0.0), 0.0)
    with pytest.raises(BookFullError, match="2 requests are reserved"):
        book.apply(reserved("c", "w1", [3], 0.0), 0.0)
    assert book.booked(rank("w1")) == (2, 32, 2)
    assert book.apply(Progressed(VERSION, "x", "a", 1.0, RELEASED), 1.0)
    assert book.apply(reserved("c", "w1", [3], 1.0), 1.0)


def test_numbers_of_places_are_used_again() -> None:
    book = Book(TTL_S, PREDICT_S, max_places=3)
    for number in range(3):
        assert book.apply(reserved(f"r{number}", f"w{number}", [1], 0.0), 0.0)
    with pytest.raises(BookFullError, match="3 ranks"):
        book.apply(reserved("r3", "w3", [1], 0.0), 0.0)
    assert book.apply(Progressed(VERSION, "x", "r1", 1.0, RELEASED), 1.0)
    with pytest.raises(BookFullError):  # its page still counts as held
        book.apply(reserved("r3", "w3", [1], 1.0), 1.0)
    before = book.num_changes
    assert book.apply(reserved("r3", "w3", [2], PREDICT_S), PREDICT_S)
    assert book.num_changes > before
    assert book.place(rank("w1")) == -1
    assert [book.booked(rank(f"w{number}"))[0] for number in range(4)] == [1, 0, 1, 1]


def test_a_replica_whose_clock_is_ahead_leaves_no_pages_behind() -> None:
    book = Book(TTL_S, PREDICT_S)
    assert book.apply(reserved("a", "w1", [1, 2], 1e9), 10.0)
    assert book.apply(reserved("b", "w1", [3], 10.0), 10.0)
    for name in ("a", "b"):
        assert book.apply(Progressed(VERSION, "x", name, 10.0, RELEASED), 10.0)
    book.expire(10.0 + PREDICT_S)
    out, places = np.zeros((1, 2), np.int64), np.array([book.place(rank("w1"))], np.int32)
    for first in (1, 3):
        booked_lengths(pin(book.columns.pages), np.array([first], np.uint64), places, out)
        assert out.tolist() == [[0, 0]]
