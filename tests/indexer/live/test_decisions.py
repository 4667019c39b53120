"""Decisions on their way from a router's client to the log of the service: a Kafka topic or a folder."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from analysis.audit.audit import audit_log
from api.app import create_app
from api.service import LiveService
from api.settings import ApiSettings
from indexer.assembly import create_queue
from indexer.settings import IndexerSettings
from indexer.writing.queue import DECISIONS, FolderWriter, WriteQueue
from kv_events.decisions import Decision as DecisionOnRecord
from kv_events.decisions import DecisionRecord, decode_decision
from kv_events.decisions import Outcome as OutcomeOnRecord
from kv_events.hashing import sequence_hashes, token_array
from kv_events.log.event_log import EventLogReader
from kv_events.records import Channel, LogRecord
from kvsight import AsyncClient, Decision, Outcome, Prompt
from tests.support.commands import kvsight
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, records_of, removed, stored
from tests.support.servers.kafka_broker import produce
from tests.support.waiting import async_wait_until

TOKENS = list(range(1, 17))


@asynccontextmanager
async def router(settings: IndexerSettings) -> AsyncIterator[tuple[AsyncClient, WriteQueue, HandFed]]:
    """A router's client of a service that keeps decisions where the settings say."""
    fed, log = HandFed(), create_queue(settings, DECISIONS)
    app = create_app(LiveService(fed.consumer, ApiSettings(), decisions=log))
    async with (
        app.router.lifespan_context(app),
        AsyncClient("http://t", transport=httpx.ASGITransport(app)) as client,
    ):
        yield client, log, fed


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


async def test_a_folder_of_decisions_keeps_the_newest_within_its_bound(tmp_path: Path) -> None:
    sink = FolderWriter(tmp_path, max_bytes=10_000, segment_bytes=2000)
    for number in range(100):
        await sink.write([LogRecord(0, number, 1, b"key", bytes(300), Channel.DECISIONS)])
    await sink.stop()
    assert folder_bytes(tmp_path) <= 10_000
    reader = EventLogReader(tmp_path)
    assert 0 < reader.first_index < 90
    assert reader.next_index == 100


async def report(client: AsyncClient, fed: HandFed) -> Decision:
    """Query, choose, and report the choice and what the engine reused."""
    await fed.hold(Stream("w1"), TOKENS[:8])
    ranked = await client.rank_workers("m", TOKENS, load={"w0": 0, "w1": 2})
    assert [(each.worker, each.tokens, each.score) for each in ranked] == [("w1", 8, 6.0), ("w0", 0, 0.0)]
    best = ranked[0]
    decided = Decision("r1", Prompt("m", TOKENS), best.worker, best.dp_rank, best.tokens, ranked)
    taken = await client.decided(decided)
    assert (taken.accepted, taken.dropped) == (1, 0)
    assert (await client.decided([Outcome("r1", 8)])).accepted == 1
    return decided


def check(found: list[DecisionRecord], decided: Decision) -> None:
    recorded, outcome = found
    assert isinstance(recorded, DecisionOnRecord)
    assert isinstance(outcome, OutcomeOnRecord)
    assert recorded.timestamp == decided.timestamp
    assert (recorded.worker, recorded.dp_rank, recorded.predicted_tokens, recorded.block_size) == ("w1", 0, 8, 4)
    assert [tuple(each) for each in [(c.worker, c.dp_rank, c.tokens, c.score) for c in recorded.candidates]] == [
        ("w1", 0, 8, 6.0),
        ("w0", None, 0, 0.0),
    ]
    assert recorded.sequence_hashes == sequence_hashes(token_array(TOKENS), 4).tobytes()
    assert outcome.cached_tokens == 8


async def test_decisions_are_kept_beside_the_event_log_that_is_followed(tmp_path: Path) -> None:
    async with router(IndexerSettings(event_log_dir=tmp_path)) as (client, log, fed):
        decided = await report(client, fed)
        await async_wait_until(lambda: log.written == 2, what="the records")
    records = records_of(tmp_path / "decisions")
    assert {record.channel for record in records} == {Channel.DECISIONS}
    check([decode_decision(record.payload) for record in records], decided)
    assert records_of(tmp_path) == []


async def test_a_folder_that_cannot_be_written_costs_decisions_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "decisions").write_text("not a folder")
    async with router(IndexerSettings(event_log_dir=tmp_path)) as (client, log, fed):
        await report(client, fed)
        await async_wait_until(lambda: log.outage.since is not None, what="the outage")
        assert (await client.query("m", TOKENS)).instances["w1"].gpu == 8
        assert log.written == 0


@pytest.mark.kafka
async def test_decisions_go_to_their_own_topic(kafka_bootstrap: str) -> None:
    topic = f"decisions-{uuid.uuid4().hex}"
    async with router(IndexerSettings(kafka=kafka_bootstrap, decisions_topic=topic)) as (client, log, fed):
        decided = await report(client, fed)
        await async_wait_until(lambda: log.written == 2, 30, "the records")
    async with AIOKafkaConsumer(topic, bootstrap_servers=kafka_bootstrap, auto_offset_reset="earliest") as consumer:
        fetched = [await asyncio.wait_for(consumer.getone(), 30) for _ in range(2)]
        assert len(consumer.assignment()) == 8
    assert {message.key for message in fetched} == {b"r1"}
    assert len({TopicPartition(message.topic, message.partition) for message in fetched}) == 1
    check([decode_decision(message.value) for message in fetched], decided)


@pytest.mark.kafka
async def test_a_recording_of_the_topics_can_be_audited(kafka_bootstrap: str, tmp_path: Path) -> None:
    name, engine = uuid.uuid4().hex, Stream("w1")
    own: dict[str, Any] = {"kafka": kafka_bootstrap, "events_topic": f"e-{name}", "decisions_topic": f"d-{name}"}
    hashes = sequence_hashes(token_array(TOKENS), 4).tolist()
    now = time.time()
    records = engine.batch(stored((0, hashes[:3])), now=now - 2), engine.batch(removed([hashes[2]]), now=now)
    await produce(kafka_bootstrap, own["events_topic"], records)
    async with router(IndexerSettings(**own)) as (client, log, fed):
        await fed.hold(Stream("w1"), TOKENS[:8])
        chosen = Decision("r1", Prompt("m", TOKENS), "w1", 0, 12, timestamp=now - 1)
        await client.decided([chosen, Outcome("r1", 8, timestamp=now + 1)])
        await async_wait_until(lambda: log.written == 2, 30, "the records")
    flags = [part for field, value in own.items() for part in (f"--{field.replace('_', '-')}", value)]
    recorded = await asyncio.to_thread(kvsight, "record", tmp_path / "log", *flags, "--once")
    assert recorded.returncode == 0, recorded.stderr
    funnel = (await asyncio.to_thread(audit_log, tmp_path / "log")).funnel
    assert funnel is not None
    assert (funnel.prompt_tokens, funnel.held_by_chosen, funnel.predicted, funnel.delivered) == (16, 12, 12, 8)
    assert {(each.cause, each.tokens) for each in funnel.losses} == {
        ("not computed before", 4),
        ("evicted before arrival", 4),
    }


async def test_a_broker_that_is_away_delays_no_caller() -> None:
    async with router(IndexerSettings(kafka="127.0.0.1:9")) as (client, log, fed):
        began = time.monotonic()
        await report(client, fed)
        assert time.monotonic() - began < 30
        await async_wait_until(lambda: "127.0.0.1:9" in str(log.outage), what="the outage is noted")
        assert log.num_queued == 2
