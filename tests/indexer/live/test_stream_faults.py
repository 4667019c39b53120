"""Streams that were forged: views find back to the engine's pages.

A real broker, a real `kvsight serve` and real publisher processes.
"""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from kv_events.records import LogRecord
from tests.support.engines.publishing_process import BLOCK_SIZE, MODEL, PublishingProcess
from tests.support.log.records import Stream, stored
from tests.support.servers.service_process import ServiceProcess, own_topics, write_events
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timing("views must be repaired within seconds")

FORGED = [(2**62, 5, BLOCK_SIZE), (2**62, None, 2 * BLOCK_SIZE), (None, 5, BLOCK_SIZE), (None, 2**63, BLOCK_SIZE)]
"""Epoch of a forged record, by how much its number is ahead, and its block size. None: the engine's epoch, number 0."""


def forged(engine: PublishingProcess, epoch: int, seq: int, block_size: int = BLOCK_SIZE) -> LogRecord:
    """A record in an engine's name that stores a page."""
    stream = Stream(engine.worker, model=MODEL, block_size=block_size)
    stream.epoch, stream.seq = epoch, seq
    return stream.batch(stored((0, [99])))


def test_forged_records_of_a_future_epoch_or_far_ahead_hide_nothing_for_long(
    kafka_bootstrap: str, tmp_path: Path
) -> None:
    """No repair waits for the worker's end."""
    topics = own_topics(kafka_bootstrap, KVSIGHT_TOPIC_PARTITIONS=1)
    with ServiceProcess(tmp_path, **topics, KVSIGHT_WORKER_TTL_S=60) as service, ExitStack() as stack:
        service.wait_until_ready()
        engines = [stack.enter_context(PublishingProcess(f"w{number}", **topics)) for number in range(len(FORGED))]
        for engine, (epoch, far, block_size) in zip(engines, FORGED, strict=True):
            engine.store(1, 2)
            wait_until(partial(service.is_right, engine), 15, "the view before")
            seq = 0 if far is None else min(service.listener(engine.worker)["seq"] + far, 2**63 - 1)
            write_events(topics, forged(engine, epoch or engine.epoch, seq, block_size))
            if epoch is not None:
                wait_until(lambda e=engine, n=epoch: service.listener(e.worker)["epoch"] == n, what="the forged epoch")  # type: ignore[misc]
            engine.store(3)
        for engine in engines:
            wait_until(partial(service.is_right, engine), 15, f"a right view; it is {service.listener(engine.worker)}")
