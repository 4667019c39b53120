"""A collector of traces that speaks OTLP over HTTP and keeps the spans that it receives."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from tests.support.waiting import wait_until


class ReceivedSpan(NamedTuple):
    """A span as a collector sees it."""

    service: str
    name: str
    trace: str
    """32 hexadecimal digits."""
    id: str
    """16 hexadecimal digits."""
    parent: str
    """The id of the parent, empty for a root."""
    attributes: dict[str, Any]
    start_ns: int
    end_ns: int


class OtlpReceiver:
    """`with OtlpReceiver() as receiver:`. `variables` make a process send its traces here, at once."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(handler) -> None:  # noqa: N805  (a name of http.server; `self` is the receiver)
                body = handler.rfile.read(int(handler.headers["content-length"]))
                self.spans += _decoded(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                handler.send_response(200)
                handler.send_header("content-type", "application/x-protobuf")
                handler.send_header("content-length", str(len(answer)))
                handler.end_headers()
                handler.wfile.write(answer)

            def log_message(handler, *_: object) -> None:  # noqa: N805
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of OpenTelemetry for the processes that send spans."""
        endpoint = f"http://127.0.0.1:{self._server.server_port}"
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}

    def wait_for(self, name: str, **wanted: Any) -> ReceivedSpan:
        """Return the first span of a name with these fields and attributes (`kvsight_seq` for `kvsight.seq`)."""
        wait_until(lambda: self._find(name, wanted), 60, f"a span {name} with {wanted}")
        found = self._find(name, wanted)
        assert found is not None
        return found

    def _find(self, name: str, wanted: dict[str, Any]) -> ReceivedSpan | None:
        for span in list(self.spans):
            fields = span._asdict() | {key.replace(".", "_"): value for key, value in span.attributes.items()}
            if span.name == name and all(fields.get(key) == value for key, value in wanted.items()):
                return span
        return None

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _decoded(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield _received(resource_spans, span)


def _received(resource_spans: ResourceSpans, span: Span) -> ReceivedSpan:
    return ReceivedSpan(
        _attributes(resource_spans.resource.attributes)["service.name"],
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        _attributes(span.attributes),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair) for pair in pairs}


def _value(pair: KeyValue) -> Any:
    kind = pair.value.WhichOneof("value")
    return None if kind is None else getattr(pair.value, kind)
