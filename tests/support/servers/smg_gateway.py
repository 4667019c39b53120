"""The real SMG, the gateway of SGLang, from PyPI."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import httpx

from tests.support.engines.released_packages import environment
from tests.support.http_checks import WITHOUT_TLS
from tests.support.servers.child_process import ChildProcess, free_port
from tests.support.waiting import wait_until

VERSION = "1.13.0"


class SmgGateway:
    """`with SmgGateway(folder, engines) as gateway:`. Skips the test if pip cannot get it."""

    def __init__(self, folder: Path, engines: Sequence[str], policy: str = "consistent_hashing") -> None:
        """engines: addresses."""
        python = environment(f"smg-{VERSION}", [f"smg=={VERSION}"])
        self.url, self._engines = f"http://127.0.0.1:{(port := free_port())}", engines
        ports = ["--port", str(port), "--prometheus-port", str(free_port())]
        command: list[str | Path] = [
            python.parent / "smg",
            "launch",
            *ports,
            "--policy",
            policy,
            "--worker-urls",
            *engines,
        ]
        self._process = ChildProcess(command, folder / "smg.log")

    def __enter__(self) -> Self:
        wait_until(self._knows_all, 60, "SMG to know its engines")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()

    def _knows_all(self) -> bool:
        assert self._process.running
        try:
            listed = httpx.get(f"{self.url}/workers", verify=WITHOUT_TLS).json()["workers"]
        except (httpx.TransportError, ValueError, KeyError):
            return False
        return {each["url"] for each in listed if each["is_healthy"]} == set(self._engines)
