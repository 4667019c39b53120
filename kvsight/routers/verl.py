"""verl: a load balancer of rollouts that prefers the server with most of the prompt in its cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer

from kv_events.runtime.outages import RateLimitedLogger
from kvsight.routers.placement import Placed, Placement

_warnings = RateLimitedLogger(logging.getLogger(__name__), "verl chooses the server")


class KvsightLoadBalancer(GlobalRequestLoadBalancer):
    """verl's default balancer, whose sticky servers kvsight chooses anew for each turn. An actor of Ray."""

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """servers: address -> handle. config: the file of `router_config_path`.

        Its `worker` says what kvsight calls a server: a text with `{address}` or `{host}`. All other keys are arguments
        of `Placement`.
        """
        super().__init__(servers)
        options = dict(config)
        options.pop("router_class", None)
        self._worker = str(options.pop("worker", "http://{address}"))
        self._placement = Placement(**options)
        self._booked: dict[str, Placed] = {}  # by request

    def require_acquire_fields(self) -> list[str]:
        """Return what `acquire_server` needs. A hook of verl."""
        return ["prompt_ids"]

    def require_release_fields(self) -> list[str]:
        """Return what `release_server` needs. A hook of verl."""
        return ["request_id"]

    async def acquire_server(self, request_id: str, prompt_ids: Sequence[int] = ()) -> tuple[str, Any]:
        """Choose a server for a turn. A hook of verl. Raises RuntimeError if there is none."""
        self._release(request_id)
        try:
            await self._choose(request_id, prompt_ids)
        except Exception as error:  # noqa: BLE001  (verl would fail the request)
            _warnings.warning("%r", error, error=error)
        return super().acquire_server(request_id)  # type: ignore[no-any-return]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Note that a turn has ended. A hook of verl."""
        super().release_server(server_id, request_id)
        self._release(request_id or "")

    async def _choose(self, request_id: str, prompt_ids: Sequence[int]) -> None:
        workers = await self._placement.by_worker(list(self._servers), self._called)
        body = {"prompt": list(prompt_ids), "session_id": request_id}
        if placed := await self._placement.place(body, workers):
            self._booked[request_id] = placed
            self._request_id_to_server[request_id] = workers[placed.worker][0]

    def _called(self, server_id: str) -> str:
        return self._worker.replace("{address}", server_id).replace("{host}", server_id.rpartition(":")[0])

    def _release(self, request_id: str) -> None:
        if placed := self._booked.pop(request_id, None):
            self._placement.release(placed.selection_id)
