"""Errors at the start of the server."""

from __future__ import annotations

from kv_events.errors import KvsightError


class CannotListenError(KvsightError):
    """The server cannot listen on its address."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"cannot listen on {host} port {port}: {reason}")
        self.host = host
        self.port = port


class PortInUseError(CannotListenError):
    """Another process listens on the port."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port, "the port is in use")
