"""Real servers and data for the tests.

In CI a missing part is a failure; elsewhere a skip that says how to get it.
"""

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvicorn.server
from hypothesis import settings

from indexer.sources import memory
from kv_events.kernels.load import compile_missing
from tests.support.effort import SOAK, register_profiles
from tests.support.servers.child_process import PartMissingError, RestartableServer
from tests.support.servers.kafka_broker import KafkaBroker, LinkedKafka
from tests.support.servers.mooncake_master import MooncakeAccess, MooncakeMaster
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.secure_kafka import SecureKafka
from tests.support.servers.shared import SharedServers, remote_servers

_ROOT = Path(__file__).resolve().parent.parent
_TRACE = _ROOT.parent / "shared" / "traces" / "mooncake_conversation_trace.jsonl.gz"
_MARK_OF_FIXTURE = {
    "kafka_bootstrap": "kafka",
    "kafka_broker": "kafka",
    "linked_kafka": "kafka",
    "secure_kafka": "kafka",
    "mooncake_master": "mooncake",
    "own_mooncake_master": "mooncake",
    "redis_url": "redis",
    "redis_server": "redis",
    "trace_path": "trace",
}
_SERVERS = pytest.StashKey[Any]()
_CRASHES = pytest.StashKey[list[str]]()
_RECORD = _ROOT / "build" / "tests"
_CRASHED_STATUS = 70
_T = TypeVar("_T")
_Server = TypeVar("_Server", bound=RestartableServer)

register_profiles()


class _HurriedAsyncio:
    """`asyncio` for uvicorn, with a tenth of the pauses after which it looks whether it should end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


# a thousand tests wait for the end of a server or of a consumer in their process
uvicorn.server.asyncio = _HurriedAsyncio()  # type: ignore[assignment, attr-defined]
memory._WAIT_S = 0.02


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that chooses between the two halves of the tests."""
    description = "run the soaks and the long versions of the property tests, and nothing else"
    parser.addoption("--soak", action="store_true", help=description)


def pytest_configure(config: pytest.Config) -> None:
    """The process that controls the run owns the shared servers; workers of pytest-xdist ask it."""
    if config.getoption("soak"):
        settings.load_profile(SOAK)
    # Mooncake's client writes a line for each step, the last ones after the results
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    socket = getattr(config, "workerinput", {}).get("shared_servers")
    if socket is None:
        compile_missing()
    config.stash[_SERVERS] = remote_servers(socket) if socket else SharedServers()
    config.stash[_CRASHES] = []


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a new worker of pytest-xdist where the shared servers answer."""
    servers = node.config.stash[_SERVERS]
    assert isinstance(servers, SharedServers)
    node.workerinput["shared_servers"] = servers.listen()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Notes a process of tests that crashed: pytest-xdist reports its test as one that failed, and goes on."""
    if error:
        node.config.stash[_CRASHES].append(f"{node.gateway.id}: {error}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leaves files for `.ci/run`: what failed, whether a process crashed, and that the run came to its end.

    `late` names tests that failed and are marked as depending on the machine's speed, `wrong` all others that failed.
    """
    if hasattr(session.config, "workerinput"):
        return
    _RECORD.mkdir(parents=True, exist_ok=True)
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    stats = terminal.stats if terminal is not None else {}
    reports = [report for kind in ("failed", "error") for report in stats.get(kind, ())]
    failed = {report.nodeid: getattr(report, "keywords", {}) for report in reports}  # none if modules fail to load
    for name, is_timing in (("late", True), ("wrong", False)):
        lines = [f"{test}\n" for test, marks in failed.items() if ("timing" in marks) == is_timing]
        (_RECORD / name).write_text("".join(lines))
    if crashes := session.config.stash[_CRASHES]:
        session.exitstatus = _CRASHED_STATUS
        (_RECORD / "crashed").write_text("\n".join(crashes) + "\n")
    (_RECORD / "complete").touch()


def pytest_unconfigure(config: pytest.Config) -> None:
    """The shared servers end with the run."""
    servers = config.stash.get(_SERVERS, None)
    if isinstance(servers, SharedServers):
        servers.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests that take a server's fixture and tests of random cases; drops those of the other half."""
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if fixture in _MARK_OF_FIXTURE:
                item.add_marker(_MARK_OF_FIXTURE[fixture])
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("random_cases")
    is_soak = config.getoption("soak")
    halves: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        halves[_belongs(item, is_soak=is_soak)].append(item)
    config.hook.pytest_deselected(items=halves[False])
    items[:] = halves[True]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector looks at the collected tests neither meanwhile, which took a third of the time, nor later:
    each time, it took a third of a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _belongs(item: pytest.Item, *, is_soak: bool) -> bool:
    """Whether a test is part of a soak, or of the usual run. Tests of random cases are part of both."""
    if is_soak:
        return any(item.get_closest_marker(name) for name in ("soak", "random_cases"))
    return item.get_closest_marker("soak") is None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skip is a failure, save for the trace, which is not part of the project."""
    report = yield
    expected = hasattr(report, "wasxfail") or item.get_closest_marker("trace") is not None
    if report.skipped and not expected and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = f"nothing may be skipped in CI: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def levels_of_loggers() -> Iterator[None]:
    """Commands that a test runs in its process set levels, which must not outlive it."""
    loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    levels = [(each, each.level) for each in (logging.root, *loggers)]
    yield
    for logger, level in levels:
        logger.setLevel(level)


@pytest.fixture(scope="session")
def kafka_bootstrap(request: pytest.FixtureRequest) -> str:
    """`host:port` of a broker that all tests share: use topics of your own."""
    return os.environ.get("KVSIGHT_KAFKA") or _shared(request, "kafka")


@pytest.fixture(scope="session")
def secure_kafka(request: pytest.FixtureRequest) -> SecureKafka:
    """A broker with TLS and logins that all tests share: use topics of your own."""
    return SecureKafka(Path(_shared(request, "secure-kafka")))


@pytest.fixture(scope="session")
def _own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    yield from _running(lambda: KafkaBroker(tmp_path_factory.mktemp("own-kafka")))


@pytest.fixture
def kafka_broker(_own_kafka: KafkaBroker) -> KafkaBroker:
    """A running broker that no other process of tests uses, so a test may `kill()` and `restart()` it."""
    if not _own_kafka.running:
        _own_kafka.restart()
    return _own_kafka


@pytest.fixture(scope="module")
def linked_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkedKafka]:
    """A running broker of this module's own with two links, ENGINES and SERVICES, which a test may cut and heal."""
    yield from _running(lambda: LinkedKafka(tmp_path_factory.mktemp("linked-kafka"), ["ENGINES", "SERVICES"]))


@pytest.fixture(scope="session")
def redis_url(request: pytest.FixtureRequest) -> str:
    """`redis://...` of a server that all tests share: use key prefixes of your own."""
    return os.environ.get("KVSIGHT_REDIS") or _shared(request, "redis")


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running, empty server of this test's own, which it may `kill()` and `restart()`."""
    yield from _running(lambda: RedisServer(tmp_path))


@pytest.fixture(scope="session")
def mooncake_master(request: pytest.FixtureRequest) -> Iterator[MooncakeAccess]:
    """A master that all tests share: use identities of your own."""
    master = MooncakeAccess(_shared(request, "mooncake"))
    yield master
    master.close()


@pytest.fixture
def own_mooncake_master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    """A running, empty master of this test's own, which it may `kill()` and `restart()`."""
    for master in _running(lambda: MooncakeMaster(tmp_path)):
        master.lend()
        yield master


@pytest.fixture(scope="session")
def trace_path() -> Path:
    """The Mooncake conversation trace, gzip of JSON lines."""
    path = Path(os.environ.get("MOONCAKE_TRACE") or _TRACE)
    if not path.is_file():
        pytest.skip(f"no trace at {path}: name the Mooncake conversation trace in MOONCAKE_TRACE")
    return path


def _shared(request: pytest.FixtureRequest, name: str) -> str:
    address: str = _present(lambda: request.config.stash[_SERVERS].address(name))
    return address


def _running(make: Callable[[], _Server]) -> Iterator[_Server]:
    """Start a server of a test's or a module's own, and end it."""
    server = _present(make)
    server.restart()
    yield server
    server.close()


def _present(make: Callable[[], _T]) -> _T:
    """What `make` returns; skips the test when a part is missing on this machine."""
    try:
        return make()
    except PartMissingError as error:
        pytest.skip(str(error))
