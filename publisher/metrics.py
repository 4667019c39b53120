"""Prometheus metrics of publishers. Needs `prometheus_client`, which vLLM, SGLang and the extra `serve` bring."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from socketserver import StreamRequestHandler
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kv_events.streams import StreamId
from publisher.publisher import EventPublisher, PublisherStats

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_PATIENCE_S = 2.0
LABELS = ("worker", "model", "tenant", "dp_rank")


class PublisherMetrics(Collector):
    """Collects `kvsight_publisher_*`, one series for each publisher. Thread-safe.

    A program that has a registry of its own registers it there:
    `REGISTRY.register(PublisherMetrics(lambda: [publisher]))`.
    """

    def __init__(self, publishers: Callable[[], Iterable[EventPublisher]]) -> None:
        """publishers: returns the publishers that run now. Called at each scrape."""
        self._publishers = publishers

    def collect(self) -> Iterator[Metric]:
        yield from publisher_families((each.stream, each.stats()) for each in self._publishers())


_GAUGES: dict[str, tuple[str, Callable[[PublisherStats], float]]] = {
    "held_pages": ("Distinct pages that the worker holds", lambda stats: stats.pages["held"]),
    "queued_pages": ("Page changes that the sink has not confirmed yet", lambda stats: stats.queued + stats.in_flight),
    "sink_available": ("1: the sink takes records", lambda stats: stats.is_sink_available),
}
_COUNTERS: dict[str, tuple[str, Callable[[PublisherStats], float]]] = {
    "delivered_pages": ("Page changes that the sink has confirmed", lambda stats: stats.delivered),
    "dropped_pages": ("Page changes dropped because the queue was full", lambda stats: stats.dropped),
    "resyncs": ("Resyncs sent, including the first one", lambda stats: stats.resyncs),
    "resync_pages": ("Pages sent in resyncs, once for each tier", lambda stats: stats.resync_pages),
    "rejected_records": ("Records that the sink refused", lambda stats: stats.rejected_records),
    "skipped_requests": ("Messages of the control topic that are no requests", lambda stats: stats.skipped_requests),
    "left_out_pages": ("Stores of pages for which the ledger had no room", lambda stats: stats.pages["ledger_full"]),
}


def stream_labels(stream: StreamId) -> list[str]:
    return [stream.worker, stream.model, stream.tenant, str(stream.dp_rank)]


def publisher_families(publishers: Iterable[tuple[StreamId, PublisherStats]]) -> Iterator[Metric]:
    """Yield the metric families of some publishers, given by stream and statistics."""
    rows = [(stream_labels(stream), stats) for stream, stats in publishers]
    for new, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, (text, value) in table.items():
            family: Any = new(f"kvsight_publisher_{name}", text, labels=LABELS)
            for labels, stats in rows:
                family.add_metric(labels, float(value(stats)))
            yield family
    text = "Events dropped because they are invalid"
    events = CounterMetricFamily("kvsight_publisher_rejected_events", text, labels=(*LABELS, "reason"))
    for labels, stats in rows:
        for reason, number in stats.rejected_events.items():
            events.add_metric([*labels, reason], number)
    yield events


def serve_metrics(
    port: int, collector: Collector, why_not_ready: Callable[[], str] | None = None
) -> Callable[[], None]:
    """Serve the metrics of a collector from a daemon thread, on all addresses. Returns what ends it. Raises OSError.

    why_not_ready: see `with_probes`. None: no probes, and no event loop is needed.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, registry=registry)
    except OSError as error:
        raise OSError(error.errno, f"metrics port {port}: {error.strerror}") from None
    handler: Any = server.RequestHandlerClass
    server.RequestHandlerClass = type("Request", (_Impatient, handler), {})
    if why_not_ready is not None:
        server.set_app(with_probes(make_wsgi_app(registry), why_not_ready))

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end


def with_probes(metrics: WSGIApplication, why_not_ready: Callable[[], str]) -> WSGIApplication:
    """Add `/health` and `/ready` to an application. Both answer 200, or 503 with the reason.

    `/health` fails if the running event loop does not answer: only a restart helps then. `/ready` fails then, too, and
    while the process cannot do its work. why_not_ready: the reason, or "". Called in the event loop.
    """
    loop = asyncio.get_running_loop()
    probes = {"/health": lambda: "", "/ready": why_not_ready}

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        probe = probes.get(environ["PATH_INFO"])
        if probe is None:
            return metrics(environ, start_response)
        reason = _ask(loop, probe)
        status = "503 Service Unavailable" if reason else "200 OK"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{reason or 'ok'}\n".encode()]

    return answer


def _ask(loop: asyncio.AbstractEventLoop, probe: Callable[[], str]) -> str:
    answered: Future[str] = Future()
    loop.call_soon_threadsafe(lambda: answered.set_result(probe()))
    try:
        return answered.result(_PATIENCE_S)
    except TimeoutError:
        return f"the event loop has not answered for {_PATIENCE_S:.0f} s"


class _Impatient(StreamRequestHandler):
    """Closes connections that send nothing: each of them has a thread."""

    timeout = 10.0

    def handle(self) -> None:
        with suppress(TimeoutError):
            super().handle()
