"""Applications that are asked without a server, or over one."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from api.app import create_app
from api.replay.service import ReplayService
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings, RegistrationSettings
from api.workers.registrations import Registrations
from bridge import BridgeSettings
from indexer.assembly import create_consumer
from indexer.consumer import Consumer
from indexer.settings import IndexerSettings
from kv_events.log.memory import MemoryLog
from kv_events.log.moments import LogMoment
from selection.settings import SelectionSettings
from tests.support.http_checks import WITHOUT_TLS
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream
from tests.support.waiting import async_wait_until

Serving = Callable[..., AbstractAsyncContextManager[tuple[httpx.AsyncClient, HandFed]]]


@asynccontextmanager
async def asking(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Run an application, and yield a client of it."""
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        yield client


@pytest.fixture
def serving() -> Serving:
    """`async with serving(**settings) as (client, fed)`: a client of an application, and what feeds its consumer."""

    @asynccontextmanager
    async def serve(**settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, HandFed]]:
        fed = HandFed()
        async with asking(create_app(LiveService(fed.consumer, ApiSettings(**settings)))) as client:
            yield client, fed

    return serve


@pytest.fixture
def fed() -> HandFed:
    """Feeds the consumer of `client`."""
    return HandFed()


@pytest.fixture
async def client(fed: HandFed) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application with the default settings."""
    async with asking(create_app(LiveService(fed.consumer, ApiSettings()))) as client:
        yield client


@asynccontextmanager
async def embedded(
    indexer: IndexerSettings | None = None,
    log: MemoryLog | None = None,
    selection: SelectionSettings | None = None,
    api: ApiSettings | None = None,
    **settings: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """Run an application that reads engines itself, and yield a client of it. settings: of registrations."""
    log = log or MemoryLog()
    consumer = create_consumer(indexer or IndexerSettings(max_pages=2**16), log)
    registrations = Registrations(consumer, log, RegistrationSettings(**settings), BridgeSettings(), None)
    service = LiveService(consumer, api or ApiSettings(), registrations, selection=selection)
    async with asking(create_app(service)) as client:
        yield client


@asynccontextmanager
async def listening(
    consumer: Consumer, registrations: Registrations | None = None, **settings: Any
) -> AsyncIterator[str]:
    """Run a server of a consumer, and yield its address. settings: of the service."""
    api = ApiSettings(port=0, **settings)
    async with running_server(create_app(LiveService(consumer, api, registrations)), api) as url:
        yield url


@asynccontextmanager
async def served(consumer: Consumer, verify: Any = WITHOUT_TLS, **more: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Run such a server, and yield a client of it. verify: as for the client. more: as for `listening`."""
    async with (
        listening(consumer, **more) as url,
        httpx.AsyncClient(base_url=url, verify=verify, timeout=60) as client,
    ):
        yield client


@asynccontextmanager
async def served_worker(tokens: Sequence[int], **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Run a server that knows the worker `w`, which holds a prompt, and yield a client of it."""
    fed = HandFed()
    async with served(fed.consumer, **settings) as client:
        await fed.hold(Stream("w"), tokens)
        yield client


@asynccontextmanager
async def replaying(
    folder: Path, default: LogMoment | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Run the replay of a log, and yield a client of it. default: the moment of requests that name none."""
    service = ReplayService(folder, ApiSettings(**settings), default or LogMoment(), [])
    async with asking(create_app(service)) as client:
        yield client


async def searched_span(client: httpx.AsyncClient) -> Any:
    """Return the span of a replayed log, once the whole log has been searched for marks."""
    span: dict[str, Any] = {}

    async def is_searched() -> bool:
        nonlocal span
        span = (await client.get("/span")).json()
        assert span["marks_failure"] == ""
        return bool(span["marks_until"] == span["next_index"])

    await async_wait_until(is_searched, 200, "the whole log searched")
    return span


async def samples(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """Scrape: (name, label values in the order of the label names) -> value."""
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }


def replace(file: Path, text: str) -> None:
    """Replace a file at once, as secrets of Kubernetes are."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)
