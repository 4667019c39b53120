"""The documentation page of the API: Swagger UI, with assets from an installed package instead of another server.

All addresses in the page are relative, so it also works behind a proxy that adds a prefix.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from mimetypes import guess_type
from pathlib import Path

import fastapi_offline
from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse, Response

_ASSETS = {name: f"docs/{name}" for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")}
_CACHE = {"Cache-Control": "max-age=3600"}
_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)

DOCS_PATHS = frozenset({"/docs", "/openapi.json", *(f"/{path}" for path in _ASSETS.values())})
"""Paths of the documentation. They describe the API and contain nothing of this service's data."""


def docs_routes() -> APIRouter:
    """Return the page and its assets. Like `/openapi.json`, they need no token."""
    router = APIRouter(include_in_schema=False)
    folder = Path(str(files(fastapi_offline) / "static"))
    script, style, icon = _ASSETS.values()
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="kvsight: HTTP API",
        swagger_js_url=script,
        swagger_css_url=style,
        swagger_favicon_url=icon,
    )
    page.headers["Content-Security-Policy"] = _policy(bytes(page.body))

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        return page

    def add_asset(name: str, path: str) -> None:
        content, media_type = (folder / name).read_bytes(), guess_type(name)[0]

        async def asset() -> Response:
            return Response(content, headers=_CACHE, media_type=media_type)

        router.add_api_route(f"/{path}", asset, response_class=Response)

    for name, path in _ASSETS.items():
        add_asset(name, path)
    return router


def _policy(page: bytes) -> str:
    """Return the Content-Security-Policy of the page: its own scripts only. Swagger UI styles elements itself."""
    digests = [b64encode(sha256(script).digest()).decode() for script in _INLINE_SCRIPT.findall(page)]
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
