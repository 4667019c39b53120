"""The API over the past: each route, at any moment of a log, and what only the past has."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from analysis.diff import diff, holdings_of, holdings_of_dump
from api.app import create_app
from api.replay.service import ReplayService
from api.settings import ApiSettings
from indexer.replay import LogIndexer, Timeline
from kv_events.decisions import VERSION, Decision, encode_decision
from kv_events.log.event_log import EventLogWriter
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord
from kvsight.cli.main import app as cli
from tests.rigs.api import asking
from tests.support import http_checks
from tests.support.log.faulty_run import faulty_run
from tests.support.log.records import Stream, removed, stored
from tests.support.waiting import async_wait_until

NUM_RECORDS = 400


def check_problem(response: httpx.Response, status: int, kind: str, field: str | None = None) -> dict[str, Any]:
    """Check that a response is a problem document of this kind, and return it."""
    document = http_checks.check_problem(response, status)
    assert (document["type"], document.get("field")) == (f"urn:kvsight:problem:{kind}", field)
    return document


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with faults of three workers in two partitions, with key frames."""
    folder = tmp_path_factory.mktemp("logs") / "run.log"
    with EventLogWriter(folder, segment_bytes=20_000) as writer:
        for record in faulty_run(Random(3), NUM_RECORDS):
            writer.append(record)
    LogIndexer(folder, frame_cost=10_000).advance()
    return folder


@asynccontextmanager
async def serving(log: Path, default: LogMoment | None = None, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(ReplayService(log, ApiSettings(**settings), default or LogMoment(), []))
    async with asking(app) as client:
        yield client


@pytest.fixture
async def client(log: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(log) as client:
        yield client


def replayed(*arguments: object) -> Any:
    """What `kvsight replay --json` prints."""
    result = CliRunner().invoke(cli, ["replay", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


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
        expected = {(view["model"], view["worker"], view["dp_rank"]): view for view in replayed(log, "--at", at)}
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
            assert answer.json() == replayed(log, "--at", at, "--query", tmp_path / "query.json"), at


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
    async with serving(log, LogMoment(index=120)) as other:
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
    expected = CliRunner().invoke(cli, ["replay", str(log), "--at", "80", "--diff", str(log), "--to", "300", "--json"])
    assert expected.exit_code == 0, expected.stderr
    assert (await client.get("/diff?from=80&at=300")).json() == json.loads(expected.stdout)


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
    check_problem(await client.get("/workers?at=1&at=2"), 422, "invalid-value", "at")


async def test_the_past_does_not_change(client: httpx.AsyncClient, log: Path) -> None:
    for path in ("/register", "/unregister", "/decisions", "/workers/w-0/resync"):
        check_problem(await client.post(path, json={}), 409, "read-only")


async def test_metrics_are_those_of_the_moment(client: httpx.AsyncClient, log: Path) -> None:
    for at in (300, 50, 300):
        lines = (await client.get(f"/metrics?at={at}")).text.splitlines()
        records = (await client.get(f"/moment?at={at}")).json()["records"]
        assert f"kvsight_records_total {records:.1f}" in lines
        views = Timeline(log).at(LogMoment(index=at)).namespaces.views
        assert f"kvsight_pages_stored_total {sum(v.counters.pages_stored for v in views):.1f}" in lines


async def test_marks_are_what_the_views_counted(client: httpx.AsyncClient, log: Path) -> None:
    views = Timeline(log).at()
    span = await all_marks(client)
    marks = span["marks"]
    assert span["num_marks"] == {kind: sum(mark["kind"] == kind for mark in marks) for kind in span["num_marks"]}
    assert span["num_marks"]["rejected"] == views.applier.dead_letters.counts.total()
    assert span["num_marks"].keys() == {"gap", "rejected", "restart", "resync"}
    for kind, counter in (("gap", "gaps"), ("restart", "restarts"), ("resync", "resyncs")):
        for view in views.namespaces.views:
            found = sum(mark["kind"] == kind and mark["stream"] == view.stream.key for mark in marks)
            assert found >= getattr(view.counters, counter)  # a view with another block size begins anew
    assert [mark["index"] for mark in marks] == sorted(mark["index"] for mark in marks)


async def test_the_page_gets_the_workers_their_rates_and_their_changes_of_the_moment(tmp_path: Path) -> None:
    stream, other = Stream("w"), Stream("x")
    with EventLogWriter(tmp_path) as writer:
        for i in range(60):
            writer.append(stream.batch(stored((0, [i + 1])), now=1000 + i))
            if i < 20:
                writer.append(other.batch(now=1000 + i))
    async with serving(tmp_path) as client:
        await all_marks(client)
        fleet = (await client.get("/fleet?at=@1059")).json()
        early = (await client.get("/fleet?at=@1004.5")).json()
    w, x = sorted(fleet["workers"], key=lambda worker: str(worker["worker"]))
    assert (fleet["time"], fleet["is_past"], fleet["states"]) == (1059.0, True, {"live": 1, "expired": 1})
    assert (w["state"], w["pages"]["GPU"], w["stored"]) == ("live", 60, [1.0] * 11)
    assert (x["state"], x["since"], [change["event"] for change in x["changes"]]) == (
        "expired",
        x["changes"][0]["time"],
        ["expired", "is stale", "joined"],
    )
    assert (early["states"], early["workers"][0]["pages"]["GPU"]) == ({"live": 2}, 5)


async def test_the_funnel_has_the_decisions_before_the_moment(tmp_path: Path) -> None:
    stream = Stream("w")
    with EventLogWriter(tmp_path) as writer:
        for i in range(10):
            writer.append(stream.batch(now=1000 + i))
            decision = Decision(VERSION, f"r{i}", 1000.0 + i, "m", "default", 0, 4, b"", "w", None, 4, [])
            writer.append(LogRecord(0, i, 1_000_000 + 1000 * i, b"r", encode_decision(decision), Channel.DECISIONS))
    async with serving(tmp_path) as client:
        requests = [(await client.get(f"/funnel?at={at}")).json()["all"]["requests"] for at in (20, 10, 12, 1, 20)]
    assert requests == [10, 5, 6, 0, 10]


async def test_curves_have_only_intervals_that_were_counted(tmp_path: Path) -> None:
    streams = [Stream(f"w-{number}") for number in range(10)]
    with EventLogWriter(tmp_path) as writer:
        for i in range(1200):  # 200 records a second
            for stream in streams:
                writer.append(stream.batch(stored((0, [i + 1])), now=1000 + i / 20))

    async def curve(client: httpx.AsyncClient, at: str) -> list[float]:
        (worker,) = (await client.get("/fleet", params={"at": at, "worker": "w-3"})).json()["workers"]
        return list(worker["stored"])

    async with serving(tmp_path) as client:
        curves = [await curve(client, at) for at in ("@1059.9", "@1020", "@1055", "@1030", "@1059.95", "12000")]
    assert curves[1:4:2] == [[20.0] * 4, [20.0] * 6]
    assert 7 <= len(curves[0]) <= 10  # of 11: the others would have more than 10,000 records
    assert set(curves[0]) == {20.0}
    assert curves[0] == curves[-2] == curves[-1]
    async with serving(tmp_path) as client:
        assert await curve(client, "@1055") == curves[2]


async def test_the_funnel_has_all_decisions_of_its_hour(tmp_path: Path) -> None:
    stream = Stream("w")
    with EventLogWriter(tmp_path) as writer:
        writer.append(stream.batch(now=999))
        for i in range(25_000):
            at = 1000 + i / 10
            decision = Decision(VERSION, f"r{i}", at, "m", "default", 0, 4, b"", "w", None, 4, [])
            writer.append(LogRecord(0, i, int(at * 1000), b"r", encode_decision(decision), Channel.DECISIONS))
            if i % 1000 == 999:
                writer.append(stream.batch(now=at))
    async with serving(tmp_path) as client:
        found = [(await client.get(f"/funnel?at={at}")).json() for at in (1002, 22_023, 24_025, 25_026, 22_023)]
    assert [each["all"]["requests"] for each in found] == [1000, 22_000, 24_000, 25_000, 22_000]
    assert found[1] == found[-1]


async def test_an_explanation_is_that_of_the_moment(tmp_path: Path) -> None:
    stream = Stream("w")
    with EventLogWriter(tmp_path) as writer:
        writer.append(stream.batch(stored((0, [1, 2])), now=1000))
        writer.append(stream.batch(removed([2]), now=1001))
        writer.append(stream.batch(stored((1, [2])), now=1002))
    asked = {"model_name": "m", "seq_hashes": [1, 2]}
    async with serving(tmp_path) as client:
        causes = [
            (await client.post("/explain", params={"at": at}, json=asked)).json()["workers"][0]["cause"]
            for at in ("1", "@1001", "2", "3")
        ]
    assert causes == ["held", "evicted", "evicted", "held"]


async def test_marks_say_what_happened(tmp_path: Path) -> None:
    stream = Stream("w")
    with EventLogWriter(tmp_path) as writer:
        writer.append(stream.batch(stored((0, [1])), now=1000))
        writer.append(stream.batch(digest=bytes(64), now=1001))
        writer.append(stream.batch(digest=bytes(64), now=1002))  # wrong since the one before
        writer.append(stream.resync(now=1003))
        stream.batch()
        stream.batch()  # neither of them arrives
        writer.append(stream.batch(stored((1, [2])), now=1004))
        stream.restart()
        writer.append(stream.batch(stored((0, [3])), now=1005))
    async with serving(tmp_path) as client:
        marks = (await all_marks(client))["marks"]
    assert [(mark["index"], mark["time"], mark["kind"], mark["text"]) for mark in marks] == [
        (1, 1001.0, "digest", "w: its view differs from its cache (digest)."),
        (3, 1003.0, "resync", "w has resent what it holds: 1 page."),
        (4, 1004.0, "gap", "w: 2 batches are missing, 4 to 5."),
        (5, 1005.0, "restart", "w restarted."),
    ]
    assert {(mark["stream"], mark["worker"]) for mark in marks} == {("default/m/w/0", "w")}


async def all_marks(client: httpx.AsyncClient) -> Any:
    """The span, once the whole log has been searched."""
    span: dict[str, Any] = {}

    async def is_searched() -> bool:
        nonlocal span
        span = (await client.get("/span")).json()
        assert span["marks_failure"] == ""
        return bool(span["marks_until"] == span["next_index"])

    await async_wait_until(is_searched, 200, "the whole log searched")
    return span


def damaged_copy(log: Path, copy: Path) -> str:
    """Copy a log without its time index, flip a bit in a segment, and return the segment's name."""
    for path in log.iterdir():
        if path.suffix != ".kvtimes":
            (copy / path.name).write_bytes(path.read_bytes())
    segment = sorted(copy.glob("*.kvlog"))[1]
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    return segment.name


async def test_a_damaged_log_serves_its_good_part_and_names_the_damage(log: Path, tmp_path: Path) -> None:
    segment = damaged_copy(log, tmp_path)
    async with serving(tmp_path) as client:
        span = await all_marks(client)
        assert [segment in line for line in span["damage"]] == [True]
        at = span["next_index"]
        assert (await client.get(f"/workers?at={at}")).json() != []
        assert (await client.get(f"/moment?at={at}")).json()["records"] > 100


async def test_a_log_that_grows_is_followed(tmp_path: Path) -> None:
    stream = Stream("w")
    with EventLogWriter(tmp_path) as writer:
        writer.append(stream.batch(stored((0, [1])), now=1000))
        writer.flush()
        async with serving(tmp_path) as client:
            await all_marks(client)
            assert (await client.get("/moment")).json()["index"] == 1
            stream.restart()
            writer.append(stream.batch(stored((0, [2])), now=1001))
            writer.flush()

            async def has_grown() -> bool:
                return bool((await client.get("/span")).json()["next_index"] == 2)

            await async_wait_until(has_grown, 30)
            span = await all_marks(client)
            assert [mark["kind"] for mark in span["marks"]] == ["restart"]
            assert (await client.get("/moment")).json()["index"] == 2


async def test_many_requests_for_many_moments_are_all_answered(client: httpx.AsyncClient, log: Path) -> None:
    moments = [1 + 37 * i % 399 for i in range(40)]
    expected = [Timeline(log).at(LogMoment(index=at)).applier.records for at in moments]
    answers = await asyncio.gather(*(client.get(f"/moment?at={at}") for at in moments))
    assert [answer.json()["records"] for answer in answers] == expected


async def test_the_token_is_asked_for(log: Path) -> None:
    async with serving(log, api_token="s3cret") as client:
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
    async with serving(log, max_body_bytes=1024) as client:
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
