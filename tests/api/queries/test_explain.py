"""POST /explain without a server: the same answers as the library, from a process of its own, and clear refusals."""

import asyncio
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from api.app import create_app
from api.service import LiveService
from api.settings import ApiSettings
from kv_events.http.explanations import Explanation
from kv_events.log.event_log import EventLogWriter
from kvsight.client import AsyncClient
from kvsight.prompts import Prompt
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.late_log import write_late_log, write_log
from tests.support.log.plain_log import flip, segments, tear
from tests.support.log.planted_causes import check_truth, planted
from tests.support.log.planted_scene import MODEL, VICTIM, Scene
from tests.support.waiting import async_wait_until

QUERY = {"model_name": MODEL, "token_ids": list(range(64))}


@asynccontextmanager
async def service(event_log: Path | None, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A service that keeps a log in a folder."""
    app = create_app(LiveService(HandFed().consumer, ApiSettings(**settings), event_log=event_log))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://kvsight") as client:
        yield client


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scene]:
    """A log in which the victim holds the prompt. Tests change nothing in it."""
    scene, _ = planted("held", 102)
    return write_log(tmp_path_factory.mktemp("held"), scene.records), scene


async def explained(client: httpx.AsyncClient, body: dict[str, Any]) -> Explanation:
    answer = await client.post("/explain", json=body)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=Explanation)


async def test_a_log_whose_oldest_files_are_deleted_is_explained_from_its_key_frame(tmp_path: Path) -> None:
    scene, _ = planted("held", 103)
    write_late_log(tmp_path, scene.records, len(scene.records) - 3)
    async with service(tmp_path) as client:
        (worker,) = (await explained(client, {**scene.body, "worker": VICTIM})).workers
    assert (worker.cause, worker.state, worker.held["gpu"]) == ("held", "live", scene.num_pages)


async def test_the_client_explains_while_queries_are_answered(tmp_path: Path) -> None:
    scene, truth = planted("not_known_yet", 101)
    assert scene.until is not None
    async with service(write_log(tmp_path, scene.records)) as http:
        client = AsyncClient("http://kvsight", transport=http._transport, timeout_s=60)
        explaining = asyncio.create_task(
            client.explain(Prompt(MODEL, scene.tokens), worker=VICTIM, at=scene.until.time_s)
        )
        refused = 0
        while not explaining.done():
            assert (await http.post("/query", json=QUERY)).status_code == 503  # it has applied nothing yet
            refused += (await http.post("/explain", json={})).status_code == 429
            await asyncio.sleep(0.01)
        assert refused > 1
        (worker,) = (await explaining).workers
        check_truth(worker, truth)


async def test_a_service_without_a_log_says_how_to_keep_one() -> None:
    async with service(None) as client:
        problem = check_problem(await client.post("/explain", json=QUERY), 404, "no-log")
    assert "--record FOLDER" in problem["detail"]


@pytest.mark.parametrize(
    ("change", "status", "kind", "field"),
    [
        ({"model_name": "unknown", "token_ids": [1, 2, 3]}, 404, "unknown-model", "model_name"),
        ({"worker": "nobody"}, 404, "unknown-worker", "worker"),
        ({"at": 4e9}, 422, "invalid-value", "at"),
        ({"at": "yesterday"}, 422, "invalid-value", "at"),
        ({"worker": 5}, 422, "invalid-value", "worker"),
        ({"token_ids": [-1]}, 422, "invalid-value", "token_ids[0]"),
        ({"token_ids": [1] * 131_073}, 422, "invalid-value", "len(token_ids)"),
    ],
)
async def test_what_does_not_fit_the_log_is_refused(
    change: dict[str, Any], status: int, kind: str, field: str, held: tuple[Path, Scene]
) -> None:
    folder, scene = held
    async with service(folder) as client:
        check_problem(await client.post("/explain", json=scene.body | change), status, kind, field)


async def test_a_log_that_cannot_be_read_is_unavailable(tmp_path: Path) -> None:
    async with service(tmp_path / "missing") as client:
        problem = check_problem(await client.post("/explain", json=QUERY), 503, "unavailable")
    assert "no such folder" in problem["detail"]


async def test_an_explanation_that_takes_too_long_is_given_up(held: tuple[Path, Scene]) -> None:
    async with service(held[0], explain_timeout_s=0.01) as client:
        problem = check_problem(await client.post("/explain", json=QUERY), 503, "unavailable")
        assert "kvsight explain" in problem["detail"]
        check_problem(await client.post("/explain", json=QUERY), 503, "unavailable")  # it is not busy any more


async def test_a_process_that_dies_is_logged(held: tuple[Path, Scene], caplog: pytest.LogCaptureFixture) -> None:
    def explaining() -> list[psutil.Process]:
        own = (each for each in psutil.process_iter(["ppid", "cmdline"]) if each.info["ppid"] == os.getpid())
        return [each for each in own if "analysis.explain" in (each.info["cmdline"] or ())]

    async def kill() -> None:
        await async_wait_until(explaining, what="the process of the explanation")
        for process in explaining():
            process.kill()

    async with service(held[0]) as client:
        answer, _ = await asyncio.gather(client.post("/explain", json=QUERY), kill())
    check_problem(answer, 503, "unavailable")
    assert "the process of the explanation ended with -9" in caplog.text


async def test_a_moment_that_is_no_number_is_refused(held: tuple[Path, Scene]) -> None:
    body = msgspec.msgpack.encode(held[1].body | {"at": math.nan})
    async with service(held[0]) as client:
        answer = await client.post("/explain", content=body, headers={"Content-Type": "application/msgpack"})
    check_problem(answer, 422, "invalid-value", "at")


async def test_parts_of_the_log_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    scene, _ = planted("held", 104)
    segment = segments(write_log(tmp_path, scene.records))[0]
    async with service(tmp_path) as client:
        flip(segment, segment.stat().st_size // 2)
        damaged = await explained(client, scene.body)
    assert [each.startswith(f"{segment}: ") for each in damaged.damage] == [True]
    assert 0 < damaged.records < len(scene.records)


async def test_a_torn_tail_is_damage_unless_a_writer_has_the_log_open(tmp_path: Path) -> None:
    scene, _ = planted("held", 105)
    write_log(tmp_path, scene.records)
    async with service(tmp_path) as client:
        segment = tear(tmp_path)
        torn = await explained(client, scene.body)
        with EventLogWriter(tmp_path):
            sound = await explained(client, scene.body)
    assert [f"{segment}: a torn tail of 3 bytes at byte " in each for each in torn.damage] == [True]
    assert sound.damage == []
