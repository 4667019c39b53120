"""Applications that are asked without a server, or over one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from api.app import Application, create_app
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings, RegistrationSettings
from api.workers.registrations import Registrations
from bridge import BridgeSettings
from indexer.consumer import Consumer
from kv_events.log.memory import MemoryLog


@asynccontextmanager
async def asking(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Run an application, and yield a client of it."""
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        yield client


def embedding(consumer: Consumer, log: MemoryLog, bridge: BridgeSettings | None = None, **settings: Any) -> Application:
    """Return an application that reads engines itself. log: that the consumer reads."""
    registrations = Registrations(consumer, log, RegistrationSettings(**settings), bridge or BridgeSettings(), None)
    return create_app(LiveService(consumer, ApiSettings(), registrations))


@asynccontextmanager
async def served(app: Application, settings: ApiSettings) -> AsyncIterator[httpx.AsyncClient]:
    """Run the server of an application, and yield a client of it."""
    async with running_server(app, settings) as url, httpx.AsyncClient(base_url=url) as client:
        yield client
