"""A run with faults, recorded while a service follows it: each moment replays to what the service held then."""

import time
from pathlib import Path
from random import Random

import numpy as np

from analysis.diff import HeldPages, Holdings, diff, holdings_of, holdings_of_dump
from indexer.replay import LogIndexer, Timeline
from indexer.settings import IndexerSettings
from kv_events.log.event_log import EventLogWriter
from kv_events.log.moments import LogMoment
from kv_events.records import Channel
from tests.rigs.api import Serving
from tests.support.log.faulty_run import faulty_run

NUM_RECORDS, NUM_MOMENTS = 600, 60
SETTINGS = IndexerSettings(max_pages=2**18)


async def test_moments_of_a_run_with_faults_equal_the_dumps_of_the_service(serving: Serving, tmp_path: Path) -> None:
    random = Random(7)
    records = faulty_run(random, NUM_RECORDS, start_s=time.time(), pace=0.0)
    moments = set(random.sample(range(1, len(records) + 1), NUM_MOMENTS))
    dumps: dict[int, Holdings] = {}
    async with serving() as (client, fed):
        with EventLogWriter(tmp_path, segment_bytes=20_000) as writer:
            for number, record in enumerate(records, 1):
                if record.channel == Channel.EVENTS:
                    record = record._replace(partition=0, offset=fed.log.next_offset)
                    fed.log.append(record.key, record.payload, record.timestamp_ms)
                writer.append(record)
                if number in moments:
                    await fed.feed()
                    dumps[number] = holdings_of_dump((await client.get("/dump")).json())
    assert len(dumps) == NUM_MOMENTS
    compare(tmp_path, dumps)


def compare(folder: Path, dumps: dict[int, Holdings]) -> None:
    """Compare the views at some indices of a log with dumps, page for page."""
    LogIndexer(folder, SETTINGS, frame_cost=10_000).advance()
    assert len(list(folder.glob("*.kvframe"))) > 3
    timeline = Timeline(folder, SETTINGS)
    for number, dump in dumps.items():
        views = holdings_of(timeline.at(LogMoment(index=number)))
        held = {stream: pages for stream, pages in views.items() if len(pages.hashes)}
        assert held.keys() == dump.keys()
        assert all(equal(pages, dump[stream]) for stream, pages in held.items()), diff(held, dump)
    assert sum(len(pages.hashes) for dump in dumps.values() for pages in dump.values()) > 10 * len(dumps)
    assert (timeline.damage, timeline.faults) == ([], [])


def equal(one: HeldPages, other: HeldPages) -> bool:
    return np.array_equal(one.hashes, other.hashes) and np.array_equal(one.tiers, other.tiers)
