"""A Kafka broker that each kind of client reaches over a network of its own, which a test may cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.servers.child_process import free_port
from tests.support.servers.kafka_broker import KafkaBroker
from tests.support.servers.tcp_proxy import TcpProxy


class LinkedKafka(KafkaBroker):
    """Clients follow the address that a broker advertises. So each link is the advertised address of one listener."""

    def __init__(self, folder: Path, links: Sequence[str]) -> None:
        """links: their names, of capital letters. Raises PartMissingError."""
        ports = {name: free_port() for name in links}
        self.links = {name: TcpProxy(f"127.0.0.1:{port}") for name, port in ports.items()}
        protocols = ",".join(f"{name}:PLAINTEXT" for name in ("PLAINTEXT", "CONTROLLER", *links))
        more = f"listener.security.protocol.map={protocols}\ninter.broker.listener.name=PLAINTEXT"
        super().__init__(
            folder, listeners=ports, advertised={name: link.port for name, link in self.links.items()}, more=more
        )

    def close(self) -> None:
        """Kill the broker and end its links. Idempotent."""
        self.kill()
        for link in self.links.values():
            link.close()
