"""A real `mooncake_master`, and a client in this process that lends it all the memory it has."""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_cache.settings import MooncakeSettings
from tests.support.servers.child_process import ChildProcess, PartMissingError, free_port

if TYPE_CHECKING:
    from engine_cache.storage.mooncake_client import MooncakeClient

LENT_BYTES = 2**26


class SharedClient:
    """The lender's client in the hands of one storage, which closes no more than what it opened."""

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


class MooncakeMaster:
    """A master that a test may stop, kill and bring back. Forgets everything over a restart."""

    def __init__(self, folder: Path) -> None:
        """Raises PartMissingError. The master runs after `restart()`."""
        if importlib.util.find_spec("mooncake") is None:
            raise PartMissingError("mooncake_master", "pip install -e '.[mooncake]'")
        self._port = free_port()
        self._log = folder / "mooncake.log"
        self._process: ChildProcess | None = None
        self._lender: MooncakeClient | None = None

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"127.0.0.1:{self._port}"

    def settings(self, **values: object) -> MooncakeSettings:
        """For a client in this process or another, that lends nothing unless told to."""
        ours = {
            "mooncake_master": self.address,
            "mooncake_segment_bytes": 0,
            "mooncake_buffer_bytes": 2**20,
            "mooncake_watch_interval_s": 0.1,
        }
        return MooncakeSettings.ignoring_environment(**ours | values)

    @property
    def running(self) -> bool:
        """Whether the master's process is alive."""
        return self._process is not None and self._process.running

    def restart(self) -> None:
        """Start, or start again. Blocks until it listens."""
        self.kill()
        options = [f"--rpc_port={self._port}", f"--metrics_port={free_port()}", "--logtostderr=1"]
        binary = Path(sys.executable).parent / "mooncake_master"
        self._process = ChildProcess([binary, *options], self._log)
        self._process.wait_for_port(self._port, deadline_s=20.0)

    def shared_client(self) -> SharedClient:
        """A client for one storage that does not take a second to close."""
        assert self._lender is not None
        return SharedClient(self._lender)

    def lend(self) -> None:
        """Lend it memory, over restarts, too."""
        from engine_cache.storage.mooncake_client import MooncakeClient

        self._lender = MooncakeClient(self.settings(mooncake_segment_bytes=LENT_BYTES))

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """SIGSTOP: connections are taken, and never answered."""
        assert self._process is not None
        self._process.send(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send(signal.SIGCONT)

    def close(self) -> None:
        """The end of both."""
        if self._lender is not None:
            self._lender.close()
        self.kill()
