"""Limits by tenant: what exceeds them is refused and named, other tenants notice nothing, and views come back."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from indexer.assembly import create_consumer
from indexer.settings import IndexerSettings
from indexer.tenants import TenantLimits
from kv_events.errors import InvalidValueError
from kv_events.log.memory import MemoryLog
from kv_events.schema import BlockRemoved, BlockStored, StorageMedium
from publisher import EventPublisher
from publisher.sinks.memory import MemorySink
from tests.rigs.api import replace, samples, served
from tests.rigs.publisher import make_running
from tests.support.http_checks import check_problem
from tests.support.log.records import words
from tests.support.waiting import async_wait_for, async_wait_until

PAGE = 4
FIELDS = {"peer": ("model_name", "routing_group"), "rfc": ("model", "tenant_id")}


class Fleet:
    """A service with limits, and publishers of its workers."""

    def __init__(self, client: httpx.AsyncClient, log: MemoryLog, file: Path) -> None:
        self.client = client
        self._log = log
        self._file = file

    def limit(self, text: str) -> None:
        """Replace the limits."""
        replace(self._file, text)

    def worker(self, name: str, tenant: str) -> EventPublisher:
        return make_running(
            MemorySink(self._log), worker=name, tenant=tenant, heartbeat_s=0.2, resync_min_interval_s=0.1
        )

    async def listener(self, name: str) -> dict[str, Any]:
        """Return the stream of a worker from `GET /workers`, or {}."""
        workers = {each["instance_id"]: each for each in (await self.client.get("/workers")).json()}
        return dict(workers[name]["listeners"]["0"]) if name in workers else {}

    async def is_in(self, name: str, state: str, reason: str = "") -> None:
        """Wait until a worker is in a state."""
        await async_wait_for(
            lambda: self.listener(name),
            lambda found: (found.get("state"), found.get("stale_reason")) == (state, reason),
            *(60, f"{name} to be {state} {reason}"),
        )

    async def score(self, name: str, tenant: str, hashes: list[int]) -> int:
        """Return the pages of a prompt that a worker holds, as `POST /query_by_hash` tells."""
        body = {"model_name": "m", "routing_group": tenant, "seq_hashes": hashes}
        answer = await self.client.post("/query_by_hash", json=body)
        return int(answer.json().get("instances", {}).get(name, {}).get("longest_matched", 0)) // PAGE

    async def trouble(self, name: str) -> dict[str, Any]:
        """Return a worker from the list that the page shows."""
        workers = (await self.client.get("/fleet")).json()["workers"]
        return next(dict(each) for each in workers if each["worker"] == name)

    async def metric(self, *name: str) -> float:
        return (await samples(self.client))[name]


@asynccontextmanager
async def a_fleet(file: Path, limits: str) -> AsyncIterator[Fleet]:
    replace(file, limits)
    log = MemoryLog()
    indexer = IndexerSettings(max_pages=2**16, tenant_limits_file=file, worker_ttl_s=2.0, resync_retry_s=0.2)
    async with served(create_consumer(indexer, log)) as client:
        yield Fleet(client, log, file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "limits.toml"


def stored(hashes: list[int]) -> BlockStored:
    return BlockStored(hashes, None, [], PAGE, None, StorageMedium.GPU, None, words(hashes))


def removed(hashes: list[int]) -> BlockRemoved:
    return BlockRemoved(hashes, StorageMedium.GPU)


async def test_pages_beyond_the_limit_are_refused_until_there_is_room(file: Path) -> None:
    async with (
        a_fleet(file, "[small]\npages = 100\n") as fleet,
        fleet.worker("a", "small") as small,
        fleet.worker("b", "large") as large,
    ):
        prompt, other = list(range(1, 101)), list(range(201, 401))
        small.publish([stored(prompt)])
        large.publish([stored(other)])
        await fleet.is_in("a", "live")
        small.publish([stored(other)])
        await fleet.is_in("a", "stale", "tenant limit: pages")
        assert await fleet.score("a", "small", prompt) == 100
        assert await fleet.score("a", "small", other) == 0
        await fleet.is_in("b", "live")
        assert await fleet.score("b", "large", other) == 200
        assert (await fleet.trouble("a"))["reason"] == "tenant limit: pages"
        assert "its tenant holds as many pages as it may" in str((await fleet.client.get("/fleet")).json()["verdict"])
        assert await fleet.metric("kvsight_tenant_pages", "small") == 100
        assert await fleet.metric("kvsight_tenant_pages", "large") == 200
        small.publish([removed(prompt), removed(other[50:])])
        await fleet.is_in("a", "live")
        assert await fleet.score("a", "small", other) == 50
        small.publish([stored(prompt)])
        await fleet.is_in("a", "stale", "tenant limit: pages")
        fleet.limit("[small]\npages = 1000\n")
        await fleet.is_in("a", "live")
        assert await fleet.score("a", "small", prompt) == 100


async def test_streams_beyond_the_limit_are_named_and_admitted_when_others_leave(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        a_fleet(file, '["*"]\nworker_streams = 1\n[many]\nworker_streams = 2\n') as fleet,
        fleet.worker("first", "small") as first,
    ):
        first.publish([stored([1, 2])])
        await fleet.is_in("first", "live")
        async with fleet.worker("second", "small") as second, fleet.worker("c", "many"), fleet.worker("d", "many"):
            second.publish([stored([1, 2, 3])])
            await fleet.is_in("second", "stale", "tenant limit: worker_streams")
            assert (await fleet.trouble("second"))["reason"] == "tenant limit: worker_streams"
            assert "a worker stream is refused: 'small/m/second/0': tenant 'small'" in caplog.text
            assert await fleet.score("second", "small", [1, 2, 3]) == 0
            assert await fleet.score("first", "small", [1, 2, 3]) == 2
            assert await fleet.metric("kvsight_tenant_refused_streams", "small") == 1
            assert await fleet.metric("kvsight_tenant_worker_streams", "small") == 1
            for name in ("c", "d"):
                await fleet.is_in(name, "live")
            await first.aclose()
            await fleet.is_in("second", "live")
            assert await fleet.score("second", "small", [1, 2, 3]) == 3
            assert await fleet.listener("first") == {}
            async with fleet.worker("third", "small"):
                await fleet.is_in("third", "stale", "tenant limit: worker_streams")
                fleet.limit("")
                fleet.limit("[small]\n")
                await fleet.is_in("third", "live")
            async with fleet.worker("fourth", "many"):
                await fleet.is_in("fourth", "live")


@pytest.mark.parametrize("dialect", FIELDS)
async def test_queries_beyond_the_limit_get_a_429_and_those_of_others_do_not(file: Path, dialect: str) -> None:
    model, group = FIELDS[dialect]
    async with (
        a_fleet(file, "[small]\n") as fleet,
        fleet.worker("a", "small") as small,
        fleet.worker("b", "large") as large,
    ):
        for publisher in (small, large):
            publisher.publish([stored([1, 2])])
        for name in ("a", "b"):
            await fleet.is_in(name, "live")

        async def ask(tenant: str) -> httpx.Response:
            tokens = {"token_ids": [1, 2, 3, 4]}
            return await fleet.client.post("/query", json={model: "m", group: tenant, "block_size": PAGE, **tokens})

        for _ in range(50):  # the connection is a direct one from now on
            assert (await ask("small")).status_code == 200
        fleet.limit("[small]\nqueries_per_s = 2\n")
        await async_wait_for(lambda: ask("small"), lambda answer: answer.status_code == 429, 60, "a refusal")
        answers = []
        for _ in range(20):
            answers += [await ask("small"), await ask("large")]
        assert {each.status_code for each in answers[1::2]} == {200}
        refused = next(each for each in answers[::2] if each.status_code == 429)
        problem = check_problem(refused, 429, "tenant-limit")
        assert "tenant 'small': more than 2 queries in a second (queries_per_s)" in problem["detail"]
        assert (problem["field"], problem["value"]) == (group, "small")
        assert int(refused.headers["retry-after"]) >= 1
        assert await fleet.metric("kvsight_tenant_refused_queries_total", "small") >= 1
        queries = [{model: "m", group: tenant, "block_size": PAGE, "token_ids": [1]} for tenant in ("small", "large")]
        body = {"queries": [*queries * 10]}
        results = (await fleet.client.post("/query/batch", json=body)).json()["results"]
        assert {each.get("status") for each in results[1::2]} == {None}
        assert 429 in {each.get("status") for each in results[::2]}
        fleet.limit("[small]\n")

        async def is_free() -> bool:
            return all([(await ask("small")).status_code == 200 for _ in range(30)])

        await async_wait_until(is_free, 60, "the end of the limit")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a =\n", "TOML: "),
        ("pages = 1", "table 'pages' with worker_streams, pages, queries_per_s"),
        ("[a]\npage = 1", "table 'a' with worker_streams, pages, queries_per_s: .*unknown field `page`"),
        ("[a]\npages = -1", r"table 'a' .*>= 0 \(pages\)"),
        ("[a]\nqueries_per_s = 0", r"> 0\.0 \(queries_per_s\)"),
        ('[""]\npages = 1', "names of tenants of 1 .. 256 bytes"),
    ],
)
def test_a_wrong_file_stops_the_start_and_names_the_place(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidValueError, match=f"--tenant-limits-file.*{words}"):
        TenantLimits(file)


async def test_a_wrong_file_leaves_the_limits_as_they_are(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with a_fleet(file, "[small]\nworker_streams = 0\n") as fleet, fleet.worker("a", "small"):
        await fleet.is_in("a", "stale", "tenant limit: worker_streams")
        fleet.limit("[small]\nworkers = 1\n")
        await async_wait_until(lambda: "the tenant limits stay as they are" in caplog.text, 60)
        await fleet.is_in("a", "stale", "tenant limit: worker_streams")
