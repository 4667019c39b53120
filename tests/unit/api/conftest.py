"""An application whose consumer reads records made by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest

from api.app import create_app
from api.service import LiveService
from api.settings import ApiSettings
from tests.rigs.api import asking
from tests.support.log.hand_fed import HandFed

Serving = Callable[..., AbstractAsyncContextManager[tuple[httpx.AsyncClient, HandFed]]]


@pytest.fixture
def serving() -> Serving:
    """`async with serving(**settings) as (client, fed)`: a client of the application, and its consumer."""

    @asynccontextmanager
    async def serve(**settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, HandFed]]:
        fed = HandFed()
        app = create_app(LiveService(fed.consumer, ApiSettings(**settings)))
        async with asking(app) as c:
            yield c, fed

    return serve
