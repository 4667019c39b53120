"""The API over the past: each route, at any moment of a log, and what only the past has."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import httpx
import pytest

from analysis.diff import diff, holdings_of, holdings_of_dump
from indexer.replay import LogIndexer, Timeline
from kv_events.log.moments import LogMoment
from tests.rigs.api import replaying, searched_span
from tests.support.commands import printed
from tests.support.http_checks import check_problem
from tests.support.log.faulty_run import faulty_run
from tests.support.log.late_log import write_log
from tests.support.log.plain_log import flip, segments

NUM_RECORDS = 400


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with faults of three workers in two partitions, with key frames."""
    folder = write_log(tmp_path_factory.mktemp("log"), faulty_run(Random(3), NUM_RECORDS), 20_000)
    LogIndexer(folder, frame_cost=10_000).advance()
    return folder


@pytest.fixture
async def client(log: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with replaying(log) as client:
        yield client


def random_moments(log: Path, number: int) -> list[str]:
    """Moments in all forms, many of them near the one before, as of a page that plays."""
    timeline, random = Timeline(log), Random(11)
    span = timeline.extent.span_s
    assert span is not None
    moments, index = [], 1
    for _ in range(number):
        is_near = random.random() < 0.7
        index = min(timeline.next_index, index + random.randrange(1, 9)) if is_near else random.randrange(1, 400)
        at = timeline.at(LogMoment(index=index))
        forms = [str(index), str(index), f"@{max(span[0], at.now - random.choice((0.0, 0.3, 20.0)))}"]
        if len(at.positions) == 2:
            forms.append(",".join(f"{partition}:{offset}" for partition, offset in at.positions.items()))
        moments.append(random.choice(forms))
    return moments


async def test_random_moments_are_those_of_the_command(client: httpx.AsyncClient, log: Path, tmp_path: Path) -> None:
    query = {"model_name": "m", "seq_hashes": list(range(1, 40))}
    (tmp_path / "query.json").write_text(json.dumps(query))
    for at in random_moments(log, 8):
        expected = {
            (view["model"], view["worker"], view["dp_rank"]): view for view in printed("replay", log, "--at", at)
        }
        workers = (await client.get("/workers", params={"at": at})).json()
        shown = {
            (worker["model_name"], worker["instance_id"], int(rank)): {
                "model": worker["model_name"],
                "worker": worker["instance_id"],
                "dp_rank": int(rank),
                "state": listener["state"],
                "epoch": listener["epoch"],
                "next_seq": listener["seq"] + 1,
                **listener["pages"],
            }
            for worker in workers
            for rank, listener in worker["listeners"].items()
        }
        assert shown == expected, at
        if any(model == "m" for model, *_ in expected):
            answer = await client.post("/query_by_hash", params={"at": at}, json=query)
            assert answer.json() == printed("replay", log, "--at", at, "--query", tmp_path / "query.json"), at


async def test_dumps_are_those_of_the_moments(client: httpx.AsyncClient, log: Path) -> None:
    timeline = Timeline(log)
    dumps = await asyncio.gather(*(client.get("/dump", params={"at": at}) for at in range(30, 390, 40)))
    for at, dump in zip(range(30, 390, 40), dumps, strict=True):
        held = holdings_of(timeline.at(LogMoment(index=at)))
        found = diff(held, holdings_of_dump(dump.json()))
        assert all(each.is_empty for each in found), at
        assert any(len(each.hashes) for each in held.values())


async def test_a_request_without_a_moment_gets_that_of_the_command_or_the_end(
    client: httpx.AsyncClient, log: Path
) -> None:
    async with replaying(log, LogMoment(index=120)) as other:
        assert (await other.get("/moment")).json()["index"] == 120
        assert (await other.get("/workers")).json() == (await other.get("/workers?at=120")).json()
        assert (await other.get("/span")).json()["at"] == "120"
    assert (await client.get("/moment")).json()["index"] == Timeline(log).next_index
    assert (await client.get("/span")).json()["at"] == ""


async def test_steps_lead_from_batch_to_batch(client: httpx.AsyncClient, log: Path) -> None:
    forward = [(await client.get("/moment?at=50")).json()]
    for _ in range(20):
        at = forward[-1]["at"]
        forward.append((await client.get("/moment", params={"at": at, "step": "next"})).json())
    back = [forward[-1]]
    for _ in range(20):
        back.append((await client.get("/moment", params={"at": back[-1]["at"], "step": "previous"})).json())
    assert [each["records"] for each in forward] == list(range(forward[0]["records"], forward[0]["records"] + 21))
    assert [each["records"] for each in back] == [each["records"] for each in reversed(forward)]
    assert [each["batch"] for each in back[1:-1]] == [each["batch"] for each in reversed(forward[1:-1])]
    at_end = await client.get("/moment?step=next")
    check_problem(at_end, 422, "outside-the-log", "step")
    check_problem(await client.get("/moment?at=1&step=previous"), 422, "outside-the-log", "step")


async def test_differences_are_those_of_the_command(client: httpx.AsyncClient, log: Path) -> None:
    expected = printed("replay", log, "--at", 80, "--diff", log, "--to", 300)
    assert (await client.get("/diff?from=80&at=300")).json() == expected


@pytest.mark.parametrize(
    ("at", "kind", "words"),
    [
        ("100000", "outside-the-log", "behind the end of the log, whose moments are 1 to "),
        ("0", "outside-the-log", "before the start of the log"),
        ("@5", "outside-the-log", "before the start of the log, which has records from 2023-11-14T22:1"),
        ("2400-01-01", "outside-the-log", "behind the end of the log"),
        ("0:1,1:100000", "outside-the-log", "before the start of the log, which has records 0:"),
        ("7:1", "outside-the-log", "no partition 7"),
        ("yesterday", "invalid-value", "got 'yesterday', expected a time (ISO 8601"),
        ("", "invalid-value", "got '', expected"),
        ("9" * 5000, "invalid-value", "expected a time"),
    ],
)
async def test_a_moment_outside_the_log_is_a_clear_problem(
    client: httpx.AsyncClient, log: Path, at: str, kind: str, words: str
) -> None:
    for path in ("/workers", "/dump", "/metrics", "/moment"):
        problem = await client.get(path, params={"at": at})
        assert words in check_problem(problem, 422, kind, "at")["detail"]


async def test_a_request_names_one_moment_among_a_hundred_parameters(client: httpx.AsyncClient) -> None:
    check_problem(await client.get("/workers?at=1&at=2"), 422, "invalid-value", "at")
    assert (await client.get("/workers?at=1&" + "&".join(["x="] * 99))).status_code == 200
    detail = check_problem(await client.get("/workers?at=1&" + "&".join(["x="] * 100)), 422, "invalid-value")["detail"]
    assert detail == "a request has at most 100 parameters"


async def test_the_past_does_not_change(client: httpx.AsyncClient, log: Path) -> None:
    writing = "/register", "/unregister", "/decisions", "/workers", "/workers/w-0/resync", "/select_and_reserve"
    for path in (*writing, "/reservations", "/reservations/r/prefill_complete"):
        check_problem(await client.post(path, json={}), 409, "read-only")
    for path in ("/workers/w-0", "/reservations/r"):
        check_problem(await client.delete(path), 409, "read-only")
    assert (await client.get("/workers")).status_code == 200


async def test_metrics_are_those_of_the_moment(client: httpx.AsyncClient, log: Path) -> None:
    for at in (300, 50, 300):
        lines = (await client.get(f"/metrics?at={at}")).text.splitlines()
        records = (await client.get(f"/moment?at={at}")).json()["records"]
        assert f"kvsight_records_total {records:.1f}" in lines
        views = Timeline(log).at(LogMoment(index=at)).namespaces.views
        assert f"kvsight_pages_stored_total {sum(v.counters.pages_stored for v in views):.1f}" in lines


async def test_marks_are_what_the_views_counted(client: httpx.AsyncClient, log: Path) -> None:
    views = Timeline(log).at()
    span = await searched_span(client)
    marks = span["marks"]
    assert span["num_marks"] == {kind: sum(mark["kind"] == kind for mark in marks) for kind in span["num_marks"]}
    assert span["num_marks"]["rejected"] == views.applier.dead_letters.counts.total()
    assert span["num_marks"].keys() == {"gap", "degraded", "rejected", "restart", "resync"}
    for kind, counter in (("gap", "gaps"), ("restart", "restarts"), ("resync", "resyncs")):
        for view in views.namespaces.views:
            found = sum(mark["kind"] == kind and mark["stream"] == view.stream.key for mark in marks)
            assert found >= getattr(view.counters, counter)  # a view with another block size begins anew
    assert [mark["index"] for mark in marks] == sorted(mark["index"] for mark in marks)


def damaged_copy(log: Path, copy: Path) -> str:
    """Copy a log without its time index, flip a bit in a segment, and return the segment's name."""
    for path in log.iterdir():
        if path.suffix != ".kvtimes":
            (copy / path.name).write_bytes(path.read_bytes())
    segment = segments(copy)[1]
    flip(segment, segment.stat().st_size // 2)
    return segment.name


async def test_a_damaged_log_serves_its_good_part_and_names_the_damage(log: Path, tmp_path: Path) -> None:
    segment = damaged_copy(log, tmp_path)
    async with replaying(tmp_path) as client:
        span = await searched_span(client)
        assert [segment in line for line in span["damage"]] == [True]
        at = span["next_index"]
        assert (await client.get(f"/workers?at={at}")).json() != []
        assert (await client.get(f"/moment?at={at}")).json()["records"] > 100


async def test_many_requests_for_many_moments_are_all_answered(client: httpx.AsyncClient, log: Path) -> None:
    moments = [1 + 37 * i % 399 for i in range(40)]
    expected = [Timeline(log).at(LogMoment(index=at)).applier.records for at in moments]
    answers = await asyncio.gather(*(client.get(f"/moment?at={at}") for at in moments))
    assert [answer.json()["records"] for answer in answers] == expected


async def test_the_token_is_asked_for(log: Path) -> None:
    async with replaying(log, api_token="s3cret") as client:
        check_problem(await client.get("/workers?at=10"), 401, "unauthorized")
        check_problem(await client.get("/metrics?at=10"), 401, "unauthorized")
        for path in ("/workers?at=10", "/metrics?at=10"):
            assert (await client.get(path, headers={"Authorization": "Bearer s3cret"})).status_code == 200
        document = (await client.get("/openapi.json")).json()
        assert "security" not in document["paths"]["/metrics"]["get"]


async def test_bodies_that_arrive_slowly_hold_no_moment(log: Path) -> None:
    asked = json.dumps({"model_name": "m", "seq_hashes": [1, 2, 3]}).encode()
    begun, is_over = asyncio.Semaphore(0), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield asked[:1]
        begun.release()
        await is_over.wait()
        yield asked[1:]

    headers = {"Content-Type": "application/json"}
    async with replaying(log, max_body_bytes=1024) as client:
        moments = range(200, 360, 20)
        slow = [
            asyncio.create_task(client.post(f"/query_by_hash?at={at}", content=slowly(), headers=headers))
            for at in moments
        ]
        async with asyncio.timeout(120):
            for _ in slow:
                await begun.acquire()
        assert (await client.get("/workers?at=5")).status_code == 200
        is_over.set()
        for at, answer in zip(moments, await asyncio.gather(*slow), strict=True):
            at_once = await client.post(f"/query_by_hash?at={at}", content=asked, headers=headers)
            assert (answer.status_code, answer.json()) == (200, at_once.json()), at
        large = await client.post("/query?at=5", content=b" " * 1025, headers=headers)
        check_problem(large, 413, "body-too-large", "body")
