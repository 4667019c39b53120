"""The API behind real uvicorn and uvloop on loopback."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from api.app import create_app
from api.server import CannotListenError, listen, run_server, running_server
from api.service import LiveService
from api.settings import ApiSettings
from tests.rigs.api import served
from tests.rigs.raw_http import a_service, in_chunks
from tests.support.http_checks import succeeds
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream
from tests.support.waiting import async_wait_until, wait_until

TOKENS = list(range(1, 17))
ROOT = Path(__file__).resolve().parents[2]
QUERY = {"model_name": "m", "token_ids": TOKENS}


async def test_a_body_over_the_limit_gets_a_413_from_a_real_server() -> None:
    async with a_service(max_body_bytes=1024) as connect:
        line = await connect()
        line.writer.write(in_chunks(b" " * 1024, b" " * 1024))
        assert (await line.answer())[0] == b"HTTP/1.1 413 Request Entity Too Large"


def test_an_address_that_cannot_be_had_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for settings, reason in (
            (ApiSettings(port=port), f"port {port}: the port is in use"),
            (ApiSettings(host="no.such.host.invalid"), r"no\.such\.host\.invalid"),
        ):
            with pytest.raises(CannotListenError, match=reason):
                run_server(create_app(LiveService(HandFed().consumer, settings)), settings)


_SERVER = """
from tests.support.log.hand_fed import HandFed
from api.app import create_app
from api.service import LiveService
from api.server import run_server
from api.settings import ApiSettings
settings = ApiSettings()
run_server(create_app(LiveService(HandFed().consumer, settings)), settings)
"""


def test_a_signal_ends_the_server_gracefully() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {**os.environ, "KVSIGHT_PORT": str(port), "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen([sys.executable, "-c", _SERVER], env=env, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: succeeds(f"http://127.0.0.1:{port}/health"), deadline_s=60, what="server up")
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=20)
    finally:
        server.kill()
    assert b"Traceback" not in errors
    assert server.returncode == 0


def test_a_signal_while_the_loop_starts_ends_the_command_without_a_traceback() -> None:
    """uvloop makes a pair of sockets when it starts, and the signal comes with it."""
    program = (
        "import _socket, os, signal, sys\n"
        "make = _socket.socketpair\n"
        "def interrupted(*arguments):\n"
        "    _socket.socketpair = make\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return make(*arguments)\n"
        "import api.server\n"
        "listen = api.server.listen\n"
        "def late(settings):\n"
        "    _socket.socketpair = interrupted\n"
        "    return listen(settings)\n"
        "api.server.listen = late\n"
        "from kvsight.cli.main import run\n"
        "sys.argv = ['kvsight', 'serve', '--port', '0', '--event-log-dir', sys.argv[1]]\n"
        "run()\n"
    )
    with tempfile.TemporaryDirectory() as log:
        command = [sys.executable, "-c", program, log]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, timeout=60)
    assert b"Traceback" not in done.stderr
    assert done.returncode == 130


async def test_no_answer_may_be_taken_for_another_type(fed: HandFed, caplog: pytest.LogCaptureFixture) -> None:
    async with served(fed.consumer) as client:
        await fed.hold(Stream("1"), TOKENS)
        answers = [await client.post("/query", json=QUERY) for _ in range(4)]  # on all paths through the server
        answers += [await client.get(path) for path in ("/", "/docs", "/workers", "/metrics", "/none")]
        for answer in answers:
            assert answer.headers.get_list("x-content-type-options") == ["nosniff"], answer
        for _ in range(100):
            reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
            writer.write(b"\x00 garbage\r\n\r\n")
            assert b"\r\nx-content-type-options: nosniff\r\n" in await reader.read()
            writer.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_services_share_a_port_if_each_of_them_allows_it() -> None:
    shared = ApiSettings(port=0, reuse_port=True)
    one, other = HandFed(), HandFed()
    async with running_server(create_app(LiveService(one.consumer, shared)), shared) as url:
        settings = ApiSettings(port=int(url.rpartition(":")[2]), reuse_port=True)
        with pytest.raises(CannotListenError, match="in use"):
            listen(settings.model_copy(update={"reuse_port": False}))
        async with running_server(create_app(LiveService(other.consumer, settings)), settings) as same:
            assert same == url
            await one.hold(Stream("one"), TOKENS)
            await other.hold(Stream("other"), TOKENS)
            answered_by: set[str] = set()

            async def both_have_answered() -> bool:
                async with httpx.AsyncClient() as client:
                    answered_by.update((await client.post(f"{url}/query", json=QUERY)).json()["scores"])
                return answered_by == {"one", "other"}

            await async_wait_until(both_have_answered, 60, "connections to both services")
