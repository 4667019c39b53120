"""One Kafka broker, one Redis and one Mooncake master for a whole test run with any number of processes.

The process that controls the run starts a server at the first request for it and stops all servers at the end. The
test processes of pytest-xdist send requests through a Unix socket.
"""

import contextlib
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Protocol

from tests.support.servers.child_process import ChildProcess, PartMissingError
from tests.support.servers.kafka_broker import KafkaBroker
from tests.support.servers.mooncake_master import MooncakeMaster
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.secure_kafka import SecureKafka
from tests.support.waiting import wait_until

_ROOT = Path(__file__).resolve().parents[3]


class Servers(Protocol):
    """The interface of the shared servers in a test process."""

    def address(self, name: str) -> str:
        """Return the address of a server: `kafka`, `redis`, `mooncake`. That of `secure-kafka` is a folder.

        Raises PartMissingError.
        """


class SharedServers:
    """The servers themselves, in the process that controls the run. Start and stop are idempotent."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvsight-servers-", ignore_cleanup_errors=True)
        self._lock = threading.Lock()  # guards _addresses and _stops; held while a server starts
        self._addresses: dict[str, str] = {}
        self._stops: list[Callable[[], None]] = []
        self._listener: Listener | None = None

    def address(self, name: str) -> str:
        with self._lock:
            if name not in self._addresses:
                folder = Path(self._folder.name) / name
                folder.mkdir()
                self._addresses[name], stop = _STARTS[name](folder)
                self._stops.append(stop)
            return self._addresses[name]

    def listen(self) -> str:
        """Start to answer other processes. Returns the path of the socket."""
        if self._listener is None:
            self._listener = Listener(str(Path(self._folder.name) / "socket"), backlog=64)
            threading.Thread(target=self._accept, args=(self._listener,), name="shared-servers", daemon=True).start()
        return str(self._listener.address)

    def close(self) -> None:
        """Stop everything."""
        if self._listener is not None:
            self._listener.close()
        while self._stops:
            self._stops.pop()()
        self._folder.cleanup()

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with connection, contextlib.suppress(EOFError, OSError):  # the test process was interrupted
            name = connection.recv_bytes(64).decode()
            try:
                answer = {"address": self.address(name)}
            except PartMissingError as error:
                answer = {"missing": error.part, "remedy": error.remedy}
            except Exception as error:  # noqa: BLE001  (the test process raises it)
                answer = {"error": f"{name} did not start: {error!r}"}
            connection.send_bytes(json.dumps(answer).encode())


class RemoteServers:
    """The shared servers, as seen from another test process."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    def address(self, name: str) -> str:
        with Client(self._socket) as connection:
            connection.send_bytes(name.encode())
            answer: dict[str, str] = json.loads(connection.recv_bytes(2**16))
        if "missing" in answer:
            raise PartMissingError(answer["missing"], answer["remedy"])
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["address"]


def _start_kafka(folder: Path) -> tuple[str, Callable[[], None]]:
    broker = KafkaBroker(folder)
    broker.restart()
    return broker.bootstrap, broker.kill


def _start_secure_kafka(folder: Path) -> tuple[str, Callable[[], None]]:
    broker = SecureKafka.create(folder)
    broker.restart()
    return str(folder), broker.kill


def _start_redis(folder: Path) -> tuple[str, Callable[[], None]]:
    server = RedisServer(folder)
    server.restart()
    return server.url, server.kill


def _start_mooncake(folder: Path) -> tuple[str, Callable[[], None]]:
    master = MooncakeMaster(folder)
    master.restart()
    # A separate process, because its memory must remain until the last test process has ended.
    ready = folder / "lent"
    lender: list[str | Path] = [sys.executable, "-m", "tests.support.servers.mooncake_master", master.address, ready]
    process = ChildProcess(lender, folder / "lender.log", env={"PYTHONPATH": str(_ROOT)})
    wait_until(ready.exists, deadline_s=60.0, what="memory lent to the Mooncake master")

    def stop() -> None:
        process.kill()
        master.close()

    return master.address, stop


_STARTS: dict[str, Callable[[Path], tuple[str, Callable[[], None]]]] = {
    "kafka": _start_kafka,
    "secure-kafka": _start_secure_kafka,
    "redis": _start_redis,
    "mooncake": _start_mooncake,
}
