"""The spans of a process, by OpenTelemetry. Needs the extra `otel`; see `kv_events.runtime.tracing.open_spans`."""

import atexit
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Literal

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import (
    NoOpTracer,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    get_tracer_provider,
    set_span_in_context,
)
from opentelemetry.trace import Span as Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kv_events.errors import InvalidValueError
from kv_events.records import Headers

logger = logging.getLogger(__name__)

Kind = Literal["producer", "consumer", "server"]

_EXPORTERS = "opentelemetry_traces_exporter"
_PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_END_S = 2.0
_ROOT = Context()


class Spans:
    """Creates spans, and reads and writes their W3C context. Thread-safe."""

    def __init__(self) -> None:
        """Raises InvalidValueError for an exporter that is not installed."""
        self._exporters = _exporters()
        self._propagator = TraceContextTextMapPropagator()
        self._opening = threading.Lock()
        self._tracer: Tracer | None = None  # until the first span: a process may be forked before
        self._ending, self._ended = threading.Event(), threading.Event()

    def start(self, name: str, kind: Kind, attributes: Mapping[str, str | int], headers: Headers = ()) -> Span:
        """Start a span, as the child of the one whose context is in `headers`. Headers that are no context are ignored.

        The sampler of the process decides whether the span records anything.
        """
        tracer = self._tracer or self._open()
        return tracer.start_span(name, self._parent(headers), SpanKind[kind.upper()], attributes)

    @contextmanager
    def span(self, name: str, kind: Kind, attributes: Mapping[str, str | int], headers: Headers = ()) -> Iterator[Span]:
        """Run a block in a span. See `start`."""
        span = self.start(name, kind, attributes, headers)
        try:
            yield span
        except Exception as error:
            self.fail(span, repr(error))
            raise
        finally:
            span.end()

    def headers(self, span: Span) -> Headers:
        """Return the headers that carry the context of a span, or () if the span is not sampled."""
        if not span.get_span_context().trace_flags.sampled:
            return ()
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span, _ROOT))
        return tuple((name, value.encode()) for name, value in carrier.items())

    def is_context(self, headers: Headers) -> bool:
        """Return whether headers carry the context of a span."""
        return get_current_span(self._parent(headers)).get_span_context().is_valid

    def fail(self, span: Span, description: str) -> None:
        """Mark a span as failed."""
        span.set_status(Status(StatusCode.ERROR, description))

    def end(self) -> None:
        """Send the spans that wait, for at most two seconds. Spans that end later are dropped."""
        if not self._ending.is_set():
            self._ending.set()
            if self._tracer is not None:
                self._ended.wait(_END_S)

    def _parent(self, headers: Headers) -> Context:
        if not headers:
            return _ROOT
        carrier = {name: value.decode("ascii", "replace") for name, value in headers}
        return self._propagator.extract(carrier, _ROOT)

    def _open(self) -> Tracer:
        """Use the tracer provider of the program, if it has set one, or else one that the variables `OTEL_*` describe.

        The latter is not made that of the program: kvsight may be a guest in it.
        """
        with self._opening:
            if self._tracer is None:
                provider = get_tracer_provider()
                if isinstance(provider, TracerProvider):
                    self._ended.set()  # the program ends it
                    self._tracer = provider.get_tracer("kvsight")
                else:
                    self._tracer = self._own_tracer()
            return self._tracer

    def _own_tracer(self) -> Tracer:
        try:
            return self._create_provider().get_tracer("kvsight")
        except Exception as error:  # noqa: BLE001  (exporters raise many kinds for wrong values of `OTEL_*`)
            self._ended.set()
            logger.warning("no traces are sent: %s (see the variables OTEL_*)", error)
            return NoOpTracer()

    def _create_provider(self) -> TracerProvider:
        """Create a provider that ends with the process.

        By itself, it would hold up the exit for up to 30 s while the collector is unavailable. The thread that ends it
        exists from the beginning, because no new one can be started at exit.
        """
        provider = TracerProvider(shutdown_on_exit=False)
        for exporter in self._exporters:
            provider.add_span_processor(BatchSpanProcessor(exporter()))

        def end() -> None:
            self._ending.wait()
            provider.shutdown()
            self._ended.set()

        threading.Thread(target=end, name="traces-end", daemon=True).start()
        atexit.register(self.end)
        return provider


def _exporters() -> list[type[SpanExporter]]:
    """Return the exporters that `OTEL_TRACES_EXPORTER` names, `otlp` by default."""
    named = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    return [_exporter(name.strip()) for name in named.split(",")]


def _exporter(name: str) -> type[SpanExporter]:
    variable, value = "OTEL_TRACES_EXPORTER", name
    if name == "otlp":
        variable = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
        value = os.environ.get(variable) or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
        name = _PROTOCOLS.get(value, value)
    found = {point.name: point for point in entry_points(group=_EXPORTERS)}
    if name not in found:
        raise InvalidValueError(variable, value, f"an installed exporter: {', '.join(sorted(found))}")
    exporter: type[SpanExporter] = found[name].load()
    return exporter
