"""Ray Serve: a request router that prefers the replica with most of the prompt in its cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from kv_events.runtime.outages import RateLimitedLogger
from kvsight.routers.placement import DEADLINE_S, Placed, Placement

_MOST_BOOKED = 4096
_Default: Any = RequestRouterConfig().get_request_router_class()
_warnings = RateLimitedLogger(logging.getLogger(__name__), "Ray Serve chooses the replica")


class KvsightRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Ranks the replicas that kvsight chooses before those that Ray Serve's default router chooses.

    A replica is the worker that its metadata names (`record_replica_metadata`), else the one with the replica's id.
    The mixins are those of the default router, without the one that may give a replica to another waiting request.
    """

    def initialize_state(
        self,
        url: str | None = None,
        token: str | None = None,
        deadline_s: float = DEADLINE_S,
        tenant: str | None = None,
    ) -> None:
        """Take `request_router_kwargs`. A hook of Ray Serve.

        url, token: of the service. None: those of KVSIGHT_URL and KVSIGHT_API_TOKEN.
        """
        self._placement = Placement(url, token=token, deadline_s=deadline_s, tenant=tenant)
        self._booked: dict[str, Placed] = {}
        self._key = attrgetter("internal_request_id")  # of a request in `_booked`, from its metadata

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas, the best one first. A hook of Ray Serve. Never raises."""
        chosen: list[list[RunningReplica]] = []
        try:
            if pending_request is not None and not pending_request.metadata.multiplexed_model_id:
                chosen = await self._chosen(candidate_replicas, pending_request)
        except Exception as error:  # noqa: BLE001  (the request would wait for ever)
            _warnings.warning("%r", error, error=error)
        return [*chosen, *await _Default.choose_replicas(self, candidate_replicas, pending_request)]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Release the reservation of a request. A hook of Ray Serve."""
        self._release(internal_request_id)

    async def _chosen(self, replicas: list[RunningReplica], pending: PendingRequest) -> list[list[RunningReplica]]:
        key = self._key(pending.metadata)
        self._release(key)  # of an attempt before: no replica had room
        if not (body := _body(pending)):
            return []
        workers = await self._placement.by_worker(replicas, _called)
        placed = await self._placement.place(body, workers)
        if placed is None:
            return []
        if len(self._booked) >= _MOST_BOOKED:
            self._release(next(iter(self._booked)))
        self._booked[key] = placed
        pending.future.add_done_callback(partial(self._routed, key, placed, workers))
        return [workers[worker] for worker in placed.workers]

    def _routed(self, key: str, placed: Placed, workers: Mapping[str, list[RunningReplica]], future: Any) -> None:
        """Note that a replica takes a request, or that its caller gave up."""
        if self._booked.get(key) is not placed:
            return
        replica = None if future.cancelled() else future.result()
        worker = next((name for name, replicas in workers.items() if replica in replicas), None)
        if worker is None:
            self._release(key)
        elif worker != placed.worker:
            self._booked[key] = self._placement.move(placed, worker)

    def _release(self, key: str) -> None:
        if placed := self._booked.pop(key, None):
            self._placement.release(placed.selection_id)


def _called(replica: RunningReplica) -> str:
    """Return the name of a replica's worker, or its address, or, from replicas of Ray LLM, that of its events."""
    events = replica.routing_stats.get("kv_event_metadata", {}).get("endpoint")
    return str(replica.replica_metadata.get("kvsight_worker") or events or replica.replica_id.unique_id)


def _body(pending: PendingRequest) -> dict[str, Any]:
    """Return what the engine gets: the first argument, and the tokens that Ray LLM made of it. Empty: unknown."""
    given = pending.args[0] if pending.args else {}
    if hasattr(given, "model_dump"):
        given = given.model_dump(mode="json", exclude_unset=True)
    body = dict(given if isinstance(given, Mapping) else getattr(given, "__dict__", {}))
    if not body.keys() & {"messages", "prompt"}:
        return {}
    if tokens := pending.kwargs.get("request_token_ids"):
        body["prompt"] = list(tokens)
    if session := pending.metadata.session_id:
        body["session_id"] = session
    return body
