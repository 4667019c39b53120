"""Metrics of each worker, the cost of a scrape, and log lines of requests and workers."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from httpx import AsyncClient

from api.app import create_app
from api.service import LiveService
from api.settings import ApiSettings
from api.telemetry.service_metrics import HttpMetrics, metrics_text
from indexer.settings import IndexerSettings
from indexer.slices import run_at_once
from tests.rigs.api import asking, samples
from tests.support.engines.publishing_process import PublishingProcess
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, removed
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

TOKENS = list(range(1, 17))
STATES = ("live", "syncing", "stale", "expired")


def states(found: dict[tuple[str, ...], float], worker: str, model: str = "m", tenant: str = "default") -> list[float]:
    return [found["kvsight_worker_state", model, state, tenant, worker] for state in STATES]


async def test_a_worker_has_the_sums_of_its_ranks_and_its_least_trusted_state(
    client: AsyncClient, fed: HandFed
) -> None:
    ranks = [Stream("w", dp_rank=rank) for rank in range(2)]
    hashes = await fed.hold(ranks[0], TOKENS, {0: range(4), 1: range(2)})
    await fed.hold(ranks[1], TOKENS[:4])
    await fed.feed(ranks[0].batch(removed(hashes[3:])))
    good = await samples(client)
    ranks[1].seq += 1
    await fed.feed(ranks[1].batch(digest=b"\1" * 64))
    bad = await samples(client)
    worker = ("m", "default", "w")
    expected = {
        ("kvsight_worker_pages", "GPU", *worker): 4,
        ("kvsight_worker_pages", "CPU_PINNED", *worker): 2,
        ("kvsight_worker_pages", "DISK", *worker): 0,
        ("kvsight_worker_pages_stored_total", *worker): 7,
        ("kvsight_worker_pages_removed_total", *worker): 1,
        ("kvsight_worker_resyncs_total", *worker): 0,
    }
    assert {name: good.get(name) for name in expected} == expected
    assert 0 <= good["kvsight_worker_view_age_seconds", *worker] < 60
    assert states(good, "w") == [1, 0, 0, 0]
    assert states(bad, "w") == [0, 0, 1, 0]
    assert not any("other" in name for name in good)


async def test_workers_beyond_the_limit_share_the_labels_other(serving: Any) -> None:
    async with serving(metrics_max_workers=2) as (client, fed):
        for number in range(5):
            await fed.hold(Stream(f"w{number}"), TOKENS)
        found = await samples(client)
    named = {name[-1] for name in found if name[0] == "kvsight_worker_view_age_seconds"}
    assert len(named) == 3
    assert "other" in named
    assert states(found, "other", "other", "other") == [3, 0, 0, 0]
    assert found["kvsight_worker_pages", "GPU", "other", "other", "other"] == 12
    assert found["kvsight_worker_pages_stored_total", "other", "other", "other"] == 12
    assert found["kvsight_pages_stored_total",] == 20


async def test_no_counter_falls_when_workers_come_and_go(serving: Any) -> None:
    async with serving(metrics_max_workers=1) as (client, fed):
        streams = [Stream(f"w{number}") for number in range(3)]
        for stream in streams:
            await fed.hold(stream, TOKENS)
        before = await samples(client)
        (own,) = {name[-1] for name in before if name[0] == "kvsight_worker_state"} - {"other"}
        leaving = next(stream for stream in streams if stream.id.worker == own)
        run_at_once(fed.consumer.namespaces.forget(leaving.id))
        after = await samples(client)
        for stream in streams:
            if stream is not leaving:
                await fed.hold(stream, [*TOKENS, *range(100, 108)])
        later = await samples(client)
    stored = "kvsight_worker_pages_stored_total"
    assert (stored, "m", "default", own) not in after
    for one, other in ((before, after), (after, later)):
        for name in one.keys() & other.keys():
            assert other[name] >= one[name] or not name[0].endswith("_total"), name
    grown = sum(later[name] - after.get(name, 0) for name in later if name[0] == stored)
    assert grown == later["kvsight_pages_stored_total",] - after["kvsight_pages_stored_total",] > 0


@pytest.mark.skipif("sys.gettrace()", reason="tracing for coverage takes longer")
async def test_a_scrape_of_a_thousand_workers_is_no_matter_of_seconds() -> None:
    fed = HandFed(IndexerSettings(max_pages=2**16, worker_ttl_s=3600, forget_after_s=3600))
    async with fed.consumer.running():
        await fed.feed(*(Stream(f"worker-{number}").batch() for number in range(1000)))
        metrics = HttpMetrics(fed.consumer, [], 200, lambda _stream, _block_size: {})
        costs = []
        for _ in range(5):
            began = time.thread_time()
            text = await metrics_text(metrics.registry)
            costs.append(time.thread_time() - began)
    assert b'kvsight_workers{state="live"} 1000.0' in text
    assert min(costs) < 0.5


async def test_a_large_family_has_one_header(serving: Any) -> None:
    async with serving(metrics_max_workers=1000) as (client, fed):
        await fed.feed(*(Stream(f"worker-{number}").batch() for number in range(200)))
        text = (await client.get("/metrics")).text
    assert text.count("# TYPE kvsight_worker_pages gauge") == 1
    assert text.count("kvsight_worker_pages{") == 800


@pytest.mark.parametrize("limit", [0, 1])
async def test_hashes_are_escaped(limit: int, serving: Any) -> None:
    async with serving(metrics_max_workers=limit) as (client, fed):
        await fed.hold(Stream('a"b\\c\nd'), TOKENS)
        found = await samples(client)
    assert ("kvsight_worker_pages_stored_total", "m", "default", 'a"b\\c\nd') in found or limit == 0


@pytest.fixture
def service(kafka_bootstrap: str, tmp_path: Path) -> Iterator[tuple[ServiceProcess, dict[str, Any]]]:
    topics = own_topics(kafka_bootstrap)
    with ServiceProcess(tmp_path, **topics, KVSIGHT_WORKER_TTL_S=4, KVSIGHT_LOG_FORMAT="json") as process:
        yield process, topics


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def test_the_life_of_a_worker_is_in_the_log_of_a_service(service: tuple[ServiceProcess, dict[str, Any]]) -> None:
    process, topics = service
    process.wait_until_ready()

    def events() -> list[str]:
        return [line["event"] for line in json_lines(process.log) if line.get("worker") == "w"]

    with PublishingProcess("w", **topics) as engine:
        engine.store(1)
        wait_until(lambda: events() == ["joined"], what="joined")
        engine.kill()
        wait_until(lambda: "expired" in events(), deadline_s=60, what="expired")
    with PublishingProcess("w", **topics) as engine:
        wait_until(lambda: "came back" in events(), what="came back")
        engine.close()
    wait_until(lambda: events()[-1] == "left", what="left")
    line = json_lines(process.log)[-1]
    assert (line["level"], line["logger"], line["reason"]) == ("INFO", "indexer.worker_log", "closed")


async def test_every_error_answer_has_a_request_id_that_the_log_names(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "api.telemetry.requests")
    app = create_app(LiveService(HandFed().consumer, ApiSettings()))
    async with asking(app) as client:
        theirs = await client.get("/nowhere", headers={"X-Request-ID": "mine-1"})
        ours = await client.get("/nowhere", headers={"X-Request-ID": "not valid\x7f"})
        unavailable = await client.get("/ready")
    assert theirs.headers["x-request-id"] == "mine-1"
    assert len(ours.headers["x-request-id"]) == 16
    for answer in (theirs, ours, unavailable):
        assert f"request {answer.headers['x-request-id']}, GET '{answer.url.path}'" in caplog.text


async def test_an_error_that_no_route_handles_is_a_problem_document_and_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = create_app(LiveService(HandFed().consumer, ApiSettings()))

    @app.get("/broken")
    async def broken() -> None:
        raise ZeroDivisionError

    async with asking(app) as client:
        answer = await client.get("/broken")
    request = answer.headers["x-request-id"]
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
    assert request in answer.json()["detail"]
    assert f"request {request}, GET '/broken', failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
