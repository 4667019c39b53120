"""A Ray Serve app of replicas, each in front of an engine, which kvsight chooses between.

KVSIGHT_URL=http://kvsight:8000 serve run examples.ray_serve:app engines=http://10.0.0.1:8000,http://10.0.0.2:8000
"""

from typing import Any

import aiohttp
from fastapi import FastAPI, Request, Response
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

api = FastAPI()


async def ask(engine: str, body: dict[str, Any]) -> Response:
    """Return an engine's answer to a chat."""
    async with aiohttp.request("POST", f"{engine}/v1/chat/completions", json=body) as answer:
        return Response(await answer.read(), answer.status, media_type=answer.content_type)


class Engine:
    """A replica. Its engine is the one of its rank."""

    def __init__(self, engines: list[str]) -> None:
        self.url = engines[serve.get_replica_context().rank.rank]

    def record_replica_metadata(self) -> dict[str, Any]:
        """Name the replica's worker in kvsight, or its address, for the router. Ray calls this once."""
        return {"kvsight_worker": self.url}

    async def chat(self, body: dict[str, Any]) -> Response:
        """Return the engine's answer."""
        return await ask(self.url, body)


@serve.ingress(api)
class Ingress:
    """Takes HTTP requests. The body must be the first argument of the call: the router reads it."""

    def __init__(self, engines: DeploymentHandle) -> None:
        self.engines = engines

    @api.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        """Let a replica answer."""
        return await self.engines.chat.remote(await request.json())  # type: ignore[no-any-return]


def app(args: dict[str, str]) -> Application:
    """Build the app. args: `engines`, their addresses with commas."""
    urls = args["engines"].split(",")
    router = RequestRouterConfig(request_router_class="kvsight.routers.ray.KvsightRouter")
    options = {"max_ongoing_requests": 100, "ray_actor_options": {"num_cpus": 0}}  # they only pass requests on
    engine = serve.deployment(Engine, num_replicas=len(urls), request_router_config=router, **options)
    return serve.deployment(Ingress, **options).bind(engine.bind(urls))
