"""What routers reuse with kvsight and without: `python -m benchmarks.bench_routers [--json FILE]`

Three simulated engines with caches without bounds, `kvsight serve` with the policy session,overlap-load, and 30
conversations of 4 turns, of which each fourth has the same beginning. The share is of the tokens that one cache for
all would have reused. Latencies are of whole requests, one at a time. In the last row of a router, kvsight is killed
in the middle.
"""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from benchmarks.report import Figure, figure, main, percentile
from tests.rigs.routed_fleet import Messages, Outcome, RepublishedFleet, RoutedFleet, conversations
from tests.rigs.routed_fleet import run as send
from tests.support.commands import RunningCommand
from tests.support.servers.child_process import free_port
from tests.support.servers.litellm_proxy import HEADERS, MODEL, LiteLLMProxy
from tests.support.servers.lua_routers import HAProxy, LuaRouter, Nginx
from tests.support.servers.ray_apps import RayApp, ray_serve, verl_balancer
from tests.support.servers.smg_gateway import SmgGateway
from tests.support.servers.vllm_router import VllmRouter

CONVERSATIONS, TURNS, AT_ONCE, GOAL = 30, 4, (1, 4), "95 %"
_NOWHERE = "http://127.0.0.1:9"


class _Router(Protocol):
    url: str


class _Route(RunningCommand):
    def __init__(self, *words: object) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        super().__init__("route", "--port", port, *words)
        self.wait_for("routes on")


Start = Callable[[Any, Path], AbstractContextManager[_Router]]
"""Starts a router in front of a `RoutedFleet`, or of a `RepublishedFleet`."""


def _in_turn(fleet: RoutedFleet, _folder: Path) -> _Route:
    workers = [word for n, each in enumerate(fleet.engines) for word in ("--worker", f"e{n}={each.url}")]
    return _Route("--url", _NOWHERE, *workers)


@contextmanager
def _smg(fleet: RoutedFleet, folder: Path) -> Iterator[_Route]:
    engines = [each.url for each in fleet.engines]
    with SmgGateway(folder, engines) as gateway, _Route("--url", fleet.url, "--gateway", gateway.url) as route:
        yield route


def _litellm(more: object) -> Start:
    return lambda fleet, folder: LiteLLMProxy(folder, fleet.url, [each.url for each in fleet.engines], more)


def _lua(start: Callable[[Path, str | None, list[str]], LuaRouter], *, asks: bool) -> Start:
    return lambda fleet, folder: start(folder, fleet.url if asks else None, [each.url for each in fleet.engines])


def _ray(start: Callable[[list[str], str | None], RayApp], *, asks: bool) -> Start:
    return lambda fleet, _folder: start([each.url for each in fleet.engines], fleet.url if asks else None)


ROUTERS: dict[str, Start] = {
    "route": lambda fleet, _folder: _Route("--url", fleet.url),
    "route, in turn": _in_turn,
    "haproxy with kvsight": _lua(HAProxy, asks=True),
    "haproxy, leastconn": _lua(HAProxy, asks=False),
    "nginx with kvsight": _lua(Nginx, asks=True),
    "nginx, in turn": _lua(Nginx, asks=False),
    "smg with kvsight": _smg,
    "smg, cache_aware": lambda fleet, folder: SmgGateway(folder, [each.url for each in fleet.engines], "cache_aware"),
    "litellm with kvsight": _litellm(None),
    "litellm, simple-shuffle": _litellm({"litellm_settings": {}}),
    "ray serve with kvsight": _ray(ray_serve, asks=True),
    "ray serve, power of two choices": _ray(ray_serve, asks=False),
    "verl with kvsight": _ray(verl_balancer, asks=True),
    "verl, sticky and least requests": _ray(verl_balancer, asks=False),
}
OF_EVENTS: dict[str, Start] = {
    "vllm-router on republished events": lambda fleet, folder: VllmRouter(folder, fleet.events),
    "vllm-router, cache_aware": lambda fleet, folder: VllmRouter(folder, dict.fromkeys(fleet.events)),
}
"""Routers with an index of their own."""


def run() -> list[Figure]:
    """Return all figures."""
    return [each for name, start in (ROUTERS | OF_EVENTS).items() for each in _figures(name, start)]


def _figures(name: str, start: Start) -> Iterator[Figure]:
    for at_once in AT_ONCE:
        outcome = _measured(start, at_once)
        yield figure(f"{name}: reused, {at_once} at once", "%", [100 * outcome.share], GOAL)
        if at_once == 1:
            for percent in (50, 99):
                yield figure(f"{name}: latency p{percent}", "ms", [1000 * percentile(outcome.seconds, percent)])
    if name == "route":
        share = _measured(start, 4, policy="overlap-load").share
        yield figure(f"{name}, overlap-load alone: reused, 4 at once", "%", [100 * share])
    yield figure(f"{name}: failed, kvsight killed", "requests", [_measured(start, 4, kill=True).failures], "0")


def _measured(start: Start, at_once: int, *, kill: bool = False, policy: str = "session,overlap-load") -> Outcome:
    waves = conversations(CONVERSATIONS, TURNS)
    new_fleet = RepublishedFleet() if start in OF_EVENTS.values() else RoutedFleet(policy)
    with tempfile.TemporaryDirectory() as folder, new_fleet as fleet, start(fleet, Path(folder)) as router:
        asyncio.run(_send(router, conversations(2, 2, seed=1), at_once))  # connections, and imports of LiteLLM
        if kill:
            first = asyncio.run(_send(router, waves[: TURNS // 2], at_once))
            fleet.kill_kvsight()
            second = asyncio.run(_send(router, waves[TURNS // 2 :], at_once))
            return second._replace(failures=first.failures + second.failures)
        return asyncio.run(_send(router, waves, at_once))


async def _send(router: _Router, waves: list[list[Messages]], at_once: int) -> Outcome:
    headers, model = (HEADERS, MODEL) if isinstance(router, LiteLLMProxy) else (None, "m")
    return await send(router.url, waves, at_once, headers, model=model)


if __name__ == "__main__":
    main("routers", run)
