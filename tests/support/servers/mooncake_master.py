"""A real `mooncake_master`, the memory that it allocates from, and its clients."""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_cache.settings import MooncakeSettings
from tests.support.servers.child_process import PartMissingError, RestartableServer, free_port

if TYPE_CHECKING:
    from engine_cache.storage.mooncake_client import MooncakeClient

LENT_BYTES = 2**26


class SharedClient:
    """One storage's view of a client that several storages share. Closing it unregisters that storage's buffers."""

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self._registered: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def register(self, pool: str, address: int, num_bytes: int) -> None:
        self._client.register(pool, address, num_bytes)
        self._registered.append(address)

    def unregister(self, address: int) -> None:
        self._client.unregister(address)
        self._registered.remove(address)

    def close(self) -> bool:
        while self._registered:
            self._client.unregister(self._registered.pop())
        return True


class MooncakeAccess:
    """Access to a running master."""

    def __init__(self, address: str) -> None:
        """address: `host:port`."""
        self.address = address
        self._client: MooncakeClient | None = None

    def settings(self, **values: object) -> MooncakeSettings:
        """Return settings of a client. By default, it lends no memory."""
        ours = {
            "mooncake_master": self.address,
            "mooncake_segment_bytes": 0,
            "mooncake_buffer_bytes": 2**20,
            "mooncake_watch_interval_s": 0.1,
        }
        return MooncakeSettings.ignoring_environment(**ours | values)

    def shared_client(self) -> SharedClient:
        """Return a client for one storage. Closing it is instant, whereas a separate client takes a second to close."""
        if self._client is None:
            self._client = self.connect()
        return SharedClient(self._client)

    def close(self) -> None:
        """Disconnect."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def connect(self, **values: object) -> MooncakeClient:
        """Return a client with these settings. The caller closes it."""
        from engine_cache.storage.mooncake_client import MooncakeClient

        return MooncakeClient(self.settings(**values))


class MooncakeMaster(MooncakeAccess, RestartableServer):
    """A master that loses all its data when it is restarted."""

    def __init__(self, folder: Path) -> None:
        """`restart()` starts the master. Raises PartMissingError."""
        if importlib.util.find_spec("mooncake") is None:
            raise PartMissingError("mooncake_master", "pip install -e '.[mooncake]'")
        self._port = free_port()
        super().__init__(f"127.0.0.1:{self._port}")
        self._log = folder / "mooncake.log"
        self._lender: MooncakeClient | None = None

    def restart(self) -> None:
        """Start or restart, and block until the master listens."""
        options = [f"--rpc_port={self._port}", f"--metrics_port={free_port()}", "--logtostderr=1"]
        binary = Path(sys.executable).parent / "mooncake_master"
        self.start([binary, *options], self._log, self._port)

    def lend(self) -> None:
        """Lend `LENT_BYTES` of memory to the master until `close`, also after restarts."""
        self._lender = self.connect(mooncake_segment_bytes=LENT_BYTES)

    def close(self) -> None:
        """Take the memory back and end the master."""
        super().close()
        if self._lender is not None:
            self._lender.close()
        self.kill()


def lend_memory(address: str, ready: Path) -> None:
    """Lend memory to a master until the process is killed. The file `ready` is created when it is available."""
    lender = MooncakeAccess(address).connect(mooncake_segment_bytes=LENT_BYTES)
    ready.touch()
    signal.pause()
    lender.close()


if __name__ == "__main__":
    lend_memory(sys.argv[1], Path(sys.argv[2]))
