"""`kvsight demo`"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsight.cli.console import compile_kernels, err, out
from kvsight.cli.query import answer_table, ask
from kvsight.cli.simulate import load_requests, policy_progress

if TYPE_CHECKING:
    from api.settings import ApiSettings
    from simulation import Requests
    from simulation.live import LiveFleet
    from simulation.requests import Request

_NUM_REQUESTS = 1500
_WARM_REQUESTS = 300
_WORKERS = 4
_CAPACITY_TOKENS = 2**18
_PAGE_SIZE = 16
_SHOWN_RATE = 5.0


def demo(
    port: Annotated[int, typer.Option(help="Port of the API.", envvar="KVSIGHT_PORT")] = 8000,
    requests: Annotated[
        int, typer.Option(help="Requests of the compared workload.", min=_WARM_REQUESTS + 1)
    ] = _NUM_REQUESTS,
    should_exit: Annotated[bool, typer.Option("--exit", help="End after the first answer.")] = False,
) -> None:
    """See it work: a fleet of simulated engines, the index and the API, in this one process.

    Compares routing policies on a generated workload, then keeps a live fleet running and asks the API which worker
    holds a prompt. Needs no Kafka, Redis, Docker or GPU; heeds no KVSIGHT_* variable but the port's. Ctrl-C ends it.
    """
    from api.server import listen
    from api.settings import ApiSettings

    settings = ApiSettings.ignoring_environment(port=port)
    with listen(settings) as bound:
        compile_kernels()
        workload = list(load_requests(None, requests, seed=0))
        _compare_policies(workload)
        asyncio.run(_run_live(workload, settings, bound, should_exit))


def _compare_policies(workload: Requests) -> None:
    from simulation import POLICIES, SimulationSettings, reports_table, simulate

    settings = SimulationSettings(workers=_WORKERS, capacity_tokens=_CAPACITY_TOKENS, page_size=_PAGE_SIZE)
    with policy_progress() as progress:
        reports = simulate(workload, settings, list(POLICIES), progress)
    out.print(reports_table(reports))


async def _run_live(
    workload: Sequence[Request], settings: ApiSettings, bound: socket.socket, should_exit: bool
) -> None:
    """The same fleet behind the real API: publishers, a log in memory, the consumer, HTTP."""
    from api.app import create_app
    from api.server import running_server
    from indexer.assembly import create_consumer
    from indexer.settings import IndexerSettings
    from kv_events.memory_log import MemoryLog
    from simulation import SimulationSettings
    from simulation.live import MemoryTransport, publishing_fleet

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    fleet_settings = SimulationSettings(workers=_WORKERS, capacity_tokens=_CAPACITY_TOKENS, page_size=_PAGE_SIZE)
    log = MemoryLog()
    consumer = create_consumer(IndexerSettings.ignoring_environment(), log)
    async with (
        running_server(create_app(consumer, settings), settings, bound) as url,
        publishing_fleet(fleet_settings, "kv-aware", MemoryTransport(log), consumer) as fleet,
    ):
        for request in workload[:_WARM_REQUESTS]:
            fleet.trial.step(request)
            await asyncio.sleep(0)
        await fleet.settle()
        await _show_answer(url, fleet_settings.model_of("kv-aware"), workload[:_WARM_REQUESTS][-1])
        out.print(f"Open {url}/docs, {url}/workers or {url}/metrics while it runs.")
        if not should_exit:
            err.print("Ctrl-C ends the demo")
            await _go_on(fleet, workload[_WARM_REQUESTS:], stop)


async def _go_on(fleet: LiveFleet, workload: Sequence[Request], stop: asyncio.Event) -> None:
    """Serve at a pace that people can follow, over and over, until told to stop."""
    for request in cycle(workload):
        fleet.trial.step(request)
        try:
            await asyncio.wait_for(stop.wait(), 1 / _SHOWN_RATE)
        except TimeoutError:
            continue
        return


async def _show_answer(url: str, model: str, request: Request) -> None:
    body: dict[str, Any] = {"model_name": model, "token_ids": request.token_ids.tolist()}
    answer = await asyncio.to_thread(ask, url, body)
    out.print(f"POST {url}/query with a prompt of {len(request.token_ids)} tokens:")
    out.print(answer_table(answer))
