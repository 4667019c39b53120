"""Log lines of real processes: the life of workers, levels, JSON, and request ids of errors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.app import create_app
from api.service import LiveService
from api.settings import ApiSettings
from tests.support.engines.publishing_process import PublishingProcess
from tests.support.log.hand_fed import HandFed
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until


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
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
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

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        answer = await client.get("/broken")
    request = answer.headers["x-request-id"]
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
    assert request in answer.json()["detail"]
    assert f"request {request}, GET '/broken', failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
