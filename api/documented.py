"""A FastAPI application whose documentation includes the hot routes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI

from api import openapi, problems


class DocumentedApp(FastAPI):
    """An application whose errors are problem documents and whose OpenAPI document is complete."""

    def __init__(self, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]], *, needs_token: bool) -> None:
        super().__init__(title="kvsight", version=_version(), lifespan=lifespan, docs_url=None, redoc_url=None)
        self.state.needs_token = needs_token
        problems.install(self)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, which is built once."""
        if self.openapi_schema is None:
            openapi.complete(super().openapi(), needs_token=self.state.needs_token)
        return super().openapi()


def _version() -> str:
    try:
        return version("kvsight")
    except PackageNotFoundError:
        return "0"  # running from a checkout without installation
