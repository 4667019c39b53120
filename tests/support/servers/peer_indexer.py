"""NVIDIA Dynamo's standalone indexer, as published on PyPI, for comparison with kvsight.

To run it manually: `pip install --no-deps --target FOLDER ai-dynamo-runtime==1.6.1` and then
`PYTHONPATH=FOLDER python -m dynamo.indexer --port 8090 --threads 4`, with pydantic and uvloop installed.
"""

import sys
from pathlib import Path
from typing import Any, Self

import httpx

from tests.support.engines.released_packages import installed
from tests.support.servers.child_process import ChildProcess, free_port

PEER_PACKAGE = "ai_dynamo_runtime", "1.6.1"


class PeerIndexer:
    """A process of the indexer: `with PeerIndexer(log) as peer:`. Skips the test if pip cannot download the package."""

    def __init__(self, log: Path, *, module: str = "dynamo.indexer") -> None:
        """module: that of the selection service is dynamo.select_service.

        Its index has one thread, so that events are processed in the order of their arrival.
        """
        folder = installed(*PEER_PACKAGE)
        self._port = free_port()
        command = [sys.executable, "-m", module, "--port", str(self._port), "--threads", "1"]
        self._process = ChildProcess(command, log, {"PYTHONPATH": str(folder), "DYN_LOG": "warn"})
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=60)

    def register(self, instance: int, endpoint: str, **fields: Any) -> None:
        """Register an engine. fields: `model_name`, `block_size` and any other field of the request."""
        answer = self._http.post("/register", json={"instance_id": instance, "endpoint": endpoint, **fields})
        assert answer.status_code == 201, answer.text

    def request(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Send any request and return the answer. request: arguments of `httpx.Client.request`."""
        return self._http.request(method, path, **request)

    def query(self, **body: Any) -> Any:
        """Its answer."""
        return self._http.post("/query", json=body).raise_for_status().json()

    def query_by_hash(self, **body: Any) -> Any:
        """Its answer."""
        return self._http.post("/query_by_hash", json=body).raise_for_status().json()

    def dump(self) -> Any:
        """Return everything that it holds."""
        return self._http.get("/dump").raise_for_status().json()

    def stop(self) -> None:
        """Kill the process. Idempotent."""
        self._http.close()
        self._process.kill()

    def __enter__(self) -> Self:
        self._process.wait_for_port(self._port, 30)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
