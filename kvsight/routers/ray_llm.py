"""Ray Serve LLM with direct streaming: Ray makes the tokens, and tells when a request has its first token and ends."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from ray.llm._internal.serve.routing_policies.kv_aware.kv_aware_router import KVAwareRouter
from ray.llm._internal.serve.routing_policies.kv_aware.kv_token_tracker import get_kv_token_tracker

from kvsight.routers.ray import KvsightRouter


class KvsightKVAwareRouter(KvsightRouter, KVAwareRouter):
    """Asks kvsight with Ray's tokens. Ray then publishes the events of its engines, and needs no Dynamo."""

    def initialize_state(self, *args: Any, **kwargs: Any) -> None:
        """Take `request_router_kwargs`. A hook of Ray Serve."""
        KvsightRouter.initialize_state(self, *args, **kwargs)
        tracker = get_kv_token_tracker()
        if tracker is not None:  # this is the process that chooses for HAProxy, where no request ends
            self._key = attrgetter("request_id")
            tracker.on_lifecycle_events = self._on_lifecycle_events

    async def _on_lifecycle_events(self, events: Sequence[tuple[str, Sequence[Any]]]) -> None:
        """Take what engines say about requests, in the loop of the tracker."""
        self._event_loop.call_soon_threadsafe(self._follow, events)

    def _follow(self, events: Sequence[tuple[str, Sequence[Any]]]) -> None:
        for name, (request_id, *_) in events:
            if name == "on_prefill_complete" and (placed := self._booked.get(request_id)):
                self._placement.complete(placed.selection_id)
            elif name == "on_request_completed":
                self._release(request_id)
