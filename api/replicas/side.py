"""What an application has in addition if it is one of several processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Final

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.metrics import HttpMetrics
from api.problems import install
from api.replicas.asking import Siblings, answering
from api.replicas.eldest import FromEldest
from api.replicas.metrics import PATH, SharedMetrics
from api.replicas.replica import Replica

PAGE_PATHS: Final = frozenset({"/fleet", "/residency", "/funnel"})
"""What the eldest process answers for all."""


class ReplicaSide:
    """Metrics over all processes, and what the others ask this one."""

    def __init__(self, replica: Replica, metrics: HttpMetrics, page: APIRouter) -> None:
        """page: the routes of `PAGE_PATHS`."""
        self.siblings = Siblings(replica)
        self.metrics = SharedMetrics(replica, metrics.registry, self.siblings)
        self._replica = replica
        self._app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        install(self._app)
        self._app.router.routes.append(Route(PATH, self._own_metrics))
        self._app.include_router(page)

    def share_page(self, app: FastAPI) -> None:
        """Let the eldest process answer the page's routes of the application on the port."""
        app.add_middleware(FromEldest, replica=self._replica, siblings=self.siblings, paths=PAGE_PATHS)

    @asynccontextmanager
    async def running(self, why_not_ready: Callable[[], str], degraded: Callable[[], str]) -> AsyncIterator[None]:
        """Answer the other processes inside the block, which begins when this process may accept connections.

        degraded: why records may be missing from the recording, if this process leads.
        """
        beating = self._replica.beating(why_not_ready, degraded)
        async with aclosing(self.siblings), answering(self._replica, self._app), beating:
            await self._replica.join(why_not_ready)
            yield

    async def _own_metrics(self, _request: Request) -> Response:
        return Response(await self.metrics.own(), media_type="application/msgpack")
