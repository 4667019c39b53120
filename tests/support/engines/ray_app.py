"""The app of examples/ray_serve.py for tests. Runs in Ray's environment: `python -m ... JSON`.

The object has `port`, `folder`, `engines` (their addresses), `room` (requests at once of a replica), and `router`,
fields of a RequestRouterConfig. With `events` (addresses of the engines' events), it stands in for Ray LLM.
"""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import ray
from fastapi import FastAPI, Request, Response
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from examples import ray_serve
from tests.support.waiting import async_wait_until

api = FastAPI()


class Engine(ray_serve.Engine):
    """A replica that can keep a caller waiting."""

    async def chat(self, body: dict[str, Any]) -> Response:
        """Return the engine's answer."""
        if body.get("user") == "never answer":
            await asyncio.Event().wait()
        return await super().chat(body)


class LLMEngine(Engine):
    """A replica that says what replicas of Ray LLM say."""

    def __init__(self, engines: list[str], events: list[str]) -> None:
        super().__init__(engines)
        self._events = events[engines.index(self.url)]

    def record_replica_metadata(self) -> dict[str, Any]:
        """Say nothing to the router. A hook of Ray Serve."""
        return {"url": self.url}

    def record_routing_stats(self) -> dict[str, Any]:
        """Say where the events are. A hook of Ray Serve."""
        stated = {"endpoint": self._events, "block_size": 16, "dp_rank": 0, "max_num_batched_tokens": 1}
        return {"kv_event_metadata": stated}


@serve.ingress(api)
class LLMIngress:
    """Does what Ray LLM's `LLMRouter`, HAProxy and the engines do with direct streaming."""

    async def __init__(self, engines: DeploymentHandle, num_engines: int) -> None:  # type: ignore[misc]
        from ray.llm._internal.serve.routing_policies.kv_aware.kv_token_tracker import build_kv_token_tracker

        self._engines = engines
        self._tracker = build_kv_token_tracker(SimpleNamespace(experimental_configs={}), engines.deployment_id)
        heard = self._tracker._replica_id_by_worker
        await async_wait_until(lambda: len(heard) == num_engines, 60, "what replicas say")

    @api.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        """Choose a replica by the tokens, ask its engine, and tell that the request has ended."""
        body = await request.json()
        tokens = list("".join(f"<{each['role']}>{each['content']}" for each in body["messages"]).encode())
        choice = self._engines.choose_replica(SimpleNamespace(**body), _reserve=False, request_token_ids=tokens)
        async with choice as chosen:
            engine = chosen.replica_metadata["url"]
        request_id = serve.context._serve_request_context.get().request_id
        try:
            return await ray_serve.ask(engine, body)
        finally:
            for event in ("on_prefill_complete", "on_request_completed"):
                await self._tracker.on_lifecycle_events([(event, (request_id,))])


def main(given: dict[str, Any]) -> None:
    """Serve until the process ends."""
    ray.init(include_dashboard=False, num_cpus=16, object_store_memory=10**8, _temp_dir=given["folder"])
    serve.start(http_options=HTTPOptions(port=given["port"]), logging_config={"enable_access_log": False})
    urls, events = given["engines"], given["events"]
    engine, ingress = (LLMEngine, LLMIngress) if events else (Engine, ray_serve.Ingress)
    router = RequestRouterConfig(**given["router"], request_routing_stats_period_s=0.1, initial_backoff_s=0.5)
    options = {"max_ongoing_requests": given["room"], "ray_actor_options": {"num_cpus": 0}}
    engines = serve.deployment(engine, num_replicas=len(urls), request_router_config=router, **options)
    bound = engines.bind(urls, *([events] if events else []))
    front = serve.deployment(ingress, max_ongoing_requests=100)
    serve.run(front.bind(bound, *([len(urls)] if events else [])), blocking=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
