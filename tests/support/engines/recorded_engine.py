"""An HTTP server that answers about the tokens of bodies as a recorded engine did."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.engines.recording import AskedText, Step


@asynccontextmanager
async def recorded_engine(steps: Iterable[Step]) -> AsyncIterator[str]:
    """Run a server inside the block, and yield its address. A body that was not recorded is refused."""
    answers = {
        (step.rendering.path, _key(msgspec.json.decode(step.body))): step.rendering.answer
        for step in steps
        if isinstance(step, AskedText) and step.rendering is not None
    }

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        assert body.pop("mm_payload") == "none"
        body.pop("model_name", None)
        found = answers.get((request.path, _key(body)))
        return web.Response(body=found or b'{"error": {}}', status=404 if found is None else 200)

    app = web.Application(client_max_size=2**24)
    app.router.add_post("/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


def _key(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body, order="sorted")
