"""The files of the page, and the routes from which it takes its data."""

import json
import re
import time
import tracemalloc
from collections.abc import Generator, Iterable
from typing import Any
from urllib.parse import urljoin

import httpx
import msgspec
import pytest

from api.decisions.window import DecisionWindow
from api.page.routes import AnswerCache
from api.page.worker_history import WorkerHistory
from kv_events.decisions import VERSION, Candidate, Choices, Decision, Outcome
from kv_events.http.fleet import DecisionFunnel, Fleet, Residency
from kv_events.http.queries import PeerAnswer, RfcAnswer
from kv_events.http.service import Readiness, Status
from kv_events.http.workers import RadixView, ResyncAccepted, Worker
from kv_events.reservations import Reserved, encode_reservation, record_openings
from tests.rigs.api import Serving
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, removed, stored
from tests.support.servers.scripted_server import HANG_UP, Reply, scripted
from tests.support.waiting import async_wait_for, async_wait_until

START = 1_700_000_000.0
TOKENS = list(range(1, 17))
JSON = {"Content-Type": "application/json"}
OTHER = [*range(1, 9), *range(100, 108)]  # the same two pages, then others


async def fleet_of(client: Any, **params: Any) -> Fleet:
    return msgspec.json.decode((await client.get("/fleet", params=params)).content, type=Fleet)


def sentence(fleet: Fleet) -> str:
    return "".join("TIME" if isinstance(part, float) else part for part in fleet.verdict)


@pytest.mark.parametrize("settings", [{}, {"api_token": "s3cret"}])
async def test_the_page_needs_no_token_and_its_data_does(settings: dict[str, Any], serving: Any) -> None:
    async with serving(**settings) as (client, _):
        page = await client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        for address in re.findall(r'(?:src|href)="(page/[^"]+)"', page.text):
            found = await client.get(urljoin("/", address))
            assert found.status_code == 200, address
            again = await client.get(urljoin("/", address), headers={"If-None-Match": found.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for path in ("/fleet", "/residency", "/funnel"):
            assert (await client.get(path)).status_code == (401 if settings else 200), path


async def test_the_page_runs_no_script_but_its_own(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert not re.findall(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", page.text)
    assert not re.findall(r'(?:src|href)="(?:/|\w+:)', page.text)  # relative, so that a proxy may add a prefix


async def test_a_fleet_without_workers_is_empty(client: httpx.AsyncClient, fed: HandFed) -> None:
    await fed.feed()
    fleet = await fleet_of(client)
    assert (fleet.level, fleet.workers) == ("empty", [])
    assert sentence(fleet).startswith("No worker is known: let an engine or `kvsight bridge` publish")


async def test_a_worker_has_what_is_booked_on_it_until_it_is_released(client: httpx.AsyncClient, fed: HandFed) -> None:
    await fed.hold(Stream("one"), TOKENS[:8])
    body = {"model_name": "m", "token_ids": TOKENS, "selection_id": "r1"}
    (await client.post("/select_and_reserve", json=body)).raise_for_status()
    (worker,) = (await fleet_of(client)).workers
    assert worker.booked == {"requests": 1, "prefill_tokens": 8, "decode_pages": 4}
    (await client.delete("/reservations/r1")).raise_for_status()
    await async_wait_for(  # answers are kept for a moment
        lambda: fleet_of(client), lambda fleet: fleet.workers[0].booked == {}, what="the release on the page"
    )


async def test_live_workers_are_counted_with_the_age_of_their_digests(client: httpx.AsyncClient, fed: HandFed) -> None:
    await fed.hold(Stream("one"), TOKENS)
    await fed.hold(Stream("two"), TOKENS)
    fleet = await fleet_of(client)
    assert fleet.level == "ok"
    assert re.fullmatch(
        r"2 of 2 workers live. Views equal what the engines reported as of [\d.]+ s ago \(digests\).", sentence(fleet)
    )
    assert [worker.worker for worker in fleet.workers] == ["one", "two"]
    assert fleet.workers[0].pages == {"GPU": 4, "CPU_PINNED": 0, "DISK": 0, "EXTERNAL": 0}
    assert fleet.workers[0].agreed_at == pytest.approx(fleet.time, abs=30)


async def test_a_worker_that_lost_batches_comes_first_and_is_named(client: httpx.AsyncClient, fed: HandFed) -> None:
    good, broken = Stream("a"), Stream("b")
    await fed.hold(good, TOKENS)
    hashes = await fed.hold(broken, TOKENS)
    broken.batch(removed(hashes[:1]))
    broken.batch(removed(hashes[1:2]))
    await fed.feed(broken.batch(removed(hashes[2:3])))
    view = fed.consumer.namespaces.view(broken.id)
    assert view is not None
    await async_wait_until(lambda: fed.consumer.resyncs.is_requested(view))
    fleet = await async_wait_for(
        lambda: fleet_of(client), lambda fleet: "resync asked for" in sentence(fleet), what="the resync in the verdict"
    )
    assert fleet.level == "trouble"
    assert sentence(fleet) == (
        "b stale since TIME: 2 batches lost, resync asked for. Answers still use 3 of its pages. "
        "The other worker is live."
    )
    first = fleet.workers[0]
    assert (first.worker, first.state, first.reason, first.missing_batches) == ("b", "stale", "gap", 2)
    assert first.changes[0].event == "is stale"


async def test_batches_that_a_bridge_missed_count_as_lost(client: httpx.AsyncClient, fed: HandFed) -> None:
    engine = Stream("a")
    await fed.hold(engine, TOKENS)
    await fed.feed(engine.batch(degraded_reason="batches lost: 17"))
    (worker,) = (await fleet_of(client)).workers
    assert (worker.state, worker.reason, worker.gaps, worker.missing_batches) == ("stale", "batches lost: 17", 0, 17)


async def test_pages_of_a_stream_that_is_new_are_no_rate(serving: Any) -> None:
    watch, stream = WorkerHistory(), Stream("one")
    async with serving() as (_, fed):
        list(watch.sample([], 1000.0))
        await fed.hold(stream, TOKENS)
        list(watch.sample(fed.consumer.namespaces.views, 1005.0))
        assert watch.rates(stream.id).tolist() == [[0.0, 0.0], [0.0, 0.0]]
        hashes = await fed.hold(stream, list(range(500, 540)))
        list(watch.sample(fed.consumer.namespaces.views, 1010.0))
        await fed.feed(stream.batch(removed(hashes[-5:])))
        list(watch.sample(fed.consumer.namespaces.views, 1015.0))
    assert watch.rates(stream.id).tolist()[2:] == [[2.0, 0.0], [0.0, 1.0]]


async def test_viewers_select_workers_by_a_part_of_their_name(client: httpx.AsyncClient, fed: HandFed) -> None:
    for name in ("Worker-2", "worker-10", "other"):
        await fed.hold(Stream(name), TOKENS)
    await async_wait_until(lambda: len(fed.consumer.namespaces.views) == 3)
    fleet = await fleet_of(client, contains="WORKER", limit=1)
    assert (fleet.num_workers, fleet.num_selected) == (3, 2)
    assert [worker.worker for worker in fleet.workers] == ["Worker-2"]
    check_problem(await client.get("/fleet", params={"limit": 0}), 422)


@pytest.mark.timing("an answer that takes 50 ms must be computed again within two seconds")
async def test_an_answer_that_takes_long_is_computed_again_soon() -> None:
    shared, begun = AnswerCache(), list[float]()

    def compute() -> Generator[None, None, int]:
        begun.append(time.monotonic())
        while time.monotonic() < begun[-1] + 0.05:  # as 300 workers take at first
            yield
        return len(begun)

    await async_wait_for(lambda: shared.get("fleet", "", compute), lambda number: number > 1, what="a new answer")
    assert 1 < begun[1] - begun[0] < 2


async def test_the_map_shows_shared_prefixes_and_how_much_each_worker_holds(
    client: httpx.AsyncClient, fed: HandFed
) -> None:
    hashes = await fed.hold(Stream("one"), TOKENS)
    await fed.hold(Stream("two"), TOKENS[:8], tiers={0: range(1), 1: range(1, 2)})
    others = await fed.hold(Stream("three"), OTHER)
    await fed.feed()
    found = msgspec.json.decode((await client.get("/residency")).content, type=Residency)
    assert (found.model, found.block_size, found.num_columns) == ("m", 4, 3)
    assert [column.worker for column in found.columns] == ["one", "three", "two"]
    rows = {row.hash: row for row in found.rows}
    assert found.rows[0].hash == f"{hashes[1]:016x}"  # two pages on three workers
    assert set(rows) == {f"{each:016x}" for each in (hashes[1], hashes[3], others[3])}
    shared, longest = rows[f"{hashes[1]:016x}"], rows[f"{hashes[3]:016x}"]
    assert (shared.pages, shared.holders) == (2, 3)
    assert sorted(shared.cells) == [(0, 2, 2, 2, 2), (1, 2, 2, 2, 2), (2, 1, 2, 2, 2)]
    assert (longest.pages, longest.holders) == (4, 1)
    assert sorted(longest.cells) == [(0, 4, 4, 4, 4), (1, 2, 2, 2, 2), (2, 1, 2, 2, 2)]


@pytest.mark.parametrize("num_others", [1, 200])
async def test_the_map_of_a_worker_shows_the_prefixes_that_it_holds(
    client: httpx.AsyncClient, fed: HandFed, num_others: int
) -> None:
    for number in range(num_others):
        await fed.hold(Stream(f"other-{number}"), TOKENS)
    hashes = await fed.hold(Stream("one"), range(200, 208))
    await fed.feed()
    found, none = [
        msgspec.json.decode((await client.get("/residency", params={"worker": worker})).content, type=Residency)
        for worker in ("one", "nobody")
    ]
    assert found.num_columns == num_others + 1
    assert "one" in [column.worker for column in found.columns]
    assert [row.hash for row in found.rows] == [f"{hashes[-1]:016x}"]
    assert none.rows == []


async def test_the_map_of_an_unknown_model_is_a_problem(client: httpx.AsyncClient) -> None:
    check_problem(await client.get("/residency", params={"model": "none"}), 404, "unknown-model")
    empty = msgspec.json.decode((await client.get("/residency")).content, type=Residency)
    assert (empty.namespaces, empty.rows) == ([], [])


async def test_the_present_has_no_moments(client: httpx.AsyncClient) -> None:
    for path in ("/fleet", "/residency", "/funnel"):
        assert "kvsight replay" in check_problem(await client.get(path, params={"at": "12:00"}), 422)["detail"]


async def test_the_funnel_sums_decisions_and_their_outcomes(client: httpx.AsyncClient) -> None:
    decision = {
        "model_name": "m",
        "token_ids": TOKENS,
        "worker": "one",
        "predicted_tokens": 8,
        "candidates": [{"worker": "one", "tokens": 8}, {"worker": "two", "tokens": 12}],
    }
    await client.post("/decisions", json={**decision, "request_id": "first"})
    await client.post("/decisions", json={"request_id": "second", "cached_tokens": 4})  # before its decision
    await client.post("/decisions", json={**decision, "request_id": "second"})
    funnel = msgspec.json.decode((await client.get("/funnel")).content, type=DecisionFunnel)
    assert (funnel.all.requests, funnel.all.prompt_tokens, funnel.all.best_tokens) == (2, 32, 24)
    done = funnel.finished
    assert (done.requests, done.prompt_tokens, done.predicted_tokens, done.cached_tokens) == (1, 16, 8, 4)
    assert {each.request_id: each.cached_tokens for each in funnel.decisions} == {"first": None, "second": 4}
    assert [(each.cause, each.worker, each.requests, each.tokens) for each in funnel.losses] == [
        ("choice", "one", 2, 8),
        ("engine", "one", 1, 4),
    ]
    assert funnel.lost == {"choice": 8, "engine": 4}
    for range_s, steps, step_s in ((3600, 60, 60), (86_400, 60, 1440)):
        found = (await client.get("/funnel", params={"range_s": range_s})).json()
        assert (len(found["curve"]), found["step_s"]) == (steps, step_s)
        assert sum(each["cached_tokens"] for each in found["curve"][-2:]) == 4
    check_problem(await client.get("/funnel", params={"range_s": 5}), 422)


class Window(DecisionWindow):
    """A window that takes decisions r0, r1, ..."""

    def decide(
        self, numbers: Iterable[int], pages: int = 1, candidates: tuple[Candidate, ...] = (), *, is_booked: bool = False
    ) -> None:
        """is_booked: they come as records of reservations."""
        for number in numbers:
            prompt = 4, 4 * pages, bytes(8 * pages)
            decision = Decision(VERSION, f"r{number}", START, "m", "t", *prompt, f"w{number}", 0, 4, candidates)
            if is_booked:
                record = encode_reservation(Reserved(VERSION, "replica", decision, 0))
                opening, _ = record_openings("replica")
                rest = record.removeprefix(opening)[1:]  # the name's size, as kernels write it
                record = opening + bytes([0xD9, len(decision.request_id)]) + rest
                best = max([each.tokens for each in candidates], default=4)
                lost = [(f"w{number}", 1, best - 4, 0)] if best > 4 else []
                sums = 1, 4 * pages, best, 4
                self.take_all(Choices(START, sums, lost, record, [len(record)], len(opening) + 2))
            else:
                self.take(decision)

    def finished(self, number: int) -> int:
        """Report an outcome. Returns how many found their decision so far."""
        self.take(Outcome(VERSION, f"r{number}", START, 0))
        return self.report(START).finished.requests


def test_more_decisions_wait_once_outcomes_are_reported() -> None:
    window = Window()
    window.decide(range(2_500))
    assert [window.finished(number) for number in (499, 500)] == [0, 1]
    window.decide(range(2_500, 20_000))
    window.decide([2_500])  # again
    assert [window.finished(number) for number in (498, 501)] == [1, 2]
    assert window.report(START).all.requests == 20_000


@pytest.mark.parametrize("is_booked", [False, True])
def test_an_id_counts_once_until_its_outcome_has_come(is_booked: bool) -> None:
    window = Window()
    window.decide([0, 1, 0, 0], candidates=(Candidate("other", 0, 12, 0.0),), is_booked=is_booked)
    report = window.report(START)
    assert (report.all.requests, report.all.prompt_tokens, report.all.best_tokens) == (2, 8, 24)
    assert sorted((each.worker, each.requests, each.tokens) for each in report.losses) == [("w0", 1, 8), ("w1", 1, 8)]
    assert [each.request_id for each in report.decisions] == ["r0", "r1"]
    assert window.finished(0) == 1
    window.decide([0], is_booked=is_booked)
    assert window.report(START).all.requests == 3


def test_booked_ones_are_read_when_somebody_asks_and_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    window = Window()
    with monkeypatch.context() as unread:
        unread.setattr(Choices, "name", None)
        window.decide(range(100), is_booked=True)
        window.decide([100, 0, 99])
        window.decide([101, 100, 1], is_booked=True)
        for number in range(102, 162):
            window.decide([number], is_booked=number % 2 > 0)
    report = window.report(START)
    assert (report.all.requests, report.all.prompt_tokens) == (162, 4 * 162)
    assert {each.request_id for each in report.decisions} == {f"r{number}" for number in range(112, 162)}


def test_of_very_many_unread_ones_the_newest_wait() -> None:
    window = Window()
    window.decide(range(1_500), is_booked=True)
    window.decide(range(1_500, 4_000))
    assert [window.finished(number) for number in (0, 1_999, 2_000, 3_999)] == [0, 0, 1, 2]


def test_outcomes_that_are_always_late_are_counted() -> None:
    window = Window()
    for number in range(5_000):
        window.decide([number])
        if number >= 2_100:
            window.take(Outcome(VERSION, f"r{number - 2_100}", START, 4))
    assert window.finished(4_999) > 2_000


@pytest.mark.parametrize(
    ("pages", "candidates", "is_booked"),
    [(65_536, (), False), (1, (Candidate("w", 0, 0, 0.0),) * 4096, False), (65_536, (), True)],
    ids=["pages", "candidates", "booked"],
)
def test_large_decisions_take_little_memory(pages: int, candidates: tuple[Candidate, ...], is_booked: bool) -> None:
    window = Window()
    tracemalloc.start()
    window.decide(range(600), pages, candidates, is_booked=is_booked)
    held = tracemalloc.get_traced_memory()[0]
    window.decide(range(600, 900), pages, candidates, is_booked=is_booked)
    assert tracemalloc.get_traced_memory()[0] < held + 2**20
    for number in range(900):
        window.finished(number)
    num_waited = window.report(START).finished.requests
    assert tracemalloc.get_traced_memory()[0] < 2**23
    tracemalloc.stop()
    assert 55 < num_waited < 70
    window.decide(range(1000, 1050), pages, candidates)
    assert window.finished(1000) == num_waited + 1
    assert len(json.loads(window.report(START).losses[0].explain)["seq_hashes"]) == min(pages, 512)


@pytest.mark.parametrize("is_booked", [False, True])
def test_a_long_prompt_keeps_what_its_best_candidate_held(is_booked: bool) -> None:
    window = Window()
    candidates = Candidate("w0", 0, 4, 0.0), Candidate("w1", 0, 8000, 0.0)
    window.decide([0], 2000, candidates, is_booked=is_booked)
    window.take(Outcome(VERSION, "r0", START, 0))
    found = window.report(START)
    assert [each.best_tokens for each in (*found.decisions, *(loss.example for loss in found.losses))] == [8000] * (
        1 + len(found.losses)
    )


async def test_a_loss_names_an_example_that_can_be_explained(client: httpx.AsyncClient, fed: HandFed) -> None:
    hashes = await fed.hold(Stream("one"), TOKENS)
    decision = {"model_name": "m", "token_ids": TOKENS, "worker": "one", "request_id": "r", "predicted_tokens": 8}
    await client.post("/decisions", json=decision)
    await client.post("/decisions", json={"request_id": "r", "cached_tokens": 4})
    (loss,) = (await client.get("/funnel")).json()["losses"]
    assert (loss["cause"], loss["example"]["request_id"]) == ("engine", "r")
    body = msgspec.json.decode(loss["explain"])
    assert (body["worker"], body["seq_hashes"], body["at"]) == ("one", hashes, loss["example"]["time"])
    check_problem(await client.post("/explain", content=loss["explain"], headers=JSON), 404)  # it keeps no log


async def test_a_text_is_tokenized_by_the_engine_that_the_operator_named(
    client: httpx.AsyncClient, serving: Serving
) -> None:
    question = {"model_name": "m", "text": "Hello"}
    document = check_problem(await client.post("/tokenize", json=question), 404)
    assert "--tokenize-url" in document["detail"]
    lacks_route = Reply(404, b'{"detail": "Not Found"}')
    answers = [Reply(body=b'{"tokens": [1, 2], "count": 2}'), Reply(body=b'{"tokens": [-1]}'), Reply(500), HANG_UP]
    script = [reply for answer in answers for reply in (lacks_route, answer)]
    async with scripted(*script) as engine, serving(tokenize_url=engine.url) as (other, _):
        assert (await other.post("/tokenize", json=question)).json() == {"token_ids": [1, 2]}
        for number, fault in enumerate(("cannot be read", "status 500", "the tokenizer")):
            asked = {**question, "text": f"Hello {number}"}
            assert fault in check_problem(await other.post("/tokenize", json=asked), 503)["detail"]
        check_problem(await other.post("/tokenize", json={"model_name": "m", "text": ""}), 422)
    asked = {"model": "m", "prompt": "Hello", "mm_payload": "none"}
    assert [msgspec.json.decode(request.body) for request in engine.requests[:2]] == [asked, asked]


@pytest.mark.parametrize(
    ("method", "path", "body", "kind"),
    [
        ("GET", "/workers", None, list[Worker]),
        ("GET", "/workers/one/view", None, RadixView),
        ("POST", "/workers/one/resync", None, ResyncAccepted),
        ("GET", "/fleet", None, Fleet),
        ("GET", "/residency", None, Residency),
        ("GET", "/funnel", None, DecisionFunnel),
        ("GET", "/health", None, Status),
        ("GET", "/ready", None, Readiness),
        ("POST", "/query", {"model_name": "m", "token_ids": TOKENS, "tier_weights": [1, 1, 1, 1]}, PeerAnswer),
        ("POST", "/query", {"model": "m", "block_size": 4, "token_ids": TOKENS}, RfcAnswer),
    ],
)
async def test_a_client_loses_nothing_of_an_answer(
    client: httpx.AsyncClient, fed: HandFed, method: str, path: str, body: Any, kind: type[Any]
) -> None:
    hashes = await fed.hold(Stream("one"), TOKENS)
    await fed.feed(Stream("one", model="m#mamba").batch(stored((0, hashes))))
    received = (await client.request(method, path, json=body)).content
    assert msgspec.json.encode(msgspec.json.decode(received, type=kind)) == received


async def test_the_documentation_describes_the_structs(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    schemas, paths = document["components"]["schemas"], document["paths"]
    for path, name in (("/workers/{worker}/view", "RadixView"), ("/health", "Status"), ("/ready", "Readiness")):
        (operation,) = paths[path].values()
        (content,) = operation["responses"]["200"]["content"].values()
        assert content["schema"] == {"$ref": f"#/components/schemas/{name}"}
    listed = paths["/workers"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert listed == {"type": "array", "items": {"$ref": "#/components/schemas/Worker"}}
    may_be_absent = {"not_schedulable_reasons", "kv_events_endpoints"}
    assert set(schemas["Worker"]["required"]) == set(schemas["Worker"]["properties"]) - may_be_absent
    assert "weighted" not in schemas["PeerInstance"]["required"]
    assert schemas["Worker"]["properties"]["state"]["enum"] == ["live", "syncing", "stale", "expired"]
    assert schemas["Listener"]["properties"]["counters"]["properties"]["gaps"] == {"type": "integer"}
