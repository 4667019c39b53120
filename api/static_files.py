"""Files that the service sends as they are: the page at `/`, and the documentation of the API at `/docs`.

The documentation is Swagger UI, with assets from an installed package instead of another server. All addresses in the
files are relative, so they also work behind a proxy that adds a prefix. They contain nothing of this service's data, so
they need no token.
"""

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from mimetypes import guess_type

import fastapi_offline
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for with an ETag, so that a new version is seen at once
}
_PAGE = {
    "/" if file.name == "index.html" else f"/page/{file.name}": file
    for file in (files("api.page") / "static").iterdir()
}
_DOCS = {name: f"docs/{name}" for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")}
_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)

STATIC_PATHS = frozenset({*_PAGE, "/docs", "/openapi.json", *(f"/{path}" for path in _DOCS.values())})


def static_routes() -> list[Route]:
    """Return the routes of all files."""
    routes: list[Route] = []

    def add(path: str, content: bytes, media_type: str | None, headers: dict[str, str]) -> None:
        async def serve(request: Request) -> Response:
            tag = headers.get("ETag")
            if tag is not None and request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers=headers)
            return Response(content, headers=headers, media_type=media_type)

        route = Route(path, serve)
        route.methods = {"GET"}
        routes.append(route)

    for path, file in _PAGE.items():
        content = file.read_bytes()
        tag = f'"{sha256(content).hexdigest()[:16]}"'
        add(path, content, _TYPES[file.name[file.name.rindex(".") :]], {**_PAGE_HEADERS, "ETag": tag})
    for name, path in _DOCS.items():
        content = (files(fastapi_offline) / "static" / name).read_bytes()
        add(f"/{path}", content, guess_type(name)[0], {"Cache-Control": "max-age=3600"})
    page = _docs_page()
    add("/docs", page, "text/html", {"Content-Security-Policy": _policy(page)})
    return routes


def _docs_page() -> bytes:
    script, style, icon = _DOCS.values()
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="kvsight: HTTP API",
        swagger_js_url=script,
        swagger_css_url=style,
        swagger_favicon_url=icon,
    )
    return bytes(page.body)


def _policy(page: bytes) -> str:
    """Return the Content-Security-Policy of the page: its own scripts only. Swagger UI styles elements itself."""
    digests = [b64encode(sha256(script).digest()).decode() for script in _INLINE_SCRIPT.findall(page)]
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
