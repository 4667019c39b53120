"""Shard groups: `python -m benchmarks.bench_groups [--json FILE]`

What a query costs on a group of two, compared with one service, and how fast one and two members apply a log. All
members, the broker and the caller share one machine. 16 workers hold 64 pages of a prompt; one caller asks for them
over one connection. The log of the second part has 2,000 records with 512 new pages each, of 256 workers, in 8
partitions.
"""

import asyncio
import os
import re
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
from aiokafka import AIOKafkaProducer

from benchmarks.report import Figure, figure, main
from benchmarks.services import broker
from kv_events.kafka.connection import KafkaConnection
from kv_events.kafka.settings import KafkaSettings
from kv_events.kafka.topics import inspect_topics
from kv_events.records import LogRecord
from tests.support.log.records import Stream, stored
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

PAGES, HOLDERS, QUERIES = 64, 16, 600
RUNS, RECORDS, PAGES_PER_RECORD, WORKERS, PARTITIONS = 3, 2000, 512, 256, 8
_SEED = 1
_BATCHES = re.compile(r"^kvsight_batches_applied_total (\S+)$", re.MULTILINE)


def settings_of(kafka: str) -> dict[str, Any]:
    """Settings of all services. Without publishers there are no heartbeats."""
    more = {"KVSIGHT_WORKER_TTL_S": 3600, "KVSIGHT_TOPIC_PARTITIONS": PARTITIONS, "KVSIGHT_GROUP_DEADLINE_S": 10}
    return own_topics(kafka, **more)


async def create_topics(settings: dict[str, Any]) -> None:
    names = {name.removeprefix("KVSIGHT_").lower(): value for name, value in settings.items()}
    kafka = KafkaSettings(**{name: value for name, value in names.items() if name in KafkaSettings.model_fields})
    await inspect_topics(KafkaConnection(kafka), kafka, create=True)


async def publish(settings: dict[str, Any], records: list[LogRecord]) -> None:
    """Write records: that of worker n to partition n."""
    kafka, topic = settings["KVSIGHT_KAFKA"], settings["KVSIGHT_EVENTS_TOPIC"]
    async with AIOKafkaProducer(bootstrap_servers=kafka, max_batch_size=2**20, linger_ms=5) as producer:
        sent = []
        for number, record in enumerate(records):
            partition = number % PARTITIONS
            sent.append(await producer.send(topic, record.payload, key=record.key, partition=partition))
        await asyncio.gather(*sent)


@contextmanager
def services(settings: dict[str, Any], members: int, folder: Path) -> Iterator[list[ServiceProcess]]:
    """One ordinary service for 0 members, else a group."""
    group = {"KVSIGHT_GROUP": f"g-{uuid.uuid4().hex}"} if members else {}
    with ExitStack() as stack:
        yield [stack.enter_context(ServiceProcess(folder, **settings, **group)) for _ in range(max(1, members))]


def is_settled(service: ServiceProcess, members: int) -> bool:
    """Whether a group has shared out its partitions and is up to date."""
    if not members:
        return service.get("/ready").is_success
    shards = service.get("/shards").json()
    is_up_to_date = all(shards["claims"].values()) and not shards["missing"] and not shards["lent"]
    return len(shards["claims"]) == PARTITIONS // members and is_up_to_date


def query_times(settings: dict[str, Any], hashes: list[int], members: int, folder: Path) -> list[float]:
    """Return the milliseconds of each query."""
    body = msgspec.json.encode({"model_name": "m", "seq_hashes": hashes})
    with services(settings, members, folder) as found:
        wait_until(lambda: all(is_settled(each, members) for each in found), 120, "a group that is up to date")
        connection = HTTPConnection(urlsplit(found[0].url).netloc)
        times = []
        for _ in range(QUERIES):
            began = time.perf_counter()
            connection.request("POST", "/query_by_hash", body, {"Content-Type": "application/json"})
            answer = connection.getresponse().read()
            times.append((time.perf_counter() - began) * 1000)
        assert len(msgspec.json.decode(answer)["instances"]) == HOLDERS
        return times[QUERIES // 10 :]


def ingest_rate(kafka: str, members: int, folder: Path, batches: list[LogRecord]) -> float:
    """Return the pages that a group applies in a second while it catches up with a log.

    The members stand still while the log is written.
    """
    settings = settings_of(kafka) | {"KVSIGHT_GROUP_SESSION_S": 120}
    asyncio.run(create_topics(settings))
    with services(settings, members, folder) as found:
        wait_until(lambda: all(is_settled(each, members) for each in found), 120, "a group that is up to date")
        for each in found:
            os.kill(each.pid, signal.SIGSTOP)
        asyncio.run(publish(settings, batches))
        began = time.perf_counter()
        for each in found:
            os.kill(each.pid, signal.SIGCONT)
        wait_until(lambda: _num_applied(found) >= len(batches), 600, "all batches to be applied")
        return len(batches) * PAGES_PER_RECORD / (time.perf_counter() - began)


def _num_applied(members: list[ServiceProcess]) -> float:
    return sum(float(_BATCHES.findall(each.get("/metrics").text)[0]) for each in members)


def run() -> list[Figure]:
    """Run everything."""
    random = np.random.default_rng(_SEED)
    hashes = random.integers(1, 2**63, PAGES).tolist()
    figures = []
    with broker() as kafka, tempfile.TemporaryDirectory() as name:
        settings, folder = settings_of(kafka), Path(name)
        asyncio.run(create_topics(settings))
        asyncio.run(
            publish(settings, [Stream(f"w{n}").batch(stored((0, hashes)), now=time.time()) for n in range(HOLDERS)])
        )
        medians = {}
        for members, text in ((0, "one service"), (1, "a group of one"), (2, "a group of two")):
            times = figure(f"query of {PAGES} pages, {text}", "ms", query_times(settings, hashes, members, folder))
            figures.append(times)
            medians[members] = times.median
        cost = medians[2] - medians[0]
        figures.append(figure("gather: a group of two less one service", "ms", [cost], "at most 1"))

        streams = [Stream(f"w{n}") for n in range(WORKERS)]
        pages = random.integers(1, 2**63, (RECORDS, PAGES_PER_RECORD))
        batches = [streams[n % WORKERS].batch(stored((0, row.tolist()))) for n, row in enumerate(pages)]
        rates = {members: [ingest_rate(kafka, members, folder, batches) for _ in range(RUNS)] for members in (1, 2)}
        for members, found in rates.items():
            text = "one member" if members == 1 else "two members"
            figures.append(figure(f"catching up with a log, {text}", "pages/s", found))
        ratio = figures[-1].median / figures[-2].median
        goal = f"at least 1.6 where cores allow; here {os.cpu_count()} cores, which the broker shares"
        figures.append(figure("two members over one", "times", [ratio], goal))
    return figures


if __name__ == "__main__":
    main("shard groups", run)
