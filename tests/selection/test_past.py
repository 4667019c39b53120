"""Reservations in a log: what replay, its page, the audit and the commands make of them."""

import json
from itertools import groupby
from pathlib import Path
from random import Random

import httpx
import pytest
from msgspec.structs import replace

from analysis.audit.audit import audit_log
from api.app import create_app
from api.replay.service import ReplayService
from api.settings import ApiSettings
from indexer.replay import Replay, Timeline
from kv_events.decisions import Candidate, Outcome, encode_decision
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord
from kv_events.reservations import (
    OUTPUT_BLOCK,
    PREFILL_COMPLETE,
    RELEASED,
    VERSION,
    Progressed,
    ReservationRecord,
    Reserved,
    encode_reservation,
    joined,
    reservation_id,
    time_of,
)
from kv_events.streams import StreamId
from selection.past import PastBook
from selection.settings import SelectionSettings
from tests.support.commands import kvsight
from tests.support.log.late_log import write_log
from tests.support.log.records import Stream, stored
from tests.support.replica_process import reserved

START, TTL_S = 1_700_000_000.0, 600.0
HELD = list(range(1, 9))
"""Pages of 16 tokens that w1 holds."""


def logged(record: ReservationRecord) -> LogRecord:
    key, payload = reservation_id(record).encode(), encode_reservation(record)
    return LogRecord(0, 0, round(time_of(record) * 1000), key, payload, Channel.RESERVATIONS)


def step(name: str, at: float, kind: str, blocks: int = 0) -> Progressed:
    return Progressed(VERSION, "other", name, START + at, kind, None, blocks)


def twelve_requests() -> list[ReservationRecord]:
    """12 requests on w1 and 2 on w2, then one more for w2 whose prompt w1 holds. Then most of them end."""
    found: list[ReservationRecord] = [
        reserved(f"r{number}", "w1" if number < 12 else "w2", [100 + number], START + 1 + number / 100)
        for number in range(14)
    ]
    passed = reserved("passed", "w2", HELD, START + 2)
    offered = [Candidate("w1", 0, 128, -9.0), Candidate("w2", 0, 0, -3.0)]
    found.append(replace(passed, decision=replace(passed.decision, candidates=offered)))
    found += [step("r0", 3, PREFILL_COMPLETE), step("r0", 3.5, OUTPUT_BLOCK, 1)]
    return found + [step(f"r{number}", 4, RELEASED) for number in range(1, 12)]


def fleet_log(folder: Path, records: list[ReservationRecord], *, is_beside: bool) -> Path:
    """A log of two workers, with reservations inside it, those of half a second in one record, or beside it."""
    engines = Stream("w1", block_size=16), Stream("w2", block_size=16)
    events = [engines[0].batch(stored((0, HELD)), now=START), engines[1].batch(now=START)]
    events += [engine.batch(now=START + second) for second in range(1, 8) for engine in engines]
    own = list(map(logged, records))
    if not is_beside:
        at_once = [list(group) for _, group in groupby(own, key=lambda each: each.timestamp_ms // 500)]
        payloads = [joined(len(group), b"".join(each.payload for each in group)) for group in at_once]
        own = [group[0]._replace(payload=payload) for group, payload in zip(at_once, payloads, strict=True)]
    else:
        write_log(folder / "reservations", own)
    return write_log(folder, sorted([*events, *([] if is_beside else own)], key=lambda each: each.timestamp_ms))


@pytest.mark.parametrize("is_beside", [False, True])
async def test_commands_and_pages_show_what_was_booked_at_a_moment(tmp_path: Path, is_beside: bool) -> None:
    folder = fleet_log(tmp_path, twelve_requests(), is_beside=is_beside)
    at = lambda seconds: f"@{START + seconds}"  # noqa: E731
    shown = json.loads(kvsight("replay", folder, "--at", at(2.5), "--json").stdout)
    expected = {"requests": 12, "prefill_tokens": 192, "decode_pages": 12}
    assert {each["worker"]: each["booked"] for each in shown} == {
        "w1": expected,
        "w2": {"requests": 3, "prefill_tokens": 160, "decode_pages": 10},
    }
    short = json.loads(kvsight("replay", folder, "--at", at(2.5), "--reservation-ttl-s", 0.25, "--json").stdout)
    assert [each["booked"]["requests"] for each in short] == [0, 0]
    table = kvsight("replay", folder, "--at", at(3.7)).stdout
    (line,) = [line for line in table.splitlines() if line.startswith("w1")]
    assert line.split()[-3:] == ["12", "176", "13"]
    assert "booked" not in kvsight("replay", folder, "--at", at(0.5), "--json").stdout
    app = create_app(ReplayService(folder, ApiSettings(), LogMoment(), []))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client,
    ):
        booked = []
        for seconds in (3, 5, 3, 0.5):  # forward, and back
            answer = (await client.get("/fleet", params={"at": at(seconds)})).json()
            booked.append({each["worker"]: each["booked"] for each in answer["workers"]}["w1"])
        funnel = (await client.get("/funnel", params={"at": at(5)})).json()
    after = {"requests": 1, "prefill_tokens": 0, "decode_pages": 2}
    assert booked == [expected | {"prefill_tokens": 176}, after, expected | {"prefill_tokens": 176}, {}]
    assert (funnel["all"]["requests"], funnel["all"]["best_tokens"]) == (15, 128)


@pytest.mark.parametrize("is_beside", [False, True])
def test_an_audit_explains_a_choice_by_the_loads_of_its_moment(tmp_path: Path, is_beside: bool) -> None:
    records = twelve_requests()
    folder = fleet_log(tmp_path, records, is_beside=is_beside)
    (passed,) = [each.decision for each in records if isinstance(each, Reserved) and each.decision.candidates]
    outcome = Outcome(VERSION, "passed", START + 2.2, 0)
    again = [(each.timestamp, encode_decision(each)) for each in (passed, outcome)]  # the router reports them, too
    reported = [LogRecord(0, 0, int(at * 1000), b"", payload, Channel.DECISIONS) for at, payload in again]
    write_log(folder / "decisions", reported)
    report = audit_log(folder)
    assert report.funnel is not None
    assert (report.funnel.requests, report.funnel.outcomes, report.funnel.duplicates) == (15, 1, 1)
    (loss,) = [each for each in report.funnel.losses if each.step == "held by the chosen worker"]
    assert (loss.cause, loss.tokens, loss.requests) == ("load", 128, 1)
    assert loss.examples[0].better == "w1 had 12 requests booked, w2 had 2"
    text = "load (1 request). Request passed: w1 had 12 requests booked, w2 had 2"
    assert text in kvsight("audit", folder).stdout
    assert text not in kvsight("audit", folder, "--reservation-ttl-s", 0.25).stdout


def test_an_audit_does_not_blame_a_load_that_was_not_there(tmp_path: Path) -> None:
    records = [each for each in twelve_requests() if reservation_id(each) in ("r0", "r12", "r13", "passed")]
    report = audit_log(fleet_log(tmp_path, records, is_beside=False))
    assert report.funnel is not None
    (loss,) = [each for each in report.funnel.losses if each.step == "held by the chosen worker"]
    assert (loss.cause, loss.examples[0].better) == ("not by load", "w1 had 1 request booked, no more than w2")


def test_records_are_shown_one_a_line_and_selected_with_what_followed(tmp_path: Path) -> None:
    folder = fleet_log(tmp_path / "log", twelve_requests(), is_beside=False)
    lines = kvsight("tail", "--full", "--log", folder, "--channel", "reservations").stdout.splitlines()
    shown = list(map(json.loads, lines))
    assert len(shown) == 28
    few = kvsight("tail", "--full", "--log", folder, "--channel", "reservations", "--limit", 3).stdout.splitlines()
    assert few == lines[:3]
    first, ended = shown[0], shown[-1]
    assert (first["kind"], first["request_id"], first["worker"]) == ("reserved", "r0", "w1")
    assert (first["channel"], first["sequence_hashes"]) == ("reservations", [100])
    assert (first["prefill_tokens"], first["replica"]) == (16, "other")
    assert (ended["kind"], ended["reservation_id"], ended["step"]) == ("progressed", "r11", "released")
    assert "5 reservations" in kvsight("log", "info", folder).stdout


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_service_without_kafka_begins_with_an_empty_book(tmp_path: Path, is_beside: bool) -> None:
    """Of several replicas, all records are inside the log."""
    records = [reserved(f"r{number}", "w1", [number], START + number, f"start-{number // 2}") for number in range(4)]
    fleet_log(tmp_path, list(records), is_beside=is_beside)
    timeline, past, booked = Timeline(tmp_path), PastBook(tmp_path, SelectionSettings(reservation_ttl_s=TTL_S)), []
    for seconds in (1.5, 2.5, 3.5, 1.5):
        book = past.at(timeline, LogMoment(time_s=START + seconds), Replay())
        booked.append(set(book))
    earlier = set[str]() if is_beside else {"r0", "r1"}
    assert booked == [{"r0", "r1"}, earlier | {"r2"}, earlier | {"r2", "r3"}, {"r0", "r1"}]


def test_the_book_of_any_moment_is_that_of_counting(tmp_path: Path) -> None:
    random, records = Random(3), list[ReservationRecord]()
    ends: dict[str, tuple[float, float]] = {}
    for number in range(400):
        begin = number * 5 + random.random()
        ends[f"r{number}"] = begin, begin + random.choice([20, 300, 590, 1000])
        records.append(reserved(f"r{number}", "w1", [number], START + begin))
        if ends[f"r{number}"][1] < begin + TTL_S:
            records.append(step(f"r{number}", ends[f"r{number}"][1], RELEASED))
        else:  # nobody says that it ends
            ends[f"r{number}"] = begin, begin + TTL_S
    engine = Stream("w1")
    events = [engine.batch(now=START + second) for second in range(0, 3000, 5)]
    everything = sorted([*events, *map(logged, records)], key=lambda each: each.timestamp_ms)
    write_log(tmp_path, everything, segment_bytes=2**14)
    timeline, past = Timeline(tmp_path), PastBook(tmp_path, SelectionSettings(reservation_ttl_s=TTL_S))
    for at in [*range(100, 2900, 100), *(random.randrange(2900) for _ in range(20))]:
        moment = LogMoment(time_s=START + at)
        book = past.at(timeline, moment, Replay())
        expected = sum(begin <= at < end for begin, end in ends.values())
        assert book.all_booked().get(StreamId("m", "default", "w1", 0), (0,))[0] == expected, at
