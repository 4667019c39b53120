"""The services under comparison, each a process of its own, and a minimal HTTP client for them."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil

GIVE_UP_S = 120.0  # the first start compiles kernels
_PEER_PACKAGE, _PEER_VERSION = "ai_dynamo_runtime", "1.6.1"
_PEER_FOLDER = Path.home() / ".cache" / "kvsight" / f"{_PEER_PACKAGE}-{_PEER_VERSION}"


class Service(NamedTuple):
    """How a service is started."""

    command: list[str]
    """Arguments of Python. `{port}` is replaced."""
    env: dict[str, str]


KVSIGHT = Service(["-m", "kvsight", "serve", "--port", "{port}"], {})


def dynamo_folder() -> Path | None:
    """Return a folder with Dynamo's package, which the tests share. None if pip cannot install it."""
    if not _PEER_FOLDER.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(_PEER_FOLDER)]
        if subprocess.run([*pip, f"{_PEER_PACKAGE}=={_PEER_VERSION}"], check=False).returncode:
            return None
    return _PEER_FOLDER


def dynamo(threads: int) -> Service | None:
    """Return Dynamo's standalone indexer. None if it cannot be installed. threads: threads of its index."""
    if dynamo_folder() is None:
        return None
    command = ["-m", "dynamo.indexer", "--port", "{port}", "--threads", str(threads)]
    return Service(command, {"PYTHONPATH": str(_PEER_FOLDER), "DYN_LOG": "warn"})


@contextmanager
def running(service: Service) -> Iterator[HTTPConnection]:
    """Run a service for the duration of the block, which gets a connection to it."""
    port = _free_port()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *(part.replace("{port}", str(port)) for part in service.command)],
            env={**os.environ, **service.env},
            stdout=output,
            stderr=output,
        )
        client = HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_S)
        try:
            give_up = time.monotonic() + GIVE_UP_S
            while not _is_up(client):
                if process.poll() is not None or time.monotonic() > give_up:
                    output.seek(0)
                    said = output.read()[-2000:].decode(errors="replace")
                    raise RuntimeError(f"{service.command} did not start: {said}")
                time.sleep(0.05)
            yield client
        finally:
            client.close()
            process.kill()
            process.wait()


def resident_bytes(client: HTTPConnection) -> int:
    """Return the memory of a service that this process runs."""
    return int(_process(client).memory_info().rss)


def cpu_seconds(client: HTTPConnection) -> float:
    """Return the CPU time that a service of this process has used."""
    times = _process(client).cpu_times()
    return float(times.user + times.system)


def _process(client: HTTPConnection) -> psutil.Process:
    (service,) = (each for each in psutil.Process().children() if str(client.port) in each.cmdline())
    return service


def posted(client: HTTPConnection, path: str, body: bytes) -> Any:
    """Return the answer to a JSON body. The client is minimal, so that polling does not slow the service down."""
    try:
        answer = _answer(client, path, body)
    except ConnectionError:  # the service closed the idle connection
        client.close()
        answer = _answer(client, path, body)
    text = answer.read()
    if answer.status >= HTTPStatus.BAD_REQUEST:
        raise RuntimeError(f"{path}: {answer.status}: {text!r}")
    return msgspec.json.decode(text)


def _answer(client: HTTPConnection, path: str, body: bytes) -> HTTPResponse:
    client.request("POST", path, body, {"content-type": "application/json"})
    return client.getresponse()


def _is_up(client: HTTPConnection) -> bool:
    try:
        client.request("GET", "/health")
        answer = client.getresponse()
        answer.read()
    except OSError:
        client.close()
        return False
    return answer.status == HTTPStatus.OK


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
