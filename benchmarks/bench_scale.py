"""What docs/scale.md needs beside the other benchmarks. `python -m benchmarks.bench_scale [--json FILE]`

Catching up: 64 publishers have written 16,000 records to Kafka before the service's consumer starts. Broad answers:
packed hashes of 64 pages that every worker holds, answered in process. Growth: 1,000 workers store 8M pages into one
service, and the longest turn of its event loop is how long a query waits at most.
KVSIGHT_KAFKA names the broker; without it, the benchmark starts one.
"""

import asyncio
import gc
import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import uvloop

from api.fast.local_answers import LocalAnswers
from api.queries.body_formats import format_of
from api.queries.parsing import BY_HASH, decode_question
from benchmarks.bench_http import PAGE_TOKENS
from benchmarks.report import Figure, figure, main, timed
from benchmarks.services import broker
from indexer.assembly import create_consumer
from indexer.settings import IndexerSettings
from indexer.views import ViewState
from kv_events.codec import StoredPages
from kv_events.log.memory import MemoryLog
from kv_events.schema import BlockStored
from kv_events.streams import StreamId
from publisher import EventPublisher, PublisherSettings
from publisher.sinks.base import OutRecord
from publisher.sinks.kafka import KafkaSink

PUBLISHERS, RECORDS = 64, 250
GROWING, GROWING_PAGES = 1_000, 32
"""Workers of the growth, and pages of their records."""
RECORD_PAGES = 12, 64, 256
HOLDERS = 64, 1_000, 10_000
MSGPACK = "application/msgpack"
ROUNDS = 5
_POLL_S = 0.001
_DAY_S = 86_400.0


def publisher_settings(kafka: str, topics: dict[str, Any], number: int) -> PublisherSettings:
    """Return the settings of one publisher."""
    return PublisherSettings(model="m", worker=f"w{number}", block_size=PAGE_TOKENS, kafka=kafka, **topics)


def records(settings: PublisherSettings, num_pages: int, random: np.random.Generator) -> Iterator[OutRecord]:
    """Yield the records of a publisher that stores pages that no other one holds."""
    publisher = EventPublisher(settings, KafkaSink(settings))
    yield from publisher.take_records(time.time(), force=True)
    for _ in range(RECORDS):
        hashes = random.integers(1, 2**63, num_pages, dtype=np.uint64)
        words = hashes.astype("<u8").tobytes()
        publisher.publish([BlockStored(hashes.tolist(), None, [], PAGE_TOKENS, sequence_hashes=words)])
        yield from publisher.take_records(time.time(), force=True)


async def write(kafka: str, topics: dict[str, Any], num_pages: int) -> int:
    """Write the records of all publishers. Returns the bytes of their payloads."""
    random, num_bytes = np.random.default_rng(1), 0
    sink = KafkaSink(publisher_settings(kafka, topics, 0))
    await sink.start()
    for number in range(PUBLISHERS):
        part = list(records(publisher_settings(kafka, topics, number), num_pages, random))
        await sink.send(part)
        num_bytes += sum(len(record.payload) for record in part)
    await sink.stop()
    return num_bytes


async def catch_up(kafka: str, topics: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds, and the CPU seconds, from the first record until a consumer is ready."""
    consumer = create_consumer(IndexerSettings(kafka=kafka, **topics))
    async with consumer.running():
        while not consumer.applier.records:  # noqa: ASYNC110  (a consumer has no event to wait for)
            await asyncio.sleep(_POLL_S)
        began, cpu_began = time.perf_counter(), time.process_time()
        while not consumer.ready:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return time.perf_counter() - began, time.process_time() - cpu_began


def catching_up(num_pages: int) -> Iterator[Figure]:
    """Measure how fast a consumer applies a log in Kafka. num_pages: of a record."""
    all_pages = PUBLISHERS * RECORDS * num_pages / 1e6
    name = uuid.uuid4().hex
    topics: dict[str, Any] = {"events_topic": f"events-{name}", "control_topic": f"control-{name}"}
    with broker() as kafka, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        num_bytes = runner.run(write(kafka, topics, num_pages))
        taken = [runner.run(catch_up(kafka, topics)) for _ in range(ROUNDS)]
    yield figure(f"apply from Kafka, {num_pages} pages a record", "Mpages/s", [all_pages / wall for wall, _ in taken])
    yield figure(
        f"a record from Kafka, {num_pages} pages, CPU time",
        "us",
        [cpu * 1e6 / PUBLISHERS / RECORDS for _, cpu in taken],
    )
    yield figure(f"a record on the wire, {num_pages} pages", "bytes", [num_bytes / PUBLISHERS / RECORDS])


def growth() -> Iterator[Figure]:
    """Measure the turns of the event loop, in CPU time of its thread."""
    log, random = MemoryLog(2**32, is_read_once=True), np.random.default_rng(1)
    settings = [publisher_settings("-", {}, number) for number in range(GROWING)]
    for part in zip(*[list(records(each, GROWING_PAGES, random)) for each in settings], strict=True):
        for record in part:
            log.append(record.key, record.payload, record.timestamp_ms)
    turns: list[float] = []
    gc.freeze()  # as the service does; its own log is short

    async def tick() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            turns.append(time.thread_time() - began)

    async def grow() -> int:
        consumer = create_consumer(IndexerSettings(), log)
        async with consumer.running():
            ticking = asyncio.create_task(tick())
            while not consumer.ready:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
            await asyncio.sleep(1.0)  # in which the service looks at all workers
            ticking.cancel()
            return sum(each.index.num_pages for each in consumer.namespaces)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        num_pages = runner.run(grow())
    gc.unfreeze()
    name = f"longest turn of the loop, {GROWING:,} workers store {num_pages:,} pages"
    yield figure(name, "ms", [1e3 * max(turns)], "<= 2")


def broad_answers(holders: int) -> Iterator[Figure]:
    """Measure answers that name many workers."""
    hashes = np.random.default_rng(1).integers(1, 2**63, 64, dtype=np.uint64)
    starts = np.zeros(8, np.uint8)
    starts[0] = 1
    event = StoredPages(0, hashes, hashes, starts, np.zeros(1, np.uint64))
    body, codec = msgspec.msgpack.encode({"model_name": "m", "seq_hashes": hashes.tobytes()}), format_of(MSGPACK)
    settings = IndexerSettings(max_pages=2**18, max_streams=2**14, worker_ttl_s=_DAY_S, forget_after_s=_DAY_S)
    consumer = create_consumer(settings)
    namespaces, answers = consumer.namespaces, LocalAnswers(consumer)
    for number in range(holders):
        view = namespaces.add_view(StreamId("m", "default", f"worker-{number}", 0), PAGE_TOKENS)
        view.index.store(view.number, event, 0, len(hashes))
        view.state, view.last_batch_at = ViewState.LIVE, time.time()

    def answer() -> bytes:
        question, numbers = decode_question(body, codec, BY_HASH)
        return answers.answer_one(question, numbers)

    size = len(answer())
    yield figure(f"answer 64 pages, {holders:,} workers hold all", "us", [timed(answer) * 1e6 for _ in range(300)])
    yield figure(f"size of an answer, {holders:,} workers", "KB", [size / 1e3])


def run() -> list[Figure]:
    """Return all figures."""
    parts = (
        [growth()]
        + [broad_answers(holders) for holders in HOLDERS]
        + [catching_up(num_pages) for num_pages in RECORD_PAGES]
    )
    return [each for part in parts for each in part]


if __name__ == "__main__":
    main("scale", run)
