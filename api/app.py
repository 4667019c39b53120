"""The application: which parts there are, and in which order they start and stop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from starlette.routing import Route

from api import problems
from api.auth import BearerToken
from api.dump import dump_routes
from api.hot import HotRoutes
from api.metrics import HttpMetrics, MeasureRequests
from api.openapi import add_hot_routes
from api.service import service_routes
from api.settings import ApiSettings
from api.workers import worker_routes
from indexer.consumer import Consumer


class Application(FastAPI):
    """FastAPI whose documentation includes the hot routes."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, built once."""
        if self.openapi_schema is None:
            add_hot_routes(super().openapi())
        return super().openapi()


def create_app(consumer: Consumer, settings: ApiSettings) -> FastAPI:
    """The application on a consumer that is not running yet: its lifespan runs it, in the same event loop."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with consumer.running():
            yield

    app = Application(title="kvsight", version=_version(), lifespan=lifespan)
    endpoints = HotRoutes(consumer, settings.max_body_bytes).endpoints()
    metrics = HttpMetrics(consumer, endpoints)
    for path, endpoint in endpoints.items():
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    app.include_router(service_routes(consumer, metrics))
    app.include_router(worker_routes(consumer))
    app.include_router(dump_routes(consumer))
    problems.install(app)
    # the last one added is the outermost: refused callers are counted, too
    if settings.api_token is not None:
        app.add_middleware(BearerToken, token=settings.api_token.get_secret_value())
    app.add_middleware(MeasureRequests, metrics=metrics)
    return app


def _version() -> str:
    try:
        return version("kvsight")
    except PackageNotFoundError:
        return "0"  # run from a checkout that is not installed
