"""Every route of the application answers hostile requests with problem documents, and never fails."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote

import httpx
from fastapi import FastAPI
from starlette.routing import BaseRoute, Route

from api.access.guard import OPEN_PATHS, scope_of
from api.access.tokens import Scope
from api.app import create_app
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream

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
    """Return the paths of all routes."""

    def found(routes: Iterable[BaseRoute]) -> Iterator[str]:
        for route in routes:
            if isinstance(route, Route):
                yield route.path
            else:
                yield from found(route.original_router.routes)  # type: ignore[attr-defined]  # of an included router

    return sorted(set(found(app.routes)))


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
    names = NAMES if "{" in template else [""]
    for path in {_filled(template, name) for name in names}:
        for method in METHODS:
            if method != "GET" or template not in ENDLESS:
                await ask(client, path, method)
    path = _filled(template, "w")
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
