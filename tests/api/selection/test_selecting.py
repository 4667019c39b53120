"""What is chosen, what is booked, and what the answers say."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from api.app import create_app
from api.selection.requests import decoded
from api.service import LiveService
from api.settings import ApiSettings
from kv_events.decisions import VERSION, Decision
from kv_events.limits import MAX_PAGES_PER_DECISION
from kv_events.reservations import Reserved
from kv_events.streams import StreamId
from kvsight import AsyncClient, KvsightHttpError
from selection.roster import Found, Report, Rosters
from selection.settings import SelectionSettings
from tests.api.prompts.test_renderer import CHATS, FakeEngine, rendered, rendering
from tests.rigs.api import asking, served
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream
from tests.support.waiting import async_wait_until

BLOCK = 16
PROMPT = list(range(1, 161))
BODY = {"model_name": "m", "token_ids": PROMPT}
PREFILL_DECODE = SelectionSettings(policy="prefill-decode,overlap-load")


@asynccontextmanager
async def fleet(
    *held: dict[int, range] | None, selection: SelectionSettings | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, HandFed]]:
    """A service of workers w0, w1, ... held: what each holds of the prompt, as in `HandFed.hold`; {}: nothing."""
    fed = HandFed()
    service = LiveService(fed.consumer, ApiSettings(**settings), selection=selection)
    async with asking(create_app(service)) as client:
        for number, tiers in enumerate(held):
            await fed.hold(Stream(worker=f"w{number}", model="m", block_size=BLOCK), PROMPT, tiers)
        yield client, fed


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await client.post(path, json={**BODY, **body})
    assert answer.is_success, answer.text
    return answer.json()


async def loads(client: httpx.AsyncClient) -> dict[str, tuple[int, int, int]]:
    (model,) = (await client.get("/loads")).json()
    fields = ("active_requests", "potential_prefill_tokens", "potential_decode_blocks")
    return {each["worker_id"]: tuple(each[field] for field in fields) for each in model["loads"]}


async def test_equal_prompts_at_once_split_evenly() -> None:
    async with fleet(None, None) as (client, _):
        chosen = await asyncio.gather(*(post(client, "/select_and_reserve") for _ in range(448)))
        counts = Counter(each["worker_id"] for each in chosen)
        assert abs(counts["w0"] - 224) <= 22
        assert sum(counts.values()) == 448
        assert {worker: load[0] for worker, load in (await loads(client)).items()} == counts


async def test_large_bodies_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    active, most_active = list[object](), list[int]()

    def watched(*args: Any) -> Any:
        active.append(args)
        most_active.append(len(active))
        try:
            return decoded(*args)
        finally:
            active.remove(args)

    monkeypatch.setattr("api.selection.routes.decoded", watched)
    async with fleet(None, None) as (client, _):
        large = list(range(500_000))
        await asyncio.gather(*(post(client, "/select", token_ids=large) for _ in range(8)))
    assert most_active == [1] * 8


async def test_the_funnel_counts_what_is_booked_and_its_outcome() -> None:
    async with fleet({0: range(5)}, {}) as (client, _):
        await post(client, "/select")
        booked = await post(client, "/select_and_reserve", pinned_worker={"worker_id": "w1", "dp_rank": 0})
        await post(client, "/decisions", request_id=booked["selection_id"], cached_tokens=16)
        funnel = (await client.get("/funnel")).json()
        sums = {"requests": 1, "prompt_tokens": 160, "best_tokens": 0, "predicted_tokens": 0}
        assert funnel["all"] == sums | {"cached_tokens": 0}
        assert funnel["finished"] == sums | {"cached_tokens": 16}
        (seen,) = funnel["decisions"]
        assert (seen["request_id"], seen["worker"]) == (booked["selection_id"], "w1")


async def test_a_burst_of_siblings_goes_to_one_worker_until_others_are_cheaper() -> None:
    async with fleet({}, {}, selection=SelectionSettings(predict_s=60)) as (client, _):
        long = {"token_ids": list(range(1000, 1000 + 100 * BLOCK))}
        first, *others = [await post(client, "/select_and_reserve", **long) for _ in range(8)]
        assert first["effective_prefill_tokens"] == 100 * BLOCK
        # 100 pages wait on the first worker, and as many would have to be computed again on the other
        assert {each["effective_prefill_tokens"] for each in others} == {0}
        assert {each["worker_id"] for each in others} == {first["worker_id"]}
        assert {each["overlap"]["predicted"] for each in others} == {100 * BLOCK}
        assert {each["overlap"]["gpu"] for each in others} == {0}
    async with fleet({}, {}, selection=SelectionSettings(predict_s=0)) as (client, _):
        chosen = [await post(client, "/select_and_reserve", **long) for _ in range(8)]
        assert Counter(each["worker_id"] for each in chosen) == {"w0": 4, "w1": 4}
        assert all("predicted" not in each["overlap"] for each in chosen)


async def test_predictions_are_in_no_query() -> None:
    async with fleet({}, {}) as (client, _):
        await post(client, "/select_and_reserve")
        assert (await post(client, "/query"))["instances"] == {}


async def test_a_reservation_expires() -> None:
    async with fleet({}, selection=SelectionSettings(reservation_ttl_s=0.2)) as (client, _):
        await post(client, "/select_and_reserve", selection_id="a")
        assert (await loads(client))["w0"] == (1, 160, 10)
        deadline = asyncio.get_running_loop().time() + 10
        while (await loads(client))["w0"] != (0, 0, 0):
            assert asyncio.get_running_loop().time() < deadline
        assert (await client.delete("/reservations/a")).status_code == 404


async def test_the_answer_says_why_and_whence() -> None:
    held: tuple[dict[int, range], ...] = ({0: range(2)}, {0: range(4)}, {0: range(1), 1: range(1, 7), 2: range(7, 9)})
    async with fleet(*held) as (client, _):
        pinned = {"pinned_worker": {"worker_id": "w0", "dp_rank": 0}}
        answer = await post(client, "/select", explain=True, sources=True, **pinned)
        assert (answer["worker_id"], answer["reason"]) == ("w0", "the least work for prefill and decode")
        chosen = await post(client, "/select", explain=True, sources=True)
        assert [each["worker_id"] for each in chosen["candidates"]] == ["w2", "w1", "w0"]
        costs = [each["cost"] for each in chosen["candidates"]]
        # pages to compute and pages to hold: those on the host count 0.25, those on disks 0.75
        assert costs == [10 - 1 - 6 * 0.75 - 2 * 0.25 + 10, 10 - 4 + 10, 10 - 2 + 10]
        assert (chosen["worker_id"], chosen["sources"]) == ("w2", [])


async def test_sources_cover_what_the_chosen_worker_lacks() -> None:
    held: tuple[dict[int, range], ...] = ({0: range(2)}, {0: range(4)}, {0: range(1), 1: range(1, 7), 2: range(7, 9)})
    async with fleet(*held, selection=SelectionSettings(policy="session-hard,overlap-load")) as (client, _):
        target = {"affinity_target": {"worker_id": "w0"}}
        answer = await post(client, "/select", sources=True, **target)
        found = [(each["start"], each["end"], each["worker_id"], each["medium"]) for each in answer["sources"]]
        assert answer["worker_id"] == "w0"
        assert found == [(2, 4, "w1", "GPU"), (4, 7, "w2", "CPU_PINNED"), (7, 9, "w2", "DISK")]


async def test_both_ways_answer_alike() -> None:
    """JSON is answered inside the protocol; messages in msgpack, and JSON in chunks, by FastAPI's routes."""
    fed = HandFed()
    async with served(fed.consumer) as client:
        for number in range(3):
            await fed.hold(Stream(worker=str(number), model="m", block_size=BLOCK), PROMPT, {0: range(1 + 3 * number)})
        bodies: list[dict[str, Any]] = [{}, {"selection_id": "s"}, {"explain": True}, {"allowed_worker_ids": [1, "0"]}]
        bodies += [{"lora_name": "x"}, {"isl_tokens": 999}, {"token_ids": []}, {"model_name": "n"}, {"session_id": "s"}]
        bodies += [{"token_ids": PROMPT + [5] * 7}, {"token_ids": [-1]}, {"priority_jump": "x"}, {"routing_group": "g"}]
        for body in bodies:
            body = {"pinned_worker": {"worker_id": 2, "dp_rank": 0}, **BODY, **body}
            json = msgspec.json.encode(body)

            async def chunks(data: bytes = json) -> AsyncIterator[bytes]:
                yield data

            headers = {"content-type": "application/json"}
            fast = await client.post("/select", content=json, headers=headers)
            slow = await client.post("/select", content=chunks(), headers=headers)
            packed = {"content-type": "application/msgpack"}
            third = await client.post("/select", content=msgspec.msgpack.encode(body), headers=packed)
            assert (fast.status_code, fast.content) == (slow.status_code, slow.content)
            assert (third.status_code, third.is_success and third.content) == (
                fast.status_code,
                fast.is_success and fast.content,
            )


async def test_the_client_reserves_and_releases() -> None:
    fed = HandFed()
    async with served(fed.consumer) as http, AsyncClient(str(http.base_url)) as client:
        await fed.hold(Stream(worker="w/0", model="m", block_size=BLOCK), PROMPT, {0: range(9)})
        assert (await client.select("m", PROMPT)).worker_id == "w/0"
        async with client.placed("m", PROMPT, more={"selection_id": "a/b?"}) as placed:
            assert (placed.selection_id, placed.worker_id, placed.overlap.gpu) == ("a/b?", "w/0", 144)
            (load,) = (await client.loads("m"))[0].loads
            assert (load.active_requests, load.potential_prefill_tokens) == (1, 16)
            await client.complete("a/b?")
            (load,) = (await client.loads("m"))[0].loads
            assert (load.active_requests, load.potential_prefill_tokens) == (1, 0)
        (load,) = (await client.loads("m"))[0].loads
        assert (load.active_requests, load.potential_decode_blocks) == (0, 0)
        with pytest.raises(KvsightHttpError, match="reservation a/b\\? not found"):
            await client.release("a/b?")


async def test_text_is_placed_like_its_tokens_and_by_load_if_the_engine_is_away() -> None:
    chat = {"model": "m", "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]}
    engine = FakeEngine({CHATS: rendered(*PROMPT)})
    policy = SelectionSettings(policy="session,overlap-load")
    async with rendering(engine):
        tokenizer = {"tokenize_url": engine.url, "tokenize_timeout_s": 5}
        async with fleet({0: range(1)}, {0: range(9)}, selection=policy, **tokenizer) as (client, _):
            expected = (await client.post("/select", json=BODY)).json()
            chosen = (await client.post("/select", json=chat)).json()
            assert chosen == expected | {"worker_id": "w1"}
            engine.answers[CHATS] = (500, {})
            longer = {**chat, "messages": [*chat["messages"], {"role": "user", "content": "more"}]}
            for begins, workers in ((chat["messages"], {"w1"}), (chat["messages"][:1], {"w0", "w1"})):
                bodies = [{**longer, "messages": [*begins, {"role": "user", "content": str(i)}]} for i in range(8)]
                assert {(await client.post("/select", json=each)).json()["worker_id"] for each in bodies} == workers
            degraded = (await client.post("/select_and_reserve", json=longer)).json()
            assert "status 500" in degraded["degraded"]
            assert (degraded["worker_id"], degraded["isl_tokens"]) == ("w1", 0)  # the worker of its first messages
            assert (await client.post("/select", json={"model": "m", "messages": 5})).status_code == 422
            for path in ("/potential_loads", "/overlap_scores"):
                assert "status 500" in check_problem(await client.post(path, json=longer), 503)["detail"]


async def test_nothing_is_booked_for_a_caller_that_left_while_an_engine_made_its_tokens(fed: HandFed) -> None:
    engine = FakeEngine({CHATS: rendered(*PROMPT)})
    async with (
        rendering(engine),
        served(fed.consumer, tokenize_url=engine.url, tokenize_timeout_s=60, tokenize_at_once=1) as client,
    ):
        await fed.hold(Stream(worker="w0", model="m", block_size=BLOCK), PROMPT)
        engine.may_answer.clear()
        chats = [{"model": "m", "messages": [{"role": "user", "content": text}]} for text in "ab"]
        leaving = asyncio.create_task(client.post("/select_and_reserve", json=chats[0]))
        await async_wait_until(lambda: engine.num_waiting == 1, what="the engine to be asked")
        leaving.cancel()
        staying = asyncio.create_task(client.post("/select_and_reserve", json=chats[1]))  # waits for its turn
        await client.get("/health")
        engine.may_answer.set()
        assert (await staying).is_success
        assert (await loads(client))["w0"][0] == 1


async def test_a_long_name_is_refused_before_anything_is_booked() -> None:
    async with fleet({0: range(3)}) as (client, _):
        for field in ("selection_id", "session_id"):
            answer = await client.post("/select_and_reserve", json={**BODY, field: "é" * 200})
            assert (answer.status_code, answer.json()["field"]) == (422, field)
        assert (await loads(client))["w0"] == (0, 0, 0)


async def test_load_of_others_counts_until_it_is_booked_here() -> None:
    """Of two workers, the engine of one says that it has requests which nobody booked."""
    book = SelectionSettings().book()
    reports: dict[str, Report] = {}
    fed = HandFed()
    for worker in ("w0", "w1"):
        stream = StreamId("m", "default", worker, 0)
        fed.consumer.namespaces.add_view(stream, BLOCK).last_batch_tick = time.monotonic()
    (namespace,) = fed.consumer.namespaces

    class Engines:
        generation = 0

        def get(self, *_worker: str) -> None:
            return None

        def report(self, rank: StreamId) -> Report | None:
            return reports.get(rank.worker)

    def shown(now: float) -> list[tuple[int, int]]:
        nothing = np.zeros(0, np.int32), np.zeros((64, 4), np.uint32)
        found = Found(np.zeros(0, np.uint64), 0, *nothing)
        candidates = rosters.candidates(namespace, fed.consumer.freshness, found, now).candidates
        return list(zip(candidates.requests.tolist(), candidates.decode_blocks.tolist(), strict=True))

    rosters = Rosters(book, Engines())
    assert shown(100.0) == [(0, 0), (0, 0)]
    reports["w0"] = Report(101.0, 3, 40)
    assert shown(101.1) == [(3, 40), (0, 0)]
    hashes = np.arange(1, 11, dtype="<u8").tobytes()
    decision = Decision(VERSION, "a", 101.2, "m", "default", BLOCK, 160, hashes, "w0", 0, None, ())
    assert book.apply(Reserved(VERSION, "r", decision, 160), 101.2)
    assert shown(101.3) == [(4, 50), (0, 0)]
    reports["w0"] = Report(102.0, 4, 50)
    assert shown(102.1) == [(4, 50), (0, 0)]  # three of others, and ours
    reports["w0"] = Report(103.0, 1, 10)
    assert shown(103.1) == [(1, 10), (0, 0)]
    reports["w0"] = Report(104.0, 9, 90)  # nobody asked for a while; this may count what has ended
    assert shown(106.0) == [(1, 10), (0, 0)]


async def test_prefill_is_booked_where_the_prompt_is_computed() -> None:
    async with fleet({0: range(9)}, {0: range(1)}, {0: range(1)}, selection=PREFILL_DECODE) as (client, _):
        for number, role in enumerate(("decode", "prefill", "prefill")):
            record = {"worker_id": f"w{number}", "model_name": "m", "role": role, "block_size": BLOCK}
            record |= {"endpoint": f"http://w{number}:8000"}
            assert (await client.post("/workers", json=record)).status_code == 201
        new = {"token_ids": list(range(500, 660))}
        first = await post(client, "/select_and_reserve", **new, selection_id="a")
        second = await post(client, "/select_and_reserve", token_ids=list(range(700, 860)), selection_id="b")
        held = await post(client, "/select_and_reserve", selection_id="c")
        assert (first["worker_id"], second["worker_id"], held["worker_id"]) == ("w0", "w0", "w0")
        assert {first["prefill"]["worker_id"], second["prefill"]["worker_id"]} == {"w1", "w2"}
        assert "prefill" not in held
        assert (await loads(client))["w0"] == (3, 16, 30)
        assert {worker: load[:2] for worker, load in (await loads(client)).items() if worker != "w0"} == {
            "w1": (1, 160),
            "w2": (1, 160),
        }
        assert (await client.post("/reservations/a/prefill_complete")).is_success
        for name in ("a", "b", "c"):
            assert (await client.delete(f"/reservations/{name}")).is_success
        assert set((await loads(client)).values()) == {(0, 0, 0)}
        funnel = (await client.get("/funnel")).json()  # counts a request for two workers once
        assert [each["request_id"] for each in funnel["decisions"]] == ["c", "b", "a"]
        assert (funnel["all"]["requests"], funnel["all"]["prompt_tokens"]) == (3, 480)


async def test_models_and_tenants_do_not_share_what_a_policy_remembers() -> None:
    async with fleet(selection=SelectionSettings(policy="session-hard,overlap-load")) as (client, fed):
        for tenant, order in (("a", (9, 1)), ("b", (1, 9))):
            for number, pages in enumerate(order):
                stream = Stream(worker=f"w{number}", model="m", tenant=tenant, block_size=BLOCK)
                await fed.hold(stream, PROMPT, {0: range(pages)})
        chosen = [
            (await post(client, "/select", routing_group=tenant, session_id="s"))["worker_id"] for tenant in "abab"
        ]
        assert chosen == ["w0", "w1", "w0", "w1"]


async def test_bounds_of_reservations() -> None:
    async with fleet({0: range(3)}) as (client, _):
        place = {"model_name": "m", "worker_id": "w0", "dp_rank": 0, "selection_id": "many"}
        hashes = list(range(1, MAX_PAGES_PER_DECISION + 10))
        assert (await client.post("/reservations", json={**place, "sequence_hashes": hashes})).status_code == 201
        assert (await loads(client))["w0"][2] == MAX_PAGES_PER_DECISION
        large = await client.post("/reservations/many/output_block", content=b" " * 2000)
        assert large.status_code == 413
        cold = await post(client, "/select", router_config_override={"router_temperature": 1e-320})
        assert cold["worker_id"] == "w0"


@pytest.mark.parametrize(("bound", "value", "num_kept"), [("_MAX_PENDING", 3, 3), ("_MAX_PENDING_PAGES", 25, 2)])
async def test_choices_that_may_be_reserved_are_bounded(
    bound: str, value: int, num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reserved(client: httpx.AsyncClient, names: str) -> list[int]:
        for name in names:
            await post(client, "/select", selection_id=name)
        asked = [{"model_name": "m", "selection_id": name} for name in names]
        return [(await client.post("/reservations", json=each)).status_code for each in asked]

    monkeypatch.setattr(f"api.selection.reservations.{bound}", value)
    async with fleet({}) as (client, _):
        assert await reserved(client, "abcde") == [404] * (5 - num_kept) + [201] * num_kept
        assert await reserved(client, "fghij") == [404] * (5 - num_kept) + [201] * num_kept
        again = await client.post("/reservations", json={"model_name": "m", "selection_id": "j"})
        assert "already used" in check_problem(again, 404)["detail"]


@pytest.mark.parametrize(
    ("hashes", "num_booked"),
    [([-1, 2**64 - 1], 1), ([-(2**63), 2**63, 5], 2), ([2**64], None), ([1, -(2**63) - 1], None)],
)
async def test_hashes_may_have_a_sign(hashes: list[int], num_booked: int | None) -> None:
    place = {"model_name": "m", "worker_id": "w0", "dp_rank": 0}
    async with fleet({}) as (client, _):
        for number, each in enumerate(hashes):
            body = {**place, "selection_id": str(number), "sequence_hashes": [each]}
            answer = await client.post("/reservations", json=body)
            if num_booked is None and number == len(hashes) - 1:
                assert str(each) in check_problem(answer, 422, "invalid-value", "sequence_hashes[0]")["detail"]
            else:
                assert answer.status_code == 201
        if num_booked is not None:
            assert (await loads(client))["w0"][2] == num_booked


async def test_nobody_is_chosen_before_the_log_is_applied() -> None:
    async with fleet(None, answer_before_ready=False) as (client, _):
        assert await post(client, "/select")
    unready = create_app(LiveService(HandFed().consumer, ApiSettings(answer_before_ready=False)))
    transport = httpx.ASGITransport(unready)  # whose consumer does not run
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        answer = await client.post("/select", json=BODY)
        assert (answer.status_code, "not applied yet" in answer.text) == (503, True)
