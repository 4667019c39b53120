"""Kernels answer and book selections over direct connections as the routes do, and see every change at once."""

import base64
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from api.app import create_app
from api.fast.heads import Head
from api.fast.kernels.text import MARGIN
from api.selection.direct import MOST_CHOICES, MOST_HASHES
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from indexer.settings import IndexerSettings
from indexer.writing.queue import RESERVATIONS, WriteQueue
from kv_events.decisions import Placed
from kv_events.reservations import (
    OUTPUT_BLOCK,
    PREFILL_COMPLETE,
    RELEASED,
    Reserved,
    decode_reservation,
    reservation_id,
)
from kv_events.schema import CLOSED
from selection.book import Book
from selection.candidates import Asked, Candidates, Choice
from selection.exchange import ReservationExchange
from selection.kernels.booked import Bookings, make_bookings
from selection.policies import OverlapLoadPolicy, seed_choices
from selection.settings import SelectionSettings
from tests.api.workers.test_reports import VLLM
from tests.rigs.raw_http import Connect, Line, body_of, connecting, heads_taken, request, run
from tests.support.effort import num_examples
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream
from tests.support.waiting import async_wait_until

BLOCK, PAGES = 16, 8
PROMPT = list(range(1, BLOCK * PAGES + 1))
RESERVE = request(body_of(token_ids=PROMPT), "/select_and_reserve")
OK, CREATED = b"HTTP/1.1 200 OK", b"HTTP/1.1 201 Created"

held = st.dictionaries(st.integers(0, 2), st.integers(1, PAGES).map(range), max_size=3)
ranks = st.dictionaries(
    st.tuples(st.sampled_from(["0", "12", 'quo"te', "ü"]), st.integers(0, 2)), held, min_size=1, max_size=6
)
lengths = st.integers(1, len(PROMPT))
asked = st.fixed_dictionaries(
    {"token_ids": lengths.map(lambda length: PROMPT[:length])},
    optional={
        "is_eagle": st.booleans(),
        "cache_salt": st.sampled_from(["a", None]),
        "router_config_override": st.sampled_from([{"prefill_load_scale": 0.3}, {"prefill_load_scale": 0}, {}]),
        "session_id": st.just("s"),
    },
)


steps = st.sampled_from([RELEASED, PREFILL_COMPLETE, OUTPUT_BLOCK])
going_on = st.lists(asked | st.tuples(steps, st.integers(0, 5)), max_size=12)
TAKEN = "taken"
names = st.sampled_from([TAKEN, "n", "r/s:t ~", "x" * 126, "x" * 128, "ü", 'quo"te'])
named = st.builds(
    lambda name, fields, is_first: {"selection_id": name, **fields} if is_first else {**fields, "selection_id": name},
    *(names, asked, st.booleans()),
)


class NotedQueue(WriteQueue):
    """Keeps records instead of writing them."""

    has_log = True

    def __init__(self) -> None:
        super().__init__(None, contents=RESERVATIONS)
        self.records: list[Any] = []
        """As plain data, without times and the name of the replica."""

    def put(self, kind: str, key: str, payload: bytes) -> str | None:
        record = decode_reservation(payload)
        assert (kind, key) == (getattr(record, "step", "reserved"), reservation_id(record))
        plain = json.dumps(msgspec.to_builtins(record)).replace(record.replica, "replica")
        self.records.append(_TIME.sub("0", plain))
        return None


def check_placed(placed: Placed) -> None:
    """Check that what is counted of a choice is what its record says."""
    if isinstance(placed.record, bytes):
        record = decode_reservation(placed.record)
        assert isinstance(record, Reserved)
        assert placed == msgspec.structs.replace(Placed.of(record.decision), record=placed.record)


_TIME = re.compile(r"\b\d{10}\.\d+")


def step_of(name: str, step: str, mark: str = "") -> bytes:
    """Return the request that a reservation goes on. mark: "?": FastAPI answers it."""
    name = quote(name, safe="")
    if step == RELEASED:
        return request(b"", f"/reservations/{name}{mark}").replace(b"POST", b"DELETE", 1)
    return request(b"", f"/reservations/{name}/{step}{mark}")


class Fleet:
    """A service with a connection that is direct, and another one, whose requests FastAPI answers."""

    def __init__(
        self,
        fed: HandFed,
        direct: Line,
        single: Line,
        queue: NotedQueue,
        exchange: ReservationExchange,
        connect: Connect,
    ) -> None:
        self.fed, self.direct, self._single, self.connect = fed, direct, single, connect
        self._queue, self.exchange = queue, exchange

    async def lines(self, count: int) -> list[Line]:
        """Open further connections, on each of which some prompts are booked until they are direct."""
        opened = [await self.connect() for _ in range(count)]
        for line in opened * 4:
            await self.reserved(line)
        return opened

    async def post(self, path: str, **fields: Any) -> bytes:
        """Return the status of a request that FastAPI answers."""
        return await self.send(b"POST", f"{path}?", json.dumps({"model_name": "m", **fields}))

    async def send(self, method: bytes, path: str, body: str = "{}") -> bytes:
        """Send any request to FastAPI. Returns its status."""
        return (await self._single.ask(request(body.encode(), path).replace(b"POST", method, 1)))[0]

    async def follow(self, life: list[Any], *, is_direct: bool) -> tuple[Any, ...]:
        """Reserve, and go on with reservations. Returns the answers, the loads, and the records."""
        line, mark = (self.direct, "") if is_direct else (self._single, "?")
        names, answers = list[str](), list[Any]()
        for each in life:
            if isinstance(each, dict):
                seed_choices(1)
                if each.get("selection_id", TAKEN) != TAKEN:  # every other one is taken, too
                    each = each | {"selection_id": f"{each['selection_id']}{len(answers) // 2}"}
                answer = await line.ask(request(body_of(**each), f"/select_and_reserve{mark}"))
                if answer[0] == OK:
                    names.append(json.loads(answer[2])["selection_id"])
            elif names:
                step, number = each
                name = names.pop(number % len(names)) if step == RELEASED else names[number % len(names)]
                answer = await line.ask(step_of(name, step, mark))
            else:
                continue
            answers.append([part.replace(self.exchange.replica.encode(), b"replica") for part in answer])
        answers.append((await line.ask(request(body_of(token_ids=PROMPT), f"/select{mark}")))[2])  # what is predicted
        return answers, await self.loads(), self.records

    @property
    def records(self) -> list[Any]:
        """See `NotedQueue`."""
        return self._queue.records

    async def reserved(self, line: Line | None = None) -> dict[str, Any]:
        """Reserve for the whole prompt over a direct connection, that of this fleet or another one."""
        status, _, body = await (line or self.direct).ask(RESERVE)
        assert status == OK
        answer: dict[str, Any] = json.loads(body)
        return answer

    async def num_booked(self) -> int:
        """Return the requests that are booked on all ranks."""
        (model,) = json.loads(await self.loads())
        return sum(each["active_requests"] for each in model["loads"])

    async def loads(self) -> bytes:
        return json.dumps(await self.get("/loads")).encode()

    async def get(self, path: str) -> Any:
        return json.loads((await self._single.ask(request(b"", path).replace(b"POST", b"GET", 1)))[2])

    async def chosen(self) -> int:
        """Return the worker that the direct connection names for the whole prompt."""
        answer = await self.direct.ask(request(body_of(token_ids=PROMPT), "/select"))
        return int(json.loads(answer[2])["worker_id"])

    async def agree(self, **fields: Any) -> dict[str, Any]:
        """Ask on both connections, with the same turn among equals. Returns the answer."""
        answers = []
        for line, path in ((self._single, "/select?"), (self.direct, "/select"), (self.direct, "/select")):
            seed_choices(1)
            answers.append(await line.ask(request(body_of(**fields), path)))
        assert answers[0] == answers[1] == answers[2]
        answer: dict[str, Any] = json.loads(answers[0][2])
        return answer


@asynccontextmanager
async def a_fleet(
    held: dict[tuple[str, int], dict[int, range]],
    selection: SelectionSettings | None = None,
    block_size: int = BLOCK,
    bounds: dict[str, int] | None = None,
) -> AsyncIterator[Fleet]:
    """Run a service of ranks. held: worker and rank -> parts of `PROMPT`, as in `HandFed.hold`. bounds: of the book."""
    fed = HandFed(IndexerSettings(max_pages=2**16, worker_ttl_s=3600))
    api = ApiSettings(port=0, register_allow="127.0.0.1")
    selection = selection or SelectionSettings(predict_s=600)
    queue = NotedQueue()
    exchange = ReservationExchange(Book(selection.reservation_ttl_s, selection.predict_s, **bounds or {}), queue)
    exchange.on_placed.append(check_placed)
    service = LiveService(fed.consumer, api, selection=selection, reservations=exchange)
    async with running_server(create_app(service), api) as url, connecting(url) as connect:
        for (worker, rank), tiers in held.items():
            await fed.hold(Stream(worker, dp_rank=rank, block_size=block_size), PROMPT, tiers)
        direct, single = await connect(), await connect()
        for _ in range(3):
            await direct.ask(request(body_of(token_ids=PROMPT), "/select"))
        yield Fleet(fed, direct, single, queue, exchange, connect)


@given(ranks, st.lists(asked, min_size=1, max_size=4), st.lists(lengths, max_size=4))
@settings(max_examples=num_examples(25))
def test_kernels_answer_as_the_routes_do(
    held: dict[tuple[str, int], dict[int, range]], asked: list[dict[str, Any]], booked: list[int]
) -> None:
    async def ask() -> None:
        async with a_fleet(held) as fleet:
            for length in booked:
                assert await fleet.post("/select_and_reserve", token_ids=PROMPT[:length]) == OK
            for fields in asked:
                with heads_taken() as taken:
                    await fleet.agree(**fields)
                assert len(taken) <= 1  # Python answers the first request with a template, a kernel the next one

    run(ask())


@given(ranks, st.data(), st.lists(lengths, min_size=1, max_size=4))
@settings(max_examples=num_examples(25))
def test_kernels_choose_among_the_allowed_workers_as_the_routes_do(
    held: dict[tuple[str, int], dict[int, range]], data: st.DataObject, asked: list[int]
) -> None:
    async def ask() -> None:
        async with a_fleet(held) as fleet:
            workers = st.sampled_from([int(name) if name.isdigit() else name for name, _ in held])
            for length in asked:
                assert await fleet.post("/select_and_reserve", token_ids=PROMPT[:length]) == OK
                allowed = [*data.draw(st.sets(workers, min_size=1)), "unknown"]
                with heads_taken() as taken:
                    answer = await fleet.agree(token_ids=PROMPT[:length], allowed_worker_ids=allowed)
                assert answer["worker_id"] in allowed
                assert len(taken) <= 1
                await fleet.agree(token_ids=PROMPT[:length])  # any worker again
            nobody = request(body_of(token_ids=PROMPT, allowed_worker_ids=["unknown"]), "/select")
            answers = [(await fleet.direct.ask(nobody))[0] for _ in range(3)]
            assert answers == [b"HTTP/1.1 503 Service Unavailable"] * 3

    run(ask())


@given(ranks, going_on)
@settings(max_examples=num_examples(25))
def test_kernels_book_as_the_routes_do(held: dict[tuple[str, int], dict[int, range]], life: list[Any]) -> None:
    """Every other reservation with the same fields is answered by a kernel."""

    async def follow(*, is_direct: bool) -> tuple[Any, ...]:
        async with a_fleet(held) as fleet:
            reservations_twice = [[each] * (1 + isinstance(each, dict)) for each in life]
            return await fleet.follow([*chain(*reservations_twice)], is_direct=is_direct)

    async def compare() -> None:
        with heads_taken() as taken:
            directly = await follow(is_direct=True)
        assert directly == await follow(is_direct=False)
        assert len([head for head in taken if head.path == "/select_and_reserve"]) <= len(life)

    run(compare())


@given(
    ranks, st.lists(named | asked, min_size=1, max_size=6), st.lists(st.tuples(steps, st.integers(0, 5)), max_size=3)
)
@settings(max_examples=num_examples(25))
def test_kernels_book_under_the_names_of_callers_as_the_routes_do(
    held: dict[tuple[str, int], dict[int, range]], booked: list[dict[str, Any]], ended: list[tuple[str, int]]
) -> None:
    async def follow(*, is_direct: bool) -> tuple[Any, ...]:
        async with a_fleet(held) as fleet:
            return await fleet.follow([*booked * 3, *ended, *booked], is_direct=is_direct)

    async def compare() -> None:
        assert await follow(is_direct=True) == await follow(is_direct=False)

    run(compare())


@pytest.mark.parametrize(
    "body",
    [
        '{{"selection_id":"{name}","model_name":"m","token_ids":[{tokens}]}}',
        '{{"model_name":"m", "token_ids" : [{tokens}], "selection_id" : "{name}", "allowed_worker_ids": ["1", 2]}}',
    ],
)
async def test_a_kernel_books_under_the_names_of_callers(body: str, taken: list[Head]) -> None:
    async with a_fleet({("1", 0): {0: range(4)}, ("2", 0): {}}) as fleet:
        lines = [fleet.direct, *await fleet.lines(7)]
        del taken[:]
        for number in range(20):
            text = body.format(name=f"n{number}", tokens=",".join(map(str, PROMPT)))
            answer = await fleet.direct.ask(request(text.encode(), "/select_and_reserve"))
            assert json.loads(answer[2])["selection_id"] == f"n{number}"
        assert len(taken) <= 1
        for turn in range(8):
            for number, line in enumerate(lines):
                tokens = ",".join(map(str, PROMPT[: BLOCK * (1 + number)]))
                text = body.format(name=f"r-{turn}-{number // 2}", tokens=tokens)
                line.writer.write(request(text.encode(), "/select_and_reserve"))
            answers = [await line.answer() for line in lines]
            assert sorted(status for status, *_ in answers) == 4 * [OK] + 4 * [b"HTTP/1.1 409 Conflict"]
            booked = sorted(json.loads(body)["selection_id"] for status, _, body in answers if status == OK)
            assert booked == [f"r-{turn}-{each}" for each in range(4)]
            assert all(fleet.exchange.book.get(name) is not None for name in booked)
            for name in booked:
                assert (await fleet.direct.ask(step_of(name, RELEASED)))[0] == OK


@pytest.mark.parametrize(
    "fields",
    [
        '"nested":{{"selection_id":"{name}"}},"selection_id":"other-{name}"',
        '"selection_id":"{name}","selection_id":"other-{name}"',
        '"session_id":"\\"selection_id\\":\\"a","selection_id":"other-{name}"',
        '"selection_id":null,"session_id":"{name}"',
    ],
)
async def test_a_name_is_never_taken_from_elsewhere(fields: str) -> None:
    async with a_fleet({("1", 0): {0: range(4)}}) as fleet:
        for name in "abcde":
            text = f'{{"model_name":"m","token_ids":{PROMPT},{fields.format(name=name)}}}'
            status, _, answer = await fleet.direct.ask(request(text.encode(), "/select_and_reserve"))
            given = json.loads(answer)["selection_id"]
            assert status == OK
            assert given == f"other-{name}" or ("null" in fields and given.startswith(fleet.exchange.replica))


@pytest.mark.parametrize(
    "member",
    [
        '"selection_id":"caf\\u00e9"',
        '"selection_id":"café"',
        '"selection_id":"a\\/b"',
        '"selection_id":"q\\"q"',
        '"selection_id":"\x7f"',
        f'"selection_id":"{"x" * 128}"',
        f'"selection_id":"{"x" * 129}"',
        '"selection_id":\n"b"',
        '"selection\\u005fid":"c"',
    ],
)
async def test_a_name_is_given_once_however_it_is_written(member: str) -> None:
    asked = request(f'{{"model_name":"m","token_ids":{PROMPT},{member}}}'.encode(), "/select_and_reserve")
    async with a_fleet({("1", 0): {0: range(4)}}) as fleet:
        name = json.loads(f"{{{member}}}")["selection_id"]
        for _ in range(2):
            answers = [await fleet.direct.ask(asked) for _ in range(8)]
            assert [status for status, *_ in answers] == [OK] + 7 * [b"HTTP/1.1 409 Conflict"]
            assert json.loads(answers[0][2])["selection_id"] == name
            assert await fleet.num_booked() == 1
            assert (await fleet.direct.ask(step_of(name, RELEASED, "?")))[0] == OK
        for _ in range(4):
            await fleet.reserved()  # on a direct connection again


async def test_records_of_large_fleets_are_those_of_the_routes() -> None:
    held = {(str(number), 0): {0: range(number // 4 + 1)} for number in range(20)}
    records = list[Any]()
    for is_direct in (False, True):
        async with a_fleet(held) as fleet:
            with heads_taken() as taken:
                records.append((await fleet.follow([{"token_ids": PROMPT}] * 4, is_direct=is_direct))[-1])
            assert len(taken) < 3  # the others are answered by a kernel, or by FastAPI
    assert records[0] == records[1]


async def test_a_record_has_the_cheapest_candidates_and_the_chosen_one() -> None:
    async with a_fleet({(str(number), 0): {0: range(number // 4 + 1)} for number in range(20)}) as fleet:
        await fleet.post("/select_and_reserve", token_ids=PROMPT, affinity_target={"worker_id": 0})
        decision = json.loads(fleet.records[-1])[3]
        workers = {worker for worker, *_ in decision[-1]}
        assert len(workers) == 16
        assert workers >= {"0", *map(str, range(8, 20))}


async def test_steps_that_a_direct_connection_pipelines_are_all_followed() -> None:
    async with a_fleet({("1", 0): {0: range(4)}}) as fleet:
        names = [(await fleet.reserved())["selection_id"] for _ in range(4)]
        fleet.direct.writer.write(b"".join(step_of(name, RELEASED) for name in names))
        assert [(await fleet.direct.answer())[0] for _ in names] == [OK] * len(names)
        assert await fleet.num_booked() == 0
        for step in (RELEASED, PREFILL_COMPLETE, OUTPUT_BLOCK):
            unknown = await fleet.direct.ask(step_of("x", step))
            assert unknown == await fleet.direct.ask(step_of("x", step, "?"))
            assert unknown[0] == b"HTTP/1.1 404 Not Found"


@pytest.mark.parametrize("line", [b"Origin: http://evil.example\r\n", b"SEC-Fetch-Site: cross-site\r\n"])
async def test_a_page_of_another_site_books_nothing_and_ends_nothing(line: bytes) -> None:
    async with a_fleet({("1", 0): {0: range(4)}}) as fleet:
        names = [(await fleet.reserved())["selection_id"] for _ in range(4)]
        before = await fleet.loads()
        for data in (RESERVE, step_of(names[0], OUTPUT_BLOCK), step_of(names[0], RELEASED)):
            status, _, _ = await fleet.direct.ask(data.replace(b"\r\n\r\n", b"\r\n" + line + b"\r\n", 1))
            assert status == b"HTTP/1.1 403 Forbidden"
        assert await fleet.loads() == before


@pytest.mark.parametrize("steps", [[], [PREFILL_COMPLETE], [PREFILL_COMPLETE, OUTPUT_BLOCK]])
async def test_a_connection_becomes_direct_whatever_steps_follow_each_reservation(
    steps: list[str], taken: list[Head]
) -> None:
    async with a_fleet({("1", 0): {0: range(4)}}) as fleet:
        line = await fleet.connect()
        for _ in range(40):
            name = (await fleet.reserved(line))["selection_id"]
            for step in (*steps, RELEASED):
                assert (await line.ask(step_of(name, step)))[0] == OK
        assert await fleet.num_booked() == 0
        assert len([head for head in taken if head.path == "/select_and_reserve"]) < 10


async def test_records_name_the_worker_of_the_answer_when_others_have_left() -> None:
    async with a_fleet({("0", 0): {0: range(1)}}) as fleet:
        streams = [Stream(str(number), block_size=BLOCK) for number in range(1, 4)]
        for stream in streams:
            await fleet.fed.hold(stream, PROMPT, {0: range(4)})
        await fleet.reserved()
        await fleet.fed.feed(streams[0].batch(degraded_reason=CLOSED))
        for _ in range(20):
            worker = str((await fleet.reserved())["worker_id"])
            decision = json.loads(fleet.records[-1])[3]
            assert worker in decision
            assert [name for name, *_ in decision[-1]] == ["0", "2", "3"]


@pytest.mark.parametrize("bound", [{"max_reservations": 35}, {"max_pages": 2**13 + PAGES}])
async def test_a_full_book_is_answered_as_by_the_routes(bound: dict[str, int]) -> None:
    async with a_fleet({("1", 0): {}}, bounds=bound) as fleet:
        answers = [await fleet.direct.ask(RESERVE) for _ in range(5)]
        assert {status for status, *_ in answers} == {OK}
        while answers[-1][0] == OK and len(answers) < 60:
            tokens = range(len(answers) << 16, (len(answers) << 16) + 600 * BLOCK)
            asked = request(body_of(token_ids=list(tokens)), "/select_and_reserve")
            answers.append(await fleet.direct.ask(asked if "max_pages" in bound else RESERVE))
        assert answers[-1][0] == b"HTTP/1.1 503 Service Unavailable"
        assert await fleet.num_booked() == len(answers) - 1


async def test_ranks_without_a_number_are_never_booked_by_a_kernel() -> None:
    async with a_fleet({(str(number), 0): {} for number in range(40)}, bounds={"max_places": 2}) as fleet:
        asked = [request(body_of(token_ids=[number] * BLOCK), "/select_and_reserve") for number in range(10)]
        answers = [await fleet.direct.ask(each) for each in asked]
        assert await fleet.num_booked() == len([status for status, *_ in answers if status == OK]) > 0


async def test_the_largest_records_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    made, shares = list[Bookings](), list[float]()

    def noted(*sizes: int) -> Bookings:
        made.append(make_bookings(*sizes))
        return made[-1]

    def note_share(_: Placed) -> None:
        num_choices, _, num_bytes = made[-1].made.tolist()
        if num_choices > 1:
            room = len(made[-1].records) - 8 * MOST_HASHES - MARGIN
            shares.append(num_bytes / num_choices * MOST_CHOICES / room)

    monkeypatch.setattr("api.selection.direct.make_bookings", noted)
    monkeypatch.setattr("selection.exchange.socket.gethostname", lambda: "h" * 64)
    monkeypatch.setattr("api.fast.kernel_connections._PASS_S", 1.0)
    largest = request(body_of(token_ids=PROMPT, session_id="s" * 256), "/select_and_reserve")
    longer = request(body_of(token_ids=PROMPT, session_id="s" * 257), "/select_and_reserve")
    held: dict[tuple[str, int], dict[int, range]] = {(f"{number:é>128}", 0): {} for number in range(20)}
    async with a_fleet(held) as fleet:
        fleet.exchange.on_placed.append(note_share)
        lines = await fleet.lines(48)
        assert (await lines[0].ask(largest))[0] == OK
        for _ in range(3):
            for line in lines:
                line.writer.write(largest)
            names = [json.loads((await line.answer())[2])["selection_id"] for line in lines]
            assert len({*names}) == len(names)
        assert len(fleet.records) == 7 * len(lines) + 1
        for _ in range(4):
            assert (await fleet.direct.ask(longer))[0].startswith(b"HTTP/1.1 422 ")
        funnel = (await fleet.get("/funnel"))["all"]
        assert (funnel["requests"], funnel["prompt_tokens"]) == (len(fleet.records), len(PROMPT) * len(fleet.records))
    assert 0.5 < max(shares) < 1


async def test_choices_are_in_the_book_if_nobody_can_be_told() -> None:
    async with a_fleet({("1", 0): {}}) as fleet:
        lines = await fleet.lines(8)
        fleet.exchange.on_placed.append(Mock(side_effect=RuntimeError))
        for line in lines:
            line.writer.write(RESERVE)
        await async_wait_until(lambda: len(fleet.exchange.book) == 5 * len(lines), what="the choices")
        assert await fleet.num_booked() == 5 * len(lines)


async def test_long_prompts_at_once_are_booked_whole() -> None:
    """A kernel books only some of them in one call."""
    long = list(range(1, 3001))
    async with a_fleet({("1", 0): {}}, block_size=1) as fleet:
        lines = await fleet.lines(8)
        for line in lines:
            line.writer.write(request(body_of(token_ids=long), "/select_and_reserve"))
        answers = [json.loads((await line.answer())[2]) for line in lines]
        assert {len(each["sequence_hashes"]) for each in answers} == {len(long)}
        decisions = [json.loads(each)[3] for each in fleet.records[-len(lines) :]]
        assert {len(base64.b64decode(decision[8])) for decision in decisions} == {8 * len(long)}


async def test_a_name_that_a_caller_took_before_leaves_nothing_behind() -> None:
    async with a_fleet({("1", 0): {0: range(4)}}) as fleet:
        for _ in range(4):
            last = (await fleet.reserved())["selection_id"]
        begin, _, number = last.rpartition("-")
        names = {f"{begin}-{each + 1}" for each in range(int(number) + 2)}
        for taken in sorted(names)[-2:]:
            assert await fleet.post("/select_and_reserve", token_ids=PROMPT, selection_id=taken) == OK
        names |= {(await fleet.reserved())["selection_id"] for _ in range(3)}
        for name in names:
            assert (await fleet.direct.ask(step_of(name, RELEASED)))[0] == OK
        assert await fleet.num_booked() == 0


async def test_a_policy_that_derives_from_the_one_of_the_kernel_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Last(OverlapLoadPolicy):
        def choose(self, asked: Asked, candidates: Candidates) -> Choice:
            return super().choose(asked, candidates)._replace(row=len(candidates.workers) - 1)

    monkeypatch.setattr("api.selection.routes.create_policy", lambda _name: Last())
    async with a_fleet({("1", 0): {0: range(4)}, ("2", 0): {}}) as fleet:
        assert [await fleet.chosen() for _ in range(5)] == [2] * 5


async def test_a_kernel_sees_each_change_at_once(taken: list[Head]) -> None:
    async with a_fleet({("1", 0): {0: range(4)}, ("2", 0): {}}) as fleet:
        del taken[:]
        assert (await fleet.agree(token_ids=PROMPT))["worker_id"] == 1
        for number in range(9):  # their pages are predicted, so that only the load counts
            assert await fleet.post("/select_and_reserve", token_ids=PROMPT, selection_id=f"r{number}") == OK
            await fleet.agree(token_ids=PROMPT)
        await fleet.fed.hold(third := Stream("3", block_size=BLOCK), PROMPT)
        assert (await fleet.agree(token_ids=PROMPT))["worker_id"] == 3
        await fleet.fed.feed(third.batch(degraded_reason=CLOSED))
        assert (await fleet.agree(token_ids=PROMPT))["worker_id"] != 3
        assert not [head for head in taken if head.path == "/select"]


async def test_a_kernel_sees_workers_that_drain_and_leave(taken: list[Head]) -> None:
    async with a_fleet({("1", 0): {0: range(4)}, ("2", 0): {0: range(2)}, ("3", 0): {}}) as fleet:
        assert (await fleet.agree(token_ids=PROMPT))["worker_id"] == 1
        assert await fleet.post("/workers", worker_id=1, block_size=BLOCK, endpoint="http://127.0.0.1:9") == CREATED
        assert (await fleet.agree(token_ids=PROMPT))["endpoint"] == "http://127.0.0.1:9"
        assert await fleet.send(b"PATCH", "/workers/1", '{"lifecycle": "draining"}') == OK
        assert (await fleet.agree(token_ids=PROMPT))["worker_id"] == 2
        assert await fleet.send(b"DELETE", "/workers/1") == OK
        assert (await fleet.agree(token_ids=PROMPT))["worker_id"] == 1  # which the log still names
        del taken[:]
        await fleet.agree(token_ids=PROMPT)
        assert not [head for head in taken if head.path == "/select"]


async def test_a_kernel_sees_reservations_that_end_and_expire() -> None:
    settings = SelectionSettings(reservation_ttl_s=2.0, predict_s=0.0)
    async with a_fleet({("1", 0): {0: range(4)}, ("2", 0): {0: range(3)}}, settings) as fleet:

        async def book(name: str) -> None:
            pinned = {"worker_id": 1, "dp_rank": 0}
            assert (
                await fleet.post("/select_and_reserve", token_ids=PROMPT, selection_id=name, pinned_worker=pinned) == OK
            )

        assert await fleet.chosen() == 1
        await book("a")
        assert await fleet.chosen() == 2
        assert await fleet.send(b"DELETE", "/reservations/a") == OK
        assert await fleet.chosen() == 1
        await book("b")
        assert await fleet.chosen() == 2

        async def is_over() -> bool:
            return await fleet.chosen() == 1

        await async_wait_until(is_over, 20, "the reservation to expire")


async def test_a_kernel_sees_what_engines_report() -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=VLLM)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as engine, a_fleet({("1", 0): {0: range(4)}, ("2", 0): {0: range(3)}}) as fleet:
        assert (await fleet.agree(token_ids=PROMPT))["worker_id"] == 1
        at = str(engine.make_url("/")).rstrip("/")
        assert await fleet.post("/workers", worker_id=1, block_size=BLOCK, endpoint=at) == CREATED

        async def is_busy() -> bool:
            return await fleet.chosen() == 2

        await async_wait_until(is_busy, 20, "the report to count")


@pytest.mark.parametrize(
    "fields",
    [
        {"selection_id": "a"},
        {"explain": True},
        {"sources": True},
        {"isl_tokens": 0},
        {"allowed_worker_ids": [1]},
        {"pinned_worker": {"worker_id": 1, "dp_rank": 0}},
        {"affinity_target": {"worker_id": 1}},
        {"allowed_worker_ids": []},
        {"model_name": "unknown"},
        {"token_ids": [1.5]},
    ],
)
async def test_other_selections_are_answered_by_python(fields: dict[str, Any]) -> None:
    async with a_fleet({("1", 0): {0: range(4)}, ("2", 0): {}}) as fleet:
        for _ in range(3):
            await fleet.agree(**{"token_ids": PROMPT, **fields})
            await fleet.agree(token_ids=PROMPT)


@pytest.mark.parametrize("policy", ["lmetric", "session,overlap-load"])
async def test_other_policies_are_asked(policy: str, taken: list[Head]) -> None:
    async with a_fleet({("1", 0): {0: range(4)}, ("2", 0): {}}, SelectionSettings(policy=policy)) as fleet:
        del taken[:]
        await fleet.agree(token_ids=PROMPT)
        assert len(taken) == 2
