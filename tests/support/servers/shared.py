"""One Kafka broker, one Redis and one Mooncake master for a whole test run with any number of processes.

The process that controls the run starts a server at the first request for it and stops all servers at the end. The
test processes of pytest-xdist send requests through a Unix socket.
"""

import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from tests.support.servers.child_process import ChildProcess, RestartableServer
from tests.support.servers.kafka_broker import KafkaBroker
from tests.support.servers.mooncake_master import MooncakeMaster
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.secure_kafka import SecureKafka
from tests.support.waiting import wait_until

_ROOT = Path(__file__).resolve().parents[3]
_KEY = b"kvsight"
"""The socket is in a folder that other users cannot open."""


class SharedServers:
    """The servers themselves, in the process that controls the run. Start and stop are idempotent."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvsight-servers-", ignore_cleanup_errors=True)
        self._lock = threading.Lock()  # guards _addresses and _stops; held while a server starts
        self._addresses: dict[str, str] = {}
        self._stops: list[Callable[[], None]] = []
        self._socket = ""

    def address(self, name: str) -> str:
        """Return the address of a server: `kafka`, `redis`, `mooncake`. That of `secure-kafka` is a folder.

        Raises PartMissingError.
        """
        with self._lock:
            if name not in self._addresses:
                folder = Path(self._folder.name) / name
                folder.mkdir(exist_ok=True)  # an earlier start may have failed
                self._addresses[name], stop = _STARTS[name](folder)
                self._stops.append(stop)
            return self._addresses[name]

    def listen(self) -> str:
        """Start to answer other processes. Returns the path of the socket."""
        if not self._socket:
            _Manager.register("shared", callable=lambda: self)
            server = _Manager(authkey=_KEY).get_server()
            threading.Thread(target=server.serve_forever, name="shared-servers", daemon=True).start()
            self._socket = str(server.address)
        return self._socket

    def close(self) -> None:
        """Stop everything."""
        while self._stops:
            self._stops.pop()()
        self._folder.cleanup()


class _Manager(BaseManager):
    """Carries the calls of other processes of the same run."""


_Manager.register("shared")


def remote_servers(socket: str) -> Any:
    """Return the `SharedServers` of the controlling process, as seen from another test process."""
    manager = _Manager(socket, authkey=_KEY)
    manager.connect()
    return manager.shared()  # type: ignore[attr-defined]


def _started(server: RestartableServer, address: str) -> tuple[str, Callable[[], None]]:
    server.restart()
    return address, server.kill


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
    "kafka": lambda folder: _started(broker := KafkaBroker(folder), broker.bootstrap),
    "secure-kafka": lambda folder: _started(SecureKafka.create(folder), str(folder)),
    "redis": lambda folder: _started(server := RedisServer(folder), server.url),
    "mooncake": _start_mooncake,
}
