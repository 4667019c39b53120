"""Streams that were forged, doubled or led astray by clocks: views find back to the engine's pages.

A real broker, a real `kvsight serve` and real publisher processes.
"""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kv_events.records import LogRecord
from tests.support.engines.publishing_process import BLOCK_SIZE, MODEL, PublishingProcess
from tests.support.log.records import Stream, stored
from tests.support.servers.service_process import ServiceProcess, own_topics, write_events
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timing("views must be repaired within seconds")

TTL_S = 60  # no repair waits for it


@pytest.fixture(scope="module")
def topics(kafka_bootstrap: str) -> dict[str, Any]:
    """Settings that name the broker, and topics of these tests alone."""
    return own_topics(kafka_bootstrap, KVSIGHT_TOPIC_PARTITIONS=1)


@pytest.fixture(scope="module")
def service(topics: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service that all tests share: use a worker of your own."""
    folder = tmp_path_factory.mktemp("service")
    with ServiceProcess(folder, **topics, KVSIGHT_WORKER_TTL_S=TTL_S, KVSIGHT_SNAPSHOT_DIR=folder) as service:
        service.wait_until_ready()
        yield service


@pytest.fixture
def worker() -> str:
    return uuid.uuid4().hex


def assert_view_becomes_right(service: ServiceProcess, engine: PublishingProcess, deadline_s: float = 15.0) -> None:
    def is_right() -> bool:
        listener = service.listener(engine.worker)
        state = (listener.get("state"), listener.get("epoch"))
        return state == ("live", engine.epoch) and service.pages(engine.worker) == engine.held

    wait_until(is_right, deadline_s, what=f"a right view; it is {service.listener(engine.worker)}")


def forged(engine: PublishingProcess, epoch: int, seq: int, block_size: int = BLOCK_SIZE) -> LogRecord:
    """A record in an engine's name that stores a page."""
    stream = Stream(engine.worker, model=MODEL, block_size=block_size)
    stream.epoch, stream.seq = epoch, seq
    return stream.batch(stored((0, [99])))


def test_of_two_publishers_of_one_name_the_older_is_believed_once_the_newer_has_died(
    service: ServiceProcess, topics: dict[str, Any], worker: str
) -> None:
    with PublishingProcess(worker, **topics) as older, PublishingProcess(worker, **topics) as newer:
        older.store(1, 2, 3)
        newer.store(4)
        assert_view_becomes_right(service, newer)
        newer.kill()
        older.store(5)
        assert_view_becomes_right(service, older)


def test_an_engine_whose_clock_had_run_ahead_is_believed_after_its_restart(
    service: ServiceProcess, topics: dict[str, Any], worker: str
) -> None:
    with PublishingProcess(worker, clock_ahead_s=600, **topics) as ahead:
        ahead.store(1, 2)
        assert_view_becomes_right(service, ahead)
    with PublishingProcess(worker, **topics) as engine:
        engine.store(3)
        service.kill()
        service.start()
        assert_view_becomes_right(service, engine)


FORGED = [(2**62, 5, BLOCK_SIZE), (2**62, None, 2 * BLOCK_SIZE), (None, 5, BLOCK_SIZE), (None, 2**63, BLOCK_SIZE)]
"""Epoch of a forged record, by how much its number is ahead, and its block size. None: the engine's epoch, number 0."""


def test_forged_records_of_a_future_epoch_or_far_ahead_hide_nothing_for_long(
    service: ServiceProcess, topics: dict[str, Any]
) -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(PublishingProcess(uuid.uuid4().hex, **topics)) for _ in FORGED]
        for engine, (epoch, far, block_size) in zip(engines, FORGED, strict=True):
            engine.store(1, 2)
            assert_view_becomes_right(service, engine)
            seq = 0 if far is None else min(service.listener(engine.worker)["seq"] + far, 2**63 - 1)
            write_events(topics, forged(engine, epoch or engine.epoch, seq, block_size))
            if epoch is not None:
                wait_until(lambda e=engine, n=epoch: service.listener(e.worker)["epoch"] == n, what="the forged epoch")  # type: ignore[misc]
            engine.store(3)
        for engine in engines:
            assert_view_becomes_right(service, engine)


def test_a_clock_two_hours_ahead_and_back_again_silences_no_worker(
    service: ServiceProcess, topics: dict[str, Any], worker: str
) -> None:
    with PublishingProcess(worker, **topics) as engine:
        engine.store(1)
        assert_view_becomes_right(service, engine)
        engine.set_clock(7200)
        engine.store(2)
        assert_view_becomes_right(service, engine)
        engine.set_clock(0)
        engine.store(3)
        assert_view_becomes_right(service, engine)
