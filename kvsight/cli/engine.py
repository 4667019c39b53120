"""`kvsight demo --engine`: one simulated worker that publishes to Kafka."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvsight.cli.shared.console import UsageError, err
from kvsight.cli.shared.flags import BROKER, METRICS_PORT, Flag
from kvsight.cli.shared.process import import_without_kernels, stop_signals
from kvsight.extras import require_serve

if TYPE_CHECKING:
    from publisher import PublisherSettings


DEMO_MODEL = "demo-model"
FLAGS = {
    "kafka": BROKER,
    "model": Flag(str, "Model of the worker and of the prompt.", default=DEMO_MODEL),
    "block_size": Flag(int, "Tokens per page.", default=64),
    **METRICS_PORT,
}
"""Of `PublisherSettings`."""


def run_engine(worker: str, capacity_tokens: int, rate: float, seed: int, flags: dict[str, Any]) -> None:
    """Run one simulated worker that publishes to Kafka, until SIGINT or SIGTERM. Raises KvsightError."""
    if flags["kafka"] is None:
        raise UsageError("--engine needs --kafka HOST:PORT")
    if flags["metrics_port"] is not None:
        require_serve("kvsight demo --metrics-port")
    load_kernels = import_without_kernels("simulation", "publisher.ledger")
    from publisher import PublisherSettings

    settings = PublisherSettings.from_flags(worker=worker, **flags)
    load_kernels()
    asyncio.run(_serve(settings, capacity_tokens, rate, seed))


async def _serve(settings: PublisherSettings, capacity: int, rate: float, seed: int) -> None:
    from publisher import EventPublisher
    from publisher.sinks.kafka import KafkaSink
    from simulation import SimulatedWorker, SimulationSettings, create_cache
    from simulation.workload import engine_requests

    stop = stop_signals()
    publisher = EventPublisher(settings, KafkaSink(settings))
    cache = create_cache(SimulationSettings(capacity_tokens=capacity, page_size=settings.block_size))
    worker = SimulatedWorker(publisher, cache)
    await publisher.start()
    if settings.metrics_port is not None:
        from publisher.metrics import PublisherMetrics, serve_metrics

        metrics = PublisherMetrics(lambda: [publisher])
        serve_metrics(settings.metrics_port, metrics, lambda: publisher.stats().obstacle)
    err.print(f"{settings.stream.key} serves {rate:g} requests per second; Ctrl-C stops")
    for request in engine_requests(seed):
        worker.serve(request)
        try:
            await asyncio.wait_for(stop.wait(), 1 / rate)
        except TimeoutError:
            continue
        report = await publisher.aclose()
        err.print(f"stopped; {report.unflushed_pages} pages were not delivered")
        return
