"""A service whose selections a kernel answers on one connection, and FastAPI on another."""

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
from hypothesis import strategies as st

from api.app import create_app
from api.decisions.window import DecisionWindow
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from indexer.settings import IndexerSettings
from indexer.writing.queue import RESERVATIONS, WriteQueue
from kv_events.decisions import Choices, Decision
from kv_events.reservations import (
    OUTPUT_BLOCK,
    PREFILL_COMPLETE,
    RELEASED,
    Reserved,
    decode_reservation,
    encode_reservation,
    joined,
    reservation_id,
    singles,
)
from selection.book import Book
from selection.exchange import ReservationExchange
from selection.policies import seed_choices
from selection.settings import SelectionSettings
from tests.rigs.raw_http import Connect, Line, body_of, connecting, request
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream

BLOCK, PAGES = 16, 8
PROMPT = list(range(1, BLOCK * PAGES + 1))
TAKEN = "taken"
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
        "explain": st.booleans(),
    },
)
steps = st.sampled_from([RELEASED, PREFILL_COMPLETE, OUTPUT_BLOCK])


class NotedQueue(WriteQueue):
    """Keeps records instead of writing them."""

    has_log = True

    def __init__(self) -> None:
        super().__init__(None, contents=RESERVATIONS)
        self.records: list[Any] = []
        """As plain data, without times and the name of the replica."""

    def put_joined(self, kinds: Mapping[str, int], key: str, records: bytes) -> str | None:
        found = list(map(decode_reservation, singles(joined(sum(kinds.values()), records))))
        assert Counter(getattr(each, "step", "reserved") for each in found) == kinds
        for each in found:
            self.put((getattr(each, "step", "reserved"), reservation_id(each), encode_reservation(each)))
        return None

    def put(self, *records: tuple[str, str, bytes]) -> str | None:
        for kind, key, payload in records:
            record = decode_reservation(payload)
            assert (kind, key) == (getattr(record, "step", "reserved"), reservation_id(record))
            plain = json.dumps(msgspec.to_builtins(record)).replace(record.replica, "replica")
            self.records.append(_TIME.sub("0", plain))
        return None


class CheckedWindow:
    """Checks that what is counted of choices is what their records say."""

    def __init__(self, window: DecisionWindow) -> None:
        self._window = window
        self.on_choices: Callable[[], None] = lambda: None

    def take(self, record: Decision) -> None:
        self._window.take(record)

    def take_all(self, choices: Choices) -> None:
        assert choices.ends[-1] == len(choices.records)
        sums, lost = np.zeros(4, int), dict[str, tuple[int, int, int]]()
        for number in range(len(choices.ends)):
            record = decode_reservation(choices.record(number))
            assert isinstance(record, Reserved)
            decision = record.decision
            assert (choices.name(number), choices.timestamp) == (decision.request_id, decision.timestamp)
            held, best = decision.predicted_tokens or 0, max(each.tokens for each in decision.candidates)
            sums += 1, decision.prompt_tokens, best, held
            if best > held:
                requests, tokens, _ = lost.get(decision.worker, (0, 0, 0))
                lost[decision.worker] = requests + 1, tokens + best - held, number
        assert choices.sums == tuple(sums)
        assert {worker: tuple(numbers) for worker, *numbers in choices.lost} == lost
        self._window.take_all(choices)
        self.on_choices()


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
        url: str,
        direct: Line,
        single: Line,
        queue: NotedQueue,
        exchange: ReservationExchange,
        window: CheckedWindow,
        connect: Connect,
    ) -> None:
        self.fed, self.url, self.direct, self._single, self.connect = fed, url, direct, single, connect
        self._queue, self.exchange, self.window = queue, exchange, window

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
        seed_choices(1)
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
    groups: Iterable[str] = (),
    **api_settings: Any,
) -> AsyncIterator[Fleet]:
    """Run a service of ranks. held: worker and rank -> parts of `PROMPT`, as in `HandFed.hold`. bounds: of the book.

    groups: names of groups in which the first half of each part is marked, too.
    """
    fed = HandFed(IndexerSettings(max_pages=2**16, worker_ttl_s=3600))
    api = ApiSettings(port=0, register_allow="127.0.0.1", **api_settings)
    selection = selection or SelectionSettings(predict_s=600)
    queue = NotedQueue()
    exchange = ReservationExchange(Book(selection.reservation_ttl_s, selection.predict_s, **bounds or {}), queue)
    service = LiveService(fed.consumer, api, selection=selection, reservations=exchange)
    exchange.listener = window = CheckedWindow(service.decision_window)
    async with running_server(create_app(service), api) as url, connecting(url) as connect:
        for (worker, rank), tiers in held.items():
            await fed.hold(Stream(worker, dp_rank=rank, block_size=block_size), PROMPT, tiers)
            for group in groups:
                halves = {tier: range((len(pages) + 1) // 2) for tier, pages in tiers.items()}
                await fed.hold(Stream(worker, model=f"m#{group}", dp_rank=rank, block_size=block_size), PROMPT, halves)
        direct, single = await connect(), await connect()
        for _ in range(3):
            await direct.ask(request(body_of(token_ids=PROMPT), "/select"))
        yield Fleet(fed, url, direct, single, queue, exchange, window, connect)
