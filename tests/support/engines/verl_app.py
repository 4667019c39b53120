"""verl's load balancer before engines, for chats over HTTP. Runs in Ray's environment: `python -m ... JSON`.

The object has `port`, `folder`, `engines` (their addresses), and `kvsight` (its address, or null).
"""

import asyncio
import json
import sys
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import ray
from aiohttp import web
from verl.workers.rollout.router import get_router_handle


class Engine:
    """Stands in for the actor of a rollout server."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def generate(self, prompt_ids: list[int]) -> tuple[int, bytes]:
        """Return the engine's answer."""
        async with aiohttp.request("POST", f"{self._url}/v1/completions", json={"prompt": prompt_ids}) as answer:
            return answer.status, await answer.read()


class Client:
    """Stands in for an agent loop with verl's client: calls the balancer as `LLMServerClient` does."""

    def __init__(self, balancer: Any) -> None:
        self._balancer = balancer

    async def chat(self, request: web.Request) -> web.Response:
        """Compute a turn. All turns of a conversation have one request id."""
        messages = (await request.json())["messages"]
        prompt_ids = list("".join(f"<{each['role']}>{each['content']}" for each in messages).encode())
        first = next(each["content"] for each in messages if each["role"] == "user")
        request_id = uuid.uuid5(uuid.NAMESPACE_OID, first).hex
        wanted = await self._balancer.require_acquire_fields.remote()
        fields = {"prompt_ids": prompt_ids} if "prompt_ids" in wanted else {}
        server_id, server = await self._balancer.acquire_server.remote(request_id=request_id, **fields)
        try:
            status, content = await server.generate.remote(prompt_ids)
            return web.Response(body=content, status=status, content_type="application/json")
        finally:
            named = {"request_id": request_id} if await self._balancer.require_release_fields.remote() else {}
            self._balancer.release_server.remote(server_id=server_id, **named)


def router_file(folder: str, kvsight: str | None) -> str | None:
    """Write the example for a kvsight. None: verl's default balancer needs no file."""
    if kvsight is None:
        return None
    file = Path(folder) / "verl.yaml"
    file.write_text(Path("examples/verl.yaml").read_text().replace("http://kvsight:8000", kvsight))
    return str(file)


async def main(given: dict[str, Any]) -> None:
    """Serve until the process ends."""
    ray.init(include_dashboard=False, num_cpus=16, object_store_memory=10**8, _temp_dir=given["folder"])
    actors = ray.remote(num_cpus=0)(Engine)
    servers = {url.removeprefix("http://"): actors.remote(url) for url in given["engines"]}
    balancer = get_router_handle(servers, router_config_path=router_file(given["folder"], given["kvsight"]))
    await balancer.get_all_servers.remote()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", Client(balancer).chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", given["port"]).start()
    print("is ready at", given["port"], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
