"""Probes, metrics, the API documentation and its page, and settings."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urljoin

import msgspec
import pytest
from httpx import AsyncClient

from api.settings import ApiSettings
from indexer.slices import run_at_once
from kv_events.errors import InvalidValueError
from kv_events.records import LogRecord
from tests.rigs.api import replaying, samples
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.late_log import write_log
from tests.support.log.records import Stream, removed
from tests.support.waiting import async_wait_until

TOKENS = list(range(1, 17))
ROUTES = """
    /query /query_by_hash /query/batch /decisions /explain /register /unregister /events /workers /workers/{worker}
    /workers/{worker}/view /workers/{worker}/resync /fleet /residency /funnel /tokenize /select /select_and_reserve
    /reservations /reservations/{reservation_id} /reservations/{reservation_id}/prefill_complete
    /reservations/{reservation_id}/output_block /loads /potential_loads /overlap_scores /dump /health /ready /metrics
"""
NEED_MORE = {"/reservations", "/register", "/unregister", "/explain", "/tokenize"}
"""Routes of a service with an embedded bridge, a recording or a tokenizer."""


async def test_health_and_readiness_of_a_running_consumer(client: AsyncClient, fed: HandFed) -> None:
    assert (await client.get("/health")).status_code == 200
    await async_wait_until(lambda: fed.consumer.ready, what="ready")
    assert (await client.get("/ready")).json() == {"status": "ready", "ready": True, "schedulable_workers": 0}


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
    run_at_once(fed.consumer.namespaces.forget(stream.id))
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
    assert set(document["paths"]) == set(ROUTES.split())
    assert "model_name" in str(document["components"]["schemas"])
    summaries = {path: each["summary"] for path, methods in document["paths"].items() for each in methods.values()}
    assert summaries["/fleet"] == "Return whether the views are true, and all workers, those in trouble first"
    assert all(len(summary.split()) >= 3 for summary in summaries.values()), summaries


async def test_the_examples_of_the_documentation_are_accepted(client: AsyncClient, fed: HandFed) -> None:
    await fed.hold(Stream("engine-0", model="my-model", block_size=16), range(1, 17))
    document = (await client.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
                encode = msgspec.json.encode if media_type.endswith("json") else msgspec.msgpack.encode
                headers = {"Content-Type": media_type}
                url, body = path.replace("{worker}", "1"), encode(content["example"])
                answer = await client.request(method, url, content=body, headers=headers)
                assert answer.status_code in ((404,) if path in NEED_MORE else (200, 201, 202)), answer.text


@pytest.mark.parametrize("is_replay", [False, True])
async def test_the_documentation_describes_what_it_refers_to_and_nothing_else(
    client: AsyncClient, tmp_path: Path, is_replay: bool
) -> None:
    if is_replay:
        async with replaying(write_log(tmp_path, [Stream("w").batch()])) as of_replay:
            document = (await of_replay.get("/openapi.json")).json()
    else:
        document = (await client.get("/openapi.json")).json()
    assert ("/register" in document["paths"]) != is_replay
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
        ("tokenize_url", "localhost:8000", "--tokenize-url"),
        *(("allowed_hosts", hosts, "--allowed-hosts") for hosts in ("kvsight:8000", "http://kvsight", "a,,b", "")),
    ],
)
def test_a_bad_setting_is_named(name: str, value: Any, shown: str) -> None:
    with pytest.raises(InvalidValueError, match=shown):
        ApiSettings(**{name: value})


@pytest.mark.parametrize("settings", [{}, {"api_token": "s3cret"}])
async def test_the_page_needs_no_token_and_no_other_server(settings: dict[str, Any], serving: Any) -> None:
    async with serving(**settings) as (client, _):
        page = await client.get("/docs")
        named = re.findall(r"""(?:src|href)="([^"]+)"|url: '([^']+)'""", page.text)
        addresses = ["".join(each) for each in named]
        assert len(addresses) == 4, page.text
        for address in addresses:
            assert "://" not in address
            found = await client.get(urljoin("/docs", address))
            assert (found.status_code, len(found.content) > 1000) == (200, True), address


async def test_the_page_permits_no_other_script(client: AsyncClient) -> None:
    page = await client.get("/docs")
    policy = dict(each.split(" ", 1) for each in page.headers["content-security-policy"].split("; "))
    scripts = re.findall("<script>(.*?)</script>", page.text, re.DOTALL)
    digests = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    assert policy["script-src"].split() == ["'self'", *(f"'sha256-{digest}'" for digest in digests)]
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"


async def test_the_page_works_behind_a_prefix(client: AsyncClient) -> None:
    page = (await client.get("/docs")).text
    assert not re.findall(r"""(?:src|href)="/|url: '/""", page)


async def test_the_document_asks_for_the_token_where_one_is_needed(serving: Any) -> None:
    async with serving(api_token="s3cret") as (client, _):
        document = (await client.get("/openapi.json")).json()
        for path, operations in document["paths"].items():
            if "get" in operations and "{" not in path and path != "/events":
                is_open = operations["get"].get("security", document["security"]) == []
                assert ((await client.get(path)).status_code != 401) == is_open, path
    assert document["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
    assert document["security"] == [{"token": []}]


async def test_the_document_asks_for_no_token_where_none_is_needed(client: AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert "security" not in document
    assert "securitySchemes" not in document["components"]
