"""Traces: whether the process sends any, and the headers that carry their context through Kafka.

This module imports nothing of OpenTelemetry. `kv_events.runtime.spans` does. It is loaded only if the process
sends traces.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from kv_events.records import Headers

if TYPE_CHECKING:
    from kv_events.runtime.spans import Spans

logger = logging.getLogger(__name__)

_NAMES = ("traceparent", "tracestate")
_MAX_BYTES = 512
"""What the W3C recommends to carry of `tracestate`, and far more than a `traceparent` has."""
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@cache
def open_spans() -> Spans | None:
    """Return what creates the spans of this process, or None if it sends no traces. Decided once, at the first call.

    A process sends traces if `OTEL_TRACES_EXPORTER` or an endpoint is set. If it cannot, a warning is logged: these
    variables may be meant for the engine that the publisher runs in.
    """
    if not _are_requested():
        return None
    try:
        from kv_events.runtime.spans import Spans

        return Spans()
    except ImportError as error:
        logger.warning("no traces are sent: %s: pip install 'kvsight[otel]'", error)
    except ValueError as error:
        logger.warning("no traces are sent: %s", error)
    return None


def trace_headers(headers: Iterable[tuple[str, bytes | None]]) -> Headers:
    """Return the headers of a trace context. All others, and too long ones, are left out. Of equal names, the last."""
    found = {name: value for name, value in headers if name in _NAMES and value and len(value) <= _MAX_BYTES}
    return tuple(found.items())


def _are_requested() -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip()
    return exporter != "none" if exporter else any(os.environ.get(name, "").strip() for name in _ENDPOINTS)
