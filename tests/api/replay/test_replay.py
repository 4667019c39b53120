"""What a replay shows, and `kvsight replay --serve`."""

import re
import signal
from pathlib import Path

import httpx
import pytest

from kv_events.decisions import VERSION, Decision, encode_decision
from kv_events.log.event_log import EventLogWriter
from kv_events.records import Channel, LogRecord
from kv_events.schema import WireEvent
from tests.rigs.api import replaying, searched_span
from tests.support.commands import RunningCommand
from tests.support.log.late_log import write_log
from tests.support.log.plain_log import tear
from tests.support.log.records import Stream, removed, stored
from tests.support.waiting import async_wait_for


def decided(number: int, at: float) -> LogRecord:
    """A decision of a router."""
    decision = Decision(VERSION, f"r{number}", at, "m", "default", 0, 4, b"", "w", None, 4, ())
    return LogRecord(0, number, int(at * 1000), b"r", encode_decision(decision), Channel.DECISIONS)


async def test_the_page_gets_the_workers_their_rates_and_their_changes_of_the_moment(tmp_path: Path) -> None:
    stream, other = Stream("w"), Stream("x")
    records = []
    for i in range(60):
        records += [stream.batch(stored((0, [i + 1])), now=1000 + i), *([other.batch(now=1000 + i)] if i < 20 else [])]
    async with replaying(write_log(tmp_path, records)) as client:
        await searched_span(client)
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


async def test_curves_have_only_intervals_that_were_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.replay.moments._MOST_RECORDS", 1000)
    stream = Stream("w")  # 20 records a second
    write_log(tmp_path, (stream.batch(stored((0, [i + 1])), now=1000 + i / 20) for i in range(1200)))

    async def curve(client: httpx.AsyncClient, at: str) -> list[float]:
        (worker,) = (await client.get("/fleet", params={"at": at, "worker": "w"})).json()["workers"]
        return list(worker["stored"])

    async with replaying(tmp_path) as client:
        curves = [await curve(client, at) for at in ("@1059.9", "@1020", "@1055", "@1030", "@1059.95", "1200")]
    assert curves[1:4:2] == [[20.0] * 4, [20.0] * 6]
    assert 7 <= len(curves[0]) <= 10  # of 11: the others would have more than 1000 records
    assert set(curves[0]) == {20.0}
    assert curves[0] == curves[-2] == curves[-1]
    async with replaying(tmp_path) as client:
        assert await curve(client, "@1055") == curves[2]


async def test_the_funnel_has_all_decisions_of_its_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.decisions.window._MAX_WAITING", 2000)
    stream = Stream("w")
    records = [stream.batch(now=999)]
    for i in range(2500):
        records += [decided(i, 1000 + i), *([stream.batch(now=1000 + i)] if i % 100 == 99 else [])]
    async with replaying(write_log(tmp_path, records)) as client:
        moments = (20, 10, 12, 1, 20, 102, 2223, 2425, 2526, 2223)
        found = [(await client.get(f"/funnel?at={at}")).json() for at in moments]
    assert [each["all"]["requests"] for each in found] == [19, 9, 11, 0, 19, 100, 2200, 2400, 2500, 2200]
    assert found[-4] == found[-1]


async def test_an_explanation_is_that_of_the_moment(tmp_path: Path) -> None:
    stream = Stream("w")
    events: list[WireEvent] = [stored((0, [1, 2])), removed([2]), stored((1, [2]))]
    write_log(tmp_path, (stream.batch(event, now=1000 + second) for second, event in enumerate(events)))
    asked = {"model_name": "m", "seq_hashes": [1, 2]}
    async with replaying(tmp_path) as client:
        causes = [
            (await client.post("/explain", params={"at": at}, json=asked)).json()["workers"][0]["cause"]
            for at in ("1", "@1001", "3")
        ]
    assert causes == ["held", "evicted", "held"]


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
    async with replaying(tmp_path) as client:
        marks = (await searched_span(client))["marks"]
    assert [(mark["index"], mark["time"], mark["kind"], mark["text"]) for mark in marks] == [
        (1, 1001.0, "digest", "w: its view differs from its cache (digest)."),
        (3, 1003.0, "resync", "w has resent what it holds: 1 page."),
        (4, 1004.0, "gap", "w: 2 batches are missing, 4 to 5."),
        (5, 1005.0, "restart", "w restarted."),
    ]
    assert {(mark["stream"], mark["worker"]) for mark in marks} == {("default/m/w/0", "w")}


async def test_a_log_that_grows_is_followed(tmp_path: Path) -> None:
    stream = Stream("w")
    with EventLogWriter(tmp_path) as writer:
        writer.append(stream.batch(stored((0, [1])), now=1000))
        writer.flush()
        async with replaying(tmp_path) as client:
            await searched_span(client)
            assert (await client.get("/moment")).json()["index"] == 1
            stream.restart()
            writer.append(stream.batch(stored((0, [2])), now=1001))
            writer.flush()
            await async_wait_for(lambda: client.get("/span"), lambda answer: answer.json()["next_index"] == 2)
            span = await searched_span(client)
            assert [mark["kind"] for mark in span["marks"]] == ["restart"]
            assert (await client.get("/moment")).json()["index"] == 2


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of ten records, with a torn tail."""
    stream = Stream("w")
    folder = write_log(tmp_path / "run.log", (stream.batch(stored((0, [i + 1])), now=1000 + i) for i in range(10)))
    tear(folder)
    return folder


def test_a_log_is_served_until_ctrl_c_and_its_damage_is_named(log: Path) -> None:
    with RunningCommand("replay", log, "--serve", "--port", 0, "--at", 4) as command:
        command.wait_for("(docs at /docs)")
        found = re.search(r"is served on (http://\S+)", command.err)
        assert found is not None, command.err
        with httpx.Client(base_url=found[1], timeout=60) as client:
            assert client.get("/moment").json()["index"] == 4
            assert [each["instance_id"] for each in client.get("/workers?at=@1007").json()] == ["w"]
            assert "a torn tail of 3 bytes" in client.get("/span").json()["damage"][0]
            assert "<title>kvsight</title>" in client.get("/").text
        code = command.end(signal.SIGINT)
    assert (code, "Traceback" in command.err) == (130, False), command.err
    assert "damaged: " in command.err
