"""Servers that benchmarks use."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.servers.kafka_broker import KafkaBroker


@contextmanager
def broker() -> Iterator[str]:
    """Yield the bootstrap servers of the broker that KVSIGHT_KAFKA names, or of a new one."""
    running = os.environ.get("KVSIGHT_KAFKA")
    if running:
        yield running
        return
    with tempfile.TemporaryDirectory() as folder:
        started = KafkaBroker(Path(folder))
        started.restart()
        yield started.bootstrap
        started.kill()
