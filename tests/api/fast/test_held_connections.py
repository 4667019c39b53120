"""Connections and bodies that somebody holds do not keep others out."""

import asyncio
import json
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from api.access.connections import RESERVED
from api.fast import http_limits
from api.fast.connection import FastConnection
from api.queries.parsing import decode_question
from kv_events.log.event_log import EventLogWriter
from tests.rigs.raw_http import HEALTH, QUERY, Connect, a_service, prompts, request
from tests.support.log.records import Stream, stored
from tests.support.servers.certificates import Certificates
from tests.support.servers.service_process import HastyService, ServiceProcess
from tests.support.waiting import async_wait_until, wait_until

pytestmark = pytest.mark.timing("silent connections must be closed after seconds, and others answered meanwhile")

NUM_HELD = 2000
"""Twice as many as the service has by default."""
HELD_BODIES = 20
TIMEOUT = b"HTTP/1.1 408 Request Timeout"


@contextmanager
def a_process(folder: Path, **variables: object) -> Iterator[ServiceProcess]:
    """A service of one worker that holds the pages 1 and 2. Test and service may open enough files."""
    with EventLogWriter(folder / "log") as writer:
        writer.append(Stream("w").batch(stored((0, [1, 2])), now=time.time()))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = min(files[1], 3 * NUM_HELD), files[1]
    variables = {"KVSIGHT_EVENT_LOG_DIR": folder / "log", "KVSIGHT_WORKER_TTL_S": 100_000, **variables}
    with HastyService(folder, **variables) as service:
        service.wait_until_ready()
        for pid in (0, service.pid):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, max(files, enough))
        try:
            yield service
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, files)


def answers(service: ServiceProcess, trusted: ssl.SSLContext | bool = True) -> None:
    """Check what a new caller gets."""
    with httpx.Client(base_url=service.url, verify=trusted, timeout=10) as caller:
        assert caller.get("/health").status_code == 200
        assert [worker["instance_id"] for worker in caller.get("/workers").json()] == ["w"]
        for _ in range(10):
            found = caller.post("/query_by_hash", json={"model_name": "m", "seq_hashes": [1, 2]})
            assert found.json()["instances"]["w"]["gpu"] > 0


def is_closed(held: socket.socket) -> bool:
    """Return whether the service has closed a connection, perhaps after an answer."""
    try:
        return held.recv(2**16) == b"" or is_closed(held)
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True


def plain(connection: socket.socket) -> socket.socket:
    return connection


def empty_lines(connection: socket.socket) -> socket.socket:
    connection.sendall(b"\r\n\r\n")
    return connection


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["silent", "empty lines", "TLS without a handshake", "silent TLS"])
def test_more_silent_connections_than_may_be_open_keep_nobody_out_and_are_closed(kind: str, tmp_path: Path) -> None:
    begin: Callable[[socket.socket], socket.socket] = empty_lines if kind == "empty lines" else plain
    variables: dict[str, object] = {}
    trusted, num_held = ssl.create_default_context(), NUM_HELD // 4 if "TLS" in kind else NUM_HELD
    if "TLS" in kind:
        certificates = Certificates(tmp_path / "certificates")
        issued, trusted = certificates.issue("service"), ssl.create_default_context(cafile=certificates.ca)
        names = "TLS_CERT_FILE", "TLS_KEY_FILE"
        variables = {f"KVSIGHT_{name}": path for name, path in zip(names, issued, strict=False)}
        variables |= {"SSL_CERT_FILE": certificates.ca, "KVSIGHT_MAX_CONNECTIONS": NUM_HELD // 8}
    if kind == "silent TLS":

        def begin(connection: socket.socket) -> socket.socket:
            return trusted.wrap_socket(connection, server_hostname="127.0.0.1")

    with a_process(tmp_path, **variables) as service, ExitStack() as stack:
        url, held = httpx.URL(service.url), []
        for _ in range(num_held):
            held.append(stack.enter_context(begin(socket.create_connection((url.host, url.port), timeout=60))))
        for connection in held:
            connection.setblocking(False)
        answers(service, trusted)
        assert not is_closed(held[-1])
        wait_until(lambda: all(map(is_closed, held)), 60, "the connections are closed")
        answers(service, trusted)


async def test_empty_lines_after_a_request_do_not_hold_a_connection(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = FastConnection.connection_made

    def hasty(server: FastConnection, transport: asyncio.Transport) -> None:
        server.timeout_keep_alive = 1
        begin(server, transport)

    monkeypatch.setattr(FastConnection, "connection_made", hasty)
    line = await connect()
    await line.ask(HEALTH)
    end = asyncio.ensure_future(line.is_at_end())

    async def is_ended() -> bool:
        if not line.writer.is_closing():
            line.writer.write(b"\r\n")
        return end.done()

    await async_wait_until(is_ended, 60)


async def test_a_head_that_does_not_arrive_is_given_up_before_a_body(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "HEAD_S", 1.0)

    later, head, body = [await connect() for _ in range(3)]
    await later.ask(request(QUERY))
    head.writer.write(b"\r\nGET /health HTTP/1.1\r\nHost: h\r\n")
    body.writer.write(request(QUERY)[:-1])
    later.writer.write(request(QUERY)[:20])
    assert (await head.answer())[0] == TIMEOUT
    assert await head.is_at_end()
    assert (await body.ask(request(QUERY)[-1:]))[0] == b"HTTP/1.1 200 OK"
    assert (await later.ask(request(QUERY)[20:]))[0] == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize("begins_with", [b"", b"\r\n", request(QUERY)[:-1], HEALTH])
async def test_a_caller_with_many_connections_takes_no_place_of_another_one(begins_with: bytes) -> None:
    async with a_service(max_connections=32) as connect:
        others = [await connect("127.0.0.2") for _ in range(10)]
        for line in others:
            for data in prompts()[:4]:
                await line.ask(data)
        for _ in range(100):
            (await connect()).writer.write(begins_with)
        for line in [*others, await connect("127.0.0.3"), await connect()]:
            assert (await line.ask(request(QUERY)))[0] == b"HTTP/1.1 200 OK"


async def test_probes_are_answered_while_all_connections_are_being_answered() -> None:
    async with a_service(max_connections=4) as connect:
        busy = [await connect() for _ in range(4)]
        for line in busy:
            line.writer.write(b"GET /events HTTP/1.1\r\nHost: h\r\n\r\n")
            await line.begin()
        for _ in range(2 * RESERVED):
            health, workers = await connect(), await connect()
            status, headers, _ = await health.ask(HEALTH)
            assert (status, b"connection: close" in headers) == (b"HTTP/1.1 200 OK", True)
            status, headers, body = await workers.ask(HEALTH.replace(b"health", b"workers"))
            assert status == b"HTTP/1.1 503 Service Unavailable"
            assert b"retry-after: 1" in headers
            assert b"--max-connections" in body


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("path", "size"), [("/query", 2**25), ("/query?", 2**25), ("/query", 2**21 - 2**10)])
def test_bodies_without_an_end_are_bounded_together(path: str, size: int, tmp_path: Path) -> None:
    num_bodies = HELD_BODIES * 2**25 // size
    with a_process(tmp_path) as service, ExitStack() as stack:
        url, held = httpx.URL(service.url), []
        answers(service)
        before = psutil.Process(service.pid).memory_info().rss
        for _ in range(num_bodies):
            connection = stack.enter_context(socket.create_connection((url.host, url.port), timeout=60))
            connection.sendall(request(b" " * size, path)[:-1])
            held.append(connection)
        answers(service)
        assert psutil.Process(service.pid).memory_info().rss - before < 2**20 * 400
        assert json.loads(held[0].recv(2**16).partition(b"\r\n\r\n")[2])["field"] == "body"
        for connection in held:
            connection.setblocking(False)
        wait_until(lambda: all(map(is_closed, held)), 60, "the others are given up")
        answers(service)


async def test_bodies_count_until_their_requests_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(
        "api.queries.routes.decode_question", lambda *args: (go_on.wait(100), decode_question(*args))[1]
    )
    large = request(b" " * 2**19 + QUERY, "/query?")
    async with a_service(max_body_bytes=len(large)) as connect:
        try:
            for number in range(8):  # as many as have room
                line = await connect()
                line.writer.write(large)
                if number % 2:
                    await line.writer.drain()
                    await line.close()
            line, small = await connect(), await connect()
            for _ in range(10):
                assert (await small.ask(HEALTH))[0] == b"HTTP/1.1 200 OK"
            status, headers, body = await line.ask(large)
            assert status == b"HTTP/1.1 503 Service Unavailable"
            assert b"retry-after: 1" in headers
            assert json.loads(body)["type"] == "urn:kvsight:problem:overloaded"
        finally:
            go_on.set()

        async def is_free() -> bool:
            return (await (await connect()).ask(large))[0] == b"HTTP/1.1 200 OK"

        await async_wait_until(is_free, 60)


async def test_bodies_behind_an_endless_answer_do_not_count_for_ever() -> None:
    large = request(QUERY.rjust(125_000), "/query?")
    start = large.index(b"\r\n\r\n") + 4
    async with a_service(max_body_bytes=len(large)) as connect:
        for _ in range(16):  # twice as many as have room
            line = await connect()
            line.writer.write(b"GET /events HTTP/1.1\r\nHost: h\r\n\r\n" + large[:start])
            await line.begin()
            for part in (large[start : start + 65_000], large[start + 65_000 :]):
                line.writer.write(part)
                await asyncio.sleep(0.05)  # in which the service reads, up to 64 KiB beyond which it pauses
            line.writer.transport.abort()

        async def is_answered() -> bool:
            return (await (await connect()).ask(large))[0] == b"HTTP/1.1 200 OK"

        await async_wait_until(is_answered, 60)


@pytest.mark.parametrize("path", ["/query", "/query?"])
async def test_a_large_body_that_stops_is_given_up(
    connect: Connect, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "STEP_S", 0.5)

    large, small = await connect(), await connect()
    large.writer.write(request(b" " * 2**20 + QUERY, path)[: -(2**19)])
    small.writer.write(request(QUERY, path)[:-1])
    status, _, body = await large.answer()
    assert (status, json.loads(body)["field"]) == (TIMEOUT, "body")
    assert (await small.ask(request(QUERY, path)[-1:]))[0] == b"HTTP/1.1 200 OK"
