"""What pages of other sites cannot make a user's browser do: ask for changes, or reach the service by another name."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from api.settings import ApiSettings
from kv_events.errors import InvalidValueError
from tests.rigs.api import served
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream

TOKENS = list(range(1, 17))
QUERY = {"model_name": "m", "token_ids": TOKENS}
CHANGES = ("/workers/w/resync", "/decisions", "/register", "/unregister")


@asynccontextmanager
async def a_service(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service that knows the worker `w`."""
    fed = HandFed()
    async with served(fed.consumer, **settings) as client:
        await fed.hold(Stream("w"), TOKENS)
        yield client


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:3000"},
        {"sec-fetch-site": "cross-site", "origin": "null"},
        {"origin": "http://elsewhere.example"},
        {"origin": "null"},
    ],
    ids=str,
)
async def test_a_page_of_another_site_changes_nothing(headers: dict[str, str]) -> None:
    async with a_service() as client:
        for path in CHANGES:
            problem = check_problem(await client.post(path, headers=headers), 403)
            assert problem["type"] == "urn:kvsight:problem:other-site"
        assert (await client.get("/workers", headers=headers)).is_success


async def test_the_own_page_and_programs_may_ask_for_changes() -> None:
    async with a_service() as client:
        own = str(client.base_url).rstrip("/")
        asking: list[dict[str, str]] = [
            {},
            {"sec-fetch-site": "none"},
            {"sec-fetch-site": "same-origin", "origin": "http://behind.a.proxy.example"},
            {"origin": own},
        ]
        for headers in asking:
            answer = await client.post("/workers/w/resync", headers=headers)
            assert answer.status_code == 202, (headers, answer.text)
        options = {"origin": "http://elsewhere.example", "access-control-request-method": "POST"}
        for answer in (await client.options("/query", headers=options), await client.get("/workers", headers=options)):
            assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_another_name_of_the_service_is_refused_on_either_path() -> None:
    async with a_service(allowed_hosts="127.0.0.1,*.kvsight.example,[::1]") as client:
        for host in ("127.0.0.1", "127.0.0.1:8000", "a.KVSIGHT.example:80", "[::1]", "[::1]:8000"):
            for _ in range(5):  # the fast path knows the head from the second one on
                assert (await client.post("/query", json=QUERY, headers={"host": host})).is_success, host
            assert (await client.get("/workers", headers={"host": host})).is_success, host
        for host in ("rebound.example", "kvsight.example", "127.0.0.1.example", "[::2]", "1", ""):
            for method, path, body in (("POST", "/query", QUERY), ("GET", "/workers", None), ("GET", "/metrics", None)):
                problem = check_problem(await client.request(method, path, json=body, headers={"host": host}), 421)
                assert problem["type"] == "urn:kvsight:problem:other-host"
            for path in ("/health", "/ready"):
                assert (await client.get(path, headers={"host": host})).is_success, host
        check_problem(await client.get("/workers", headers={"host": "127.0.0.1:80@evil"}), 400)


@pytest.mark.parametrize("hosts", ["kvsight:8000", "http://kvsight", "a,,b", ""])
def test_wrong_hosts_stop_the_start(hosts: str) -> None:
    with pytest.raises(InvalidValueError, match="--allowed-hosts"):
        ApiSettings(allowed_hosts=hosts)
