"""Topics of an operator's own: set once in the environment, they hold for every writer and every reader."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from indexer.assembly import create_consumer
from indexer.settings import IndexerSettings
from indexer.views import View, ViewState
from kv_events.event_log import EventLogReader
from kv_events.schema import BlockStored, StorageMedium
from publisher import EventPublisher, PublisherSettings
from publisher.sinks import create_sink
from tests.support.waiting import async_wait_until


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch, kafka_bootstrap: str) -> None:
    """The environment names the broker and two new topics."""
    for name in [name for name in os.environ if name.startswith("KVSIGHT_")]:
        monkeypatch.delenv(name)
    topic = uuid.uuid4().hex
    variables = {"KAFKA": kafka_bootstrap, "EVENTS_TOPIC": topic, "CONTROL_TOPIC": f"control-{topic}", "MODEL": "m"}
    for name, value in variables.items():
        monkeypatch.setenv(f"KVSIGHT_{name}", value)


def kvsight(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvsight", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)


@pytest.mark.usefixtures("topics")
async def test_publisher_and_indexer_meet_on_the_named_topics() -> None:
    settings = PublisherSettings(worker="w", block_size=4)
    consumer = create_consumer(IndexerSettings())
    async with EventPublisher(settings, create_sink(settings)) as publisher, consumer.running():
        publisher.publish([BlockStored([1], None, [1, 2, 3, 4], 4, None, StorageMedium.GPU, None)])

        def live_view() -> View | None:
            view = consumer.namespaces.view(publisher.stream)
            return view if view is not None and view.state is ViewState.LIVE and view.num_pages[0] == 1 else None

        await async_wait_until(live_view, deadline_s=30, what="the page in the index")
        view = live_view()
        assert view is not None
        resyncs_before = publisher.stats().resyncs
        consumer.demand_resync(view)
        await async_wait_until(lambda: publisher.stats().resyncs > resyncs_before, deadline_s=30, what="a resync")


@pytest.mark.usefixtures("topics")
def test_commands_simulate_and_record_on_the_named_topics(kafka_bootstrap: str, tmp_path: Path) -> None:
    arguments = ["--kafka", kafka_bootstrap, "--requests", 20, "--workers", 2, "--policy", "random", "--json"]
    kvsight("simulate", *arguments)
    kvsight("record", tmp_path / "log", "--once")
    models = {record.key.split(b"/")[1] for _, record in EventLogReader(tmp_path / "log").read(0)}
    assert models == {b"simulation-random"}
