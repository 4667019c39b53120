"""The limit on open files: raised at the start, and engines are refused before connections cannot be accepted."""

import asyncio
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from bridge import BridgeSettings, ConnectionState, EngineSettings, Fleet
from kv_events.log.memory import MemoryLog
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.http_checks import check_problem
from tests.support.programs import own_environment
from tests.support.servers.child_process import free_port
from tests.support.waiting import async_wait_until, wait_until

HARD, CONNECTIONS = 400, 100
ENVIRONMENT = own_environment()


def test_an_engine_too_many_is_refused_while_there_are_files_for_connections(tmp_path: Path) -> None:
    body = {"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://127.0.0.1:2", "model_name": "m", "block_size": 4}
    with _limited_service(tmp_path / "log") as url, httpx.Client(base_url=url, timeout=60) as client:
        wait_until(lambda: client.get("/ready").is_success, 300, "the service")
        answers = [client.post("/register", json={**body, "instance_id": number}) for number in range(30)]
        taken = [answer for answer in answers if answer.is_success]
        assert len(taken) == HARD // 2 // 8
        problem = check_problem(answers[len(taken)], 503)
        assert "engines may use 200 file descriptors, and 208 would be needed" in problem["detail"]
        with ExitStack() as open_clients:
            for _ in range(CONNECTIONS - 10):
                another = open_clients.enter_context(httpx.Client(base_url=url, timeout=60, verify=False))
                assert len(another.get("/workers").json()) == len(taken)
        assert client.post("/unregister", json={**body, "instance_id": 0}).is_success
        assert client.post("/register", json={**body, "instance_id": 99}).status_code == 201
    assert f"{HARD} files may be open, but 8420 may be needed" in (tmp_path / "log").read_text()


async def test_zmq_is_no_limit_on_the_engines_of_a_process() -> None:
    num_engines = 360  # with three sockets each, more than ZMQ has by default
    with _open_files(8 * num_engines), ZmqEngine() as engine:
        async with Fleet.embedded(BridgeSettings(), MemoryLog()) as fleet:
            for number in range(num_engines):
                settings = EngineSettings(endpoint=engine.endpoint, worker=str(number), model="m", block_size=4)
                await fleet.add(settings)
                await asyncio.sleep(0)

            def states() -> set[ConnectionState]:
                return {status.state for status in fleet.status()}

            await async_wait_until(lambda: states() == {ConnectionState.CONNECTED}, 60, "all connections")


@contextmanager
def _limited_service(log: Path) -> Iterator[str]:
    port = free_port()
    limited = (
        f'ulimit -Sn 100; ulimit -Hn {HARD}; exec "$0" -m kvsight serve --port {port} --max-connections {CONNECTIONS}'
    )
    with log.open("wb") as output:
        process = subprocess.Popen(["bash", "-c", limited, sys.executable], stderr=output, env=ENVIRONMENT)
    try:
        wait_until(lambda: b"kvsight listens" in log.read_bytes(), 120, "the service to listen")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def _open_files(number: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < number:
        pytest.skip(f"needs {number} open files, the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, number), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
