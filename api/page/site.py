"""The files of the page. They contain no data, so they need no token."""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from starlette.responses import Response

_FOLDER = files("api.page") / "static"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_INDEX = "index.html"
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for with an ETag, so that a new version is seen at once
}

_FILES = {"/" if file.name == _INDEX else f"/page/{file.name}": file for file in _FOLDER.iterdir()}

SITE_PATHS = frozenset(_FILES)
"""Paths of the files."""


def site_routes() -> APIRouter:
    """Return the page at `/` and its files below `/page/`. All addresses in them are relative, for proxies that add a
    prefix."""
    router = APIRouter(include_in_schema=False)

    def add(path: str, file: Traversable) -> None:
        content = file.read_bytes()
        tag = f'"{sha256(content).hexdigest()[:16]}"'
        media_type = _TYPES[file.name[file.name.rindex(".") :]]
        headers = {**_HEADERS, "ETag": tag}

        async def serve(request: Request) -> Response:
            if request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers=headers)
            return Response(content, headers=headers, media_type=media_type)

        router.add_api_route(path, serve, response_class=Response)

    for path, file in _FILES.items():
        add(path, file)
    return router
