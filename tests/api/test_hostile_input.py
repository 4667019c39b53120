"""Hostile requests are answered with problem documents, and hostile names are refused or shown as text."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import BaseRoute, Route

from api.access.guard import OPEN_PATHS, scope_of
from api.access.tokens import Scope
from api.app import create_app
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from bridge import EngineSettings
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.slices import run_at_once
from indexer.snapshots.base import SnapshotDamagedError
from indexer.snapshots.image import take, unpack
from kv_events.errors import InvalidValueError
from kv_events.runtime.words import printable
from kv_events.streams import StreamId
from publisher import PublisherSettings
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, stored
from tests.support.servers.embedded_service import service

ENDLESS = {"/events"}
"""Answers that have no end. Their errors are asked for."""
METHODS = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "X"]
NAMES = ["w", "", "../w", "%00", "\u00fc" * 300, "x" * 3000, "-1", "1e999", "null", "<b>", "a/b"]
QUERIES = [
    "",
    "?" + "&".join(f"{name}=%00" for name in ("model_name", "instance_id", "dp_rank", "limit", "cursor", "kind", "at")),
    "?" + "&".join(f"{name}=-1" for name in ("limit", "dp_rank", "seconds", "count", "block_size", "cursor")),
    "?limit=1e999&dp_rank=null&cursor=%ff&at=never&kind=x&stream=x",
    "?limit=99999999999999999999&dp_rank=99999999999999999999&cursor=" + "9" * 5000,
    "?a&&==&%zz&" + "x=1&" * 500,
]
BODIES = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"\xff\x00",
    b"[" * 5000,
    b'{"model_name":' * 500,
    b'{"model_name":"m","token_ids":[-1],"worker":1e999,"text":null,"instance_id":[],"endpoint":{}}',
    b'{"model_name":"' + b"\xf0\x9f" + b'"}',
    b'{"queries":[1],"decisions":[1],"prompts":[1]}',
]
HEADERS = [
    {},
    {"content-type": "application/json"},
    {"content-type": "application/msgpack"},
    {"content-type": "\u00ff", "accept": "x/y;q=9", "range": "bytes=9-1", "if-none-match": "*", "origin": "null"},
    {"traceparent": "00-x", "x-request-id": "\x7f", "last-event-id": "-1", "x-forwarded-for": "a, b", "cookie": "=;="},
]


def paths_of(app: FastAPI) -> list[str]:
    """Return the paths of all routes. One stands for all files of the page."""

    def found(routes: Iterable[BaseRoute]) -> Iterator[str]:
        for route in routes:
            if isinstance(route, Route):
                yield route.path
            else:
                yield from found(route.original_router.routes)  # type: ignore[attr-defined]  # of an included router

    paths = set(found(app.routes))
    return sorted({path for path in paths if not path.startswith("/page/")} | {"/page/main.js"})


@asynccontextmanager
async def live(**settings: Any) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    api, fed = ApiSettings(port=0, **settings), HandFed()
    app = create_app(LiveService(fed.consumer, api))
    async with running_server(app, api) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        await fed.hold(Stream("w"), list(range(1, 17)))
        yield app, client


async def ask(client: httpx.AsyncClient, path: str, method: str, **more: Any) -> httpx.Response:
    """Ask, and check that an error of the caller is described and that nothing fails."""
    answer = await client.request(method, path, **more)
    assert answer.status_code < 500, (method, path, more, answer.text)
    assert answer.headers["x-content-type-options"] == "nosniff", (method, path, more)
    if answer.status_code >= 400 and method != "HEAD":
        check_problem(answer, answer.status_code)
    return answer


async def test_no_route_fails() -> None:
    async with live() as (app, client):
        await asyncio.gather(*(ask_in_many_ways(client, template) for template in paths_of(app)))


async def ask_in_many_ways(client: httpx.AsyncClient, template: str) -> None:
    path = _filled(template, "w")
    for method in METHODS:
        if method != "GET" or template not in ENDLESS:
            await ask(client, path, method)
    for name in NAMES if "{" in template else []:
        for method in ("GET", "POST"):
            await ask(client, _filled(template, name), method)
    for query in QUERIES:
        if template not in ENDLESS:
            await ask(client, path + query, "GET")
        await ask(client, path + query, "POST")
    for body in BODIES:
        await ask(client, path, "POST", content=body, headers={"content-type": "application/json"})
    for headers in HEADERS:
        encoded = [(name, value.encode("latin-1")) for name, value in headers.items()]
        await ask(client, path, "POST", content=BODIES[-1], headers=encoded)
        if template not in ENDLESS:
            await ask(client, path, "GET", headers=encoded)


def _filled(template: str, name: str) -> str:
    """Return a path with a name in place of each parameter."""
    return "/".join(quote(name, safe="") if part.startswith("{") else part for part in template.split("/"))


async def test_every_route_has_its_scope(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    scopes: tuple[str, ...] = get_args(Scope)
    file.write_text(
        "".join(f'[{scope}]\ntoken = "{scope}-0123456789abcdef"\nscopes = ["{scope}"]\n' for scope in scopes)
    )
    file.chmod(0o600)
    async with live(api_tokens_file=file) as (app, client):

        async def check(template: str) -> None:
            path = _filled(template, "w")
            for method in ("GET", "POST", "DELETE"):
                if template in ENDLESS and method == "GET":
                    continue
                needed = scope_of(method, path)
                statuses = {
                    scope: (
                        await ask(client, path, method, headers={"authorization": f"Bearer {scope}-0123456789abcdef"})
                    ).status_code
                    for scope in scopes
                }
                nobody = (await ask(client, path, method)).status_code
                if path in OPEN_PATHS:
                    assert not {401, 403} & {*statuses.values(), nobody}, (path, method)
                    continue
                assert nobody == 401, (path, method)
                assert {scope for scope, status in statuses.items() if status != 403} == {needed, "admin"}, (
                    path,
                    method,
                )

        await asyncio.gather(*map(check, paths_of(app)))


LONGEST = "é" * 128
BAD = {"empty": "", "too long": "x" * 257, "too many bytes": "é" * 129}
FIELDS = ("worker", "model", "tenant")


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("field", FIELDS)
def test_settings_of_publishers_and_bridges_name_the_field(field: str, bad: str) -> None:
    names: dict[str, Any] = {"worker": "w", "model": "m", "tenant": "t"}
    PublisherSettings(**{**names, field: LONGEST}, block_size=4)
    EngineSettings(**{**names, field: LONGEST}, endpoint="tcp://127.0.0.1:1")
    with pytest.raises(InvalidValueError, match=f"KVSIGHT_{field.upper()}"):
        PublisherSettings(**{**names, field: bad}, block_size=4)
    with pytest.raises(InvalidValueError, match=field):
        EngineSettings(**{**names, field: bad}, endpoint="tcp://127.0.0.1:1")


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_a_record_with_a_bad_name_is_a_dead_letter(fed: HandFed, bad: str) -> None:
    async with fed.consumer.running():
        for stream in (Stream(bad), Stream("w", model=bad), Stream("w", tenant=bad)):
            await fed.feed(stream.batch(stored((0, [1]))))
        await fed.feed(Stream(LONGEST).batch(stored((0, [1]))))
    assert [view.stream.worker for view in fed.consumer.namespaces.views] == [LONGEST]
    assert fed.consumer.applier.dead_letters.counts.total() == 3


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_snapshot_with_a_bad_name_is_damaged(bad: str) -> None:
    for stream in (StreamId("m", "t", bad, 0), StreamId(bad, "t", "w", 0), StreamId("m", bad, "w", 0)):
        namespaces = Namespaces()
        namespaces.add_view(stream, 4)
        with pytest.raises(SnapshotDamagedError, match=r"names of 1 \.\. 256 bytes"):
            unpack(image_of(namespaces), IndexerSettings())
    namespaces = Namespaces()
    namespaces.add_view(StreamId("m", "t", LONGEST, 0), 4)
    assert [view.stream.worker for view in unpack(image_of(namespaces), IndexerSettings()).namespaces.views] == [
        LONGEST
    ]


def image_of(namespaces: Namespaces) -> bytes:
    """Return a snapshot."""
    return b"".join(run_at_once(take(namespaces, {}, 0.0)).pack())


async def test_names_with_control_characters_and_markup_are_text_everywhere(
    client: httpx.AsyncClient, fed: HandFed, caplog: pytest.LogCaptureFixture
) -> None:
    hostile = "\x1b[31m<script>alert(1)</script>\r\nforged: line"
    caplog.set_level(logging.INFO)
    await fed.feed(Stream(hostile, model=hostile, tenant=hostile).batch(stored((0, [1]))))
    for path in ("/workers", "/fleet"):
        answer = await client.get(path)
        assert answer.headers["content-type"].startswith("application/json")
        assert hostile in {each.get("instance_id", each.get("worker")) for each in workers_in(answer.json())}
    metrics = (await client.get("/metrics")).text
    assert not any(line.startswith("forged") for line in metrics.split("\n"))
    unknown = await client.post("/query", json={"model_name": "x", "token_ids": [1]})
    assert unknown.headers["content-type"] == "application/problem+json"
    assert not any(record.getMessage() != printable(record.getMessage()) for record in caplog.records)


def workers_in(answer: Any) -> list[dict[str, Any]]:
    """Return the workers of either answer."""
    found: list[dict[str, Any]] = answer["workers"] if isinstance(answer, dict) else answer
    return found


async def test_requests_with_bad_names_are_refused() -> None:
    decision = {"request_id": "r", "model_name": "m", "worker": "w", "token_ids": [1, 2, 3, 4]}
    registration = {"instance_id": "w", "model_name": "m", "endpoint": "tcp://127.0.0.1:1", "block_size": 4}
    async with service() as served:

        async def asked(path: str, body: dict[str, Any]) -> httpx.Response:
            return await served.client.post(path, json=body)

        assert (await asked("/decisions", decision)).is_success
        for bad in BAD.values():
            for field in ("instance_id", "model_name", *(["routing_group"] if bad else [])):  # no tenant: the default
                refused = await asked("/register", {**registration, field: bad})
                assert refused.status_code in (400, 422), (field, bad, refused.text)
            for field in ("worker", "model_name", *(["routing_group"] if bad else [])):
                refused = await asked("/decisions", {**decision, field: bad})
                assert refused.status_code in (400, 404, 422), (field, bad, refused.text)
        assert (await served.client.get("/workers")).json() == []
