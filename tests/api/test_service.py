"""Probes, metrics, the bearer token, the API documentation and settings."""

from __future__ import annotations

import json
import re
from typing import Any
from unittest.mock import Mock

import pytest
from httpx import AsyncClient

from api.app import create_app
from api.service import LiveService
from api.settings import ApiSettings
from kv_events.errors import InvalidValueError
from kv_events.records import LogRecord
from tests.rigs.api import samples
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, removed
from tests.support.waiting import async_wait_until

TOKENS = list(range(1, 17))


async def test_health_and_readiness_of_a_running_consumer(client: AsyncClient, fed: HandFed) -> None:
    assert (await client.get("/health")).status_code == 200
    await async_wait_until(lambda: fed.consumer.ready, what="ready")
    assert (await client.get("/ready")).json() == {"status": "ready"}


async def test_a_consumer_that_is_not_ready_reports_why(client: AsyncClient, fed: HandFed) -> None:
    fed.consumer.progress.is_caught_up = False
    assert "log" in check_problem(await client.get("/ready"), 503)["detail"]


async def test_a_failed_consumer_fails_both_probes_and_nothing_of_it_leaks(
    client: AsyncClient, fed: HandFed, monkeypatch: pytest.MonkeyPatch
) -> None:
    await async_wait_until(lambda: fed.consumer.ready, what="ready")
    monkeypatch.setattr(fed.log, "read", Mock(side_effect=RuntimeError("password=secret")))
    await async_wait_until(lambda: fed.consumer.failure is not None, what="the failure")
    for path in ("/health", "/ready"):
        problem = check_problem(await client.get(path), 503)
        assert "RuntimeError" in problem["detail"]
        assert "secret" not in problem["detail"]


async def test_metrics_count_what_happened(client: AsyncClient, fed: HandFed) -> None:
    stream, broken = Stream("1"), Stream("2")
    hashes = await fed.hold(stream, TOKENS, {0: range(4), 1: range(2)})
    await fed.feed(stream.batch(removed(hashes[3:])), broken.batch(), LogRecord(0, 0, 0, b"k", b"\xc1"))
    broken.seq += 1
    await fed.feed(broken.batch(digest=b"\1" * 64))
    await client.post("/query", json={"model_name": "m", "token_ids": TOKENS})
    await client.post("/query", json={"model_name": "m"})
    found = await samples(client)
    key = ("4", "m", "default")
    expected = {
        ("kvsight_records_total",): 5,
        ("kvsight_batches_applied_total",): 4,
        ("kvsight_pages_stored_total",): 6,
        ("kvsight_pages_removed_total",): 1,
        ("kvsight_gaps_total",): 1,
        ("kvsight_digest_mismatches_total",): 1,
        ("kvsight_records_rejected_total", "msgpack"): 1,
        ("kvsight_workers", "live"): 1,
        ("kvsight_workers", "stale"): 1,
        ("kvsight_workers", "expired"): 0,
        ("kvsight_index_pages", *key): 3,
        ("kvsight_pages", "4", "GPU", "m", "default"): 3,
        ("kvsight_pages", "4", "CPU_PINNED", "m", "default"): 2,
        ("kvsight_queries_total", "/query"): 2,
        ("kvsight_query_seconds_count", "/query"): 2,
        ("kvsight_http_errors_total", "4xx"): 1,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert found["kvsight_index_bytes", *key] > 0
    assert 0 <= found["kvsight_view_age_seconds",] < 60


async def test_counters_do_not_fall_when_a_worker_is_forgotten(client: AsyncClient, fed: HandFed) -> None:
    stream = Stream("1")
    await fed.hold(stream, TOKENS)
    before = await samples(client)
    for _ in fed.consumer.namespaces.forget(stream.id):
        pass
    forgotten = await samples(client)
    stream.restart()
    await fed.hold(stream, TOKENS[:8])
    after = await samples(client)
    assert [each["kvsight_pages_stored_total",] for each in (before, forgotten, after)] == [4, 4, 6]


async def test_two_applications_count_apart(serving: Any) -> None:
    async with serving() as (one, _), serving() as (other, _):
        await one.post("/query", content=b"")
        found = await samples(other)
    assert found["kvsight_queries_total", "/query"] == 0


async def test_the_documentation_names_every_route(client: AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert (await client.get("/docs")).status_code == 200
    assert set(document["paths"]) == {
        "/query",
        "/query_by_hash",
        "/query/batch",
        "/decisions",
        "/explain",
        "/register",
        "/unregister",
        "/events",
        "/workers",
        "/workers/{worker}/view",
        "/workers/{worker}/resync",
        "/fleet",
        "/residency",
        "/funnel",
        "/tokenize",
        "/dump",
        "/health",
        "/ready",
        "/metrics",
    }
    assert "model_name" in str(document["components"]["schemas"])


async def test_the_documentation_describes_what_it_refers_to_and_nothing_else(client: AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(re.findall(r'"\$ref": ?"([^"]+)"', json.dumps(document))) == schemas


def test_settings_come_from_the_environment_and_hide_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIGHT_PORT", "8123")
    monkeypatch.setenv("KVSIGHT_API_TOKEN", "s3cret")
    settings = ApiSettings()
    assert (settings.port, settings.host) == (8123, "127.0.0.1")
    assert "s3cret" not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("port", 70_000, "KVSIGHT_PORT"),
        ("max_connections", 0, "--max-connections"),
        ("api_token", "", "KVSIGHT_API_TOKEN"),
    ],
)
def test_a_bad_setting_is_named(name: str, value: Any, shown: str) -> None:
    with pytest.raises(InvalidValueError, match=shown):
        ApiSettings(**{name: value})


def test_an_application_can_be_made_outside_an_event_loop() -> None:
    assert create_app(LiveService(HandFed().consumer, ApiSettings())).title == "kvsight"
