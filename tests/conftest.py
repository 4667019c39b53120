"""Real servers and data for the tests.

In CI a missing part is a failure; elsewhere a skip that says how to get it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.servers.child_process import PartMissingError
from tests.support.servers.kafka_broker import KafkaBroker
from tests.support.servers.mooncake_master import MooncakeMaster
from tests.support.servers.redis_server import RedisServer

_ROOT = Path(__file__).resolve().parent.parent
_TRACE = _ROOT.parent / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"
_MARK_OF_FIXTURE = {
    "kafka_bootstrap": "kafka",
    "kafka_broker": "kafka",
    "mooncake_master": "mooncake",
    "own_mooncake_master": "mooncake",
    "redis_url": "redis",
    "redis_server": "redis",
    "trace_path": "trace",
}

# a shared two-core machine stalls at times: the time limit of a whole test is the one that counts
settings.register_profile("kvsight", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvsight")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that takes a server's fixture bears its mark."""
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if fixture in _MARK_OF_FIXTURE:
                item.add_marker(_MARK_OF_FIXTURE[fixture])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked torch need it."""
    if item.get_closest_marker("torch") and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is missing: pip install -e '.[engine]'")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skip is a failure, save for the trace, which is not part of the project."""
    report = yield
    expected = hasattr(report, "wasxfail") or item.get_closest_marker("trace") is not None
    if report.skipped and not expected and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = f"nothing may be skipped in CI: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def kafka_bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`host:port` of a broker that all tests share: use topics of your own."""
    running = os.environ.get("KVSIGHT_KAFKA")
    if running:
        yield running
        return
    broker = _start_kafka(tmp_path_factory.mktemp("kafka"))
    yield broker.bootstrap
    broker.kill()


@pytest.fixture(scope="module")
def _own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    broker = _start_kafka(tmp_path_factory.mktemp("own-kafka"))
    yield broker
    broker.kill()


@pytest.fixture
def kafka_broker(_own_kafka: KafkaBroker) -> KafkaBroker:
    """A broker of this module's own, running, that a test may `kill()` and `restart()`."""
    if not _own_kafka.running:
        _own_kafka.restart()
    return _own_kafka


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`redis://...` of a server that all tests share: use key prefixes of your own."""
    running = os.environ.get("KVSIGHT_REDIS")
    if running:
        yield running
        return
    server = _start_redis(tmp_path_factory.mktemp("redis"))
    yield server.url
    server.kill()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of this test's own, running and empty, that it may `kill()` and `restart()`."""
    server = _start_redis(tmp_path)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def mooncake_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    """A master that all tests share: use identities of your own."""
    master = _start_mooncake(tmp_path_factory.mktemp("mooncake"))
    yield master
    master.close()


@pytest.fixture
def own_mooncake_master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    """A master of this test's own, running and empty, that it may `kill()` and `restart()`."""
    master = _start_mooncake(tmp_path)
    yield master
    master.close()


@pytest.fixture(scope="session")
def trace_path() -> Path:
    """The Mooncake conversation trace, gzip of JSON lines."""
    path = Path(os.environ.get("KVSIGHT_TRACE") or _TRACE)
    if not path.is_file():
        pytest.skip(f"no trace at {path}: name the Mooncake conversation trace in KVSIGHT_TRACE")
    return path


def _start_kafka(folder: Path) -> KafkaBroker:
    try:
        broker = KafkaBroker(folder)
    except PartMissingError as error:
        pytest.skip(str(error))
    broker.restart()
    return broker


def _start_redis(folder: Path) -> RedisServer:
    try:
        server = RedisServer(folder)
    except PartMissingError as error:
        pytest.skip(str(error))
    server.restart()
    return server


def _start_mooncake(folder: Path) -> MooncakeMaster:
    try:
        master = MooncakeMaster(folder)
    except PartMissingError as error:
        pytest.skip(str(error))
    master.restart()
    master.lend()
    return master
