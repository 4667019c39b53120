"""Requests in the hot lane get the answers of the ordinary way, over real connections to the real server."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import random
import re
import select
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from api.app import create_app
from api.hot_lane import protocol
from api.hot_lane.heads import Head
from api.hot_lane.lane import HotLane
from api.hot_lane.protocol import MAX_HEAD_BYTES
from api.server import running_server
from api.settings import ApiSettings
from indexer.settings import IndexerSettings
from tests.support.effort import num_examples
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream

TOKENS = list(range(1, 17))
TOKEN = "a-token"
_VARIABLE = re.compile(rb'"age_ms":\d+|"state":"(?:live|stale)"')  # a slow test has no heartbeats


class Line:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, url: str) -> Line:
        host, _, port = url.removeprefix("http://").partition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):  # the server may have closed it before it read everything
            await self.writer.wait_closed()

    async def is_at_end(self) -> bool:
        """Return whether the server closes the connection without another byte."""
        return await self._reader.read() == b""

    async def answer(self) -> tuple[bytes, bytes, bytes]:
        """Return status line, headers without the date, and the body without ages and states."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 100"):
            head = await self._reader.readuntil(b"\r\n\r\n")
        status, *headers = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        length = next(int(line.partition(b":")[2]) for line in headers if line.startswith(b"content-length:"))
        body = _VARIABLE.sub(b'""', await self._reader.readexactly(length))
        shown = sorted(line for line in headers if not line.startswith((b"date:", b"content-length:")))
        return status, b"\n".join(shown), body

    async def ask(self, data: bytes, *, pieces: int = 1) -> tuple[bytes, bytes, bytes]:
        """Send a request in some pieces, each in a packet of its own, and return the answer."""
        size = -(-len(data) // pieces)
        for start in range(0, len(data), size):
            self.writer.write(data[start : start + size])
            await self.writer.drain()
            await asyncio.sleep(0)
        return await self.answer()


@asynccontextmanager
async def a_service(*, num_more: int = 0, **settings: Any) -> AsyncIterator[Callable[[], Coroutine[Any, Any, Line]]]:
    """Run a service of three workers, and of more that hold nothing else. Yields a function that connects."""
    fed = HandFed(IndexerSettings(max_pages=2**18, worker_ttl_s=3600, forget_after_s=3600))
    api = ApiSettings(port=0, **settings)
    async with running_server(create_app(fed.consumer, api), api) as url:
        await fed.hold(Stream("1"), TOKENS)
        await fed.hold(Stream("2", dp_rank=1), TOKENS[:8])
        await fed.hold(Stream("3"), TOKENS, {0: range(1), 1: range(1, 3)})
        for number in range(num_more):
            await fed.hold(Stream(f"more-{number}"), TOKENS)
        async with AsyncExitStack() as lines:

            async def connect() -> Line:
                line = await Line.connect(url)
                lines.push_async_callback(line.close)
                return line

            yield connect


async def is_listening(url: str) -> bool:
    try:
        await (await Line.connect(url)).close()
    except ConnectionError:
        return False
    return True


def run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main, 200))


def request(body: bytes, path: str = "/query", content_type: str = "application/json", extra: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nX-Request-ID: r\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + extra + b"\r\n" + body


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model_name": "m", **fields}).encode()


QUERY = body_of(token_ids=TOKENS)
BODIES = [
    QUERY,
    body_of(token_ids=TOKENS, tier_weights=[1, 0.5, 0.25, 0.1]),
    body_of(token_ids=[9, 9, 9, 9]),
    body_of(token_ids=[]),
    body_of(token_ids=[-1]),
    body_of(token_ids=[1.5]),
    body_of(token_ids="x"),
    body_of(),
    body_of(model_name="unknown", token_ids=TOKENS),
    json.dumps({"model": "m", "block_size": 4, "token_ids": TOKENS}).encode(),
    json.dumps({"model": "m", "block_size": 8, "token_ids": TOKENS}).encode(),
    json.dumps({"model": "m", "block_size": 4, "instance_id": "2", "token_ids": TOKENS}).encode(),
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    QUERY.replace(b" ", b"\n"),
    QUERY + b"x",
]


@pytest.mark.parametrize("body", BODIES)
def test_both_ways_answer_alike(body: bytes) -> None:
    async def main() -> None:
        async with a_service() as connect:
            line = await connect()
            in_the_lane = await line.ask(request(body))
            ordinary = await line.ask(request(body, "/query?"))  # with "?" the lane does not take it
            assert in_the_lane == ordinary

    run(main())


def test_usual_queries_are_answered_in_the_lane_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    ordinary = HotLane.answer

    def noted(lane: HotLane, head: Head, data: bytes, start: int) -> bytes | None:
        body = ordinary(lane, head, data, start)
        taken.append(body is not None)
        return body

    monkeypatch.setattr(HotLane, "answer", noted)

    async def main() -> None:
        async with a_service() as connect:
            line, other = await connect(), await connect()
            await line.ask(request(QUERY))
            line.writer.write(request(QUERY)[:-9])  # with the whole head
            await other.ask(request(QUERY))  # so the server has read what was sent before
            await line.ask(request(QUERY)[-9:])
            assert taken == [True, True, True]
            await line.ask(request(body_of(token_ids=[1.5])))
            assert taken == [True, True, True, False]
            await line.ask(request(QUERY, "/query?"))
            assert len(taken) == 4

    run(main())


def test_a_head_without_end_is_refused() -> None:
    async def main() -> None:
        async with a_service() as connect:
            line, other = await connect(), await connect()
            line.writer.write(b"POST /query HTTP/1.1\r\n")
            await other.ask(request(QUERY))  # so the server has read what was sent before
            line.writer.write(b"X: %b\r\n" % (b"y" * MAX_HEAD_BYTES))
            status, _, body = await line.answer()
            assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
            assert json.loads(body)["detail"] == f"headers: more than {MAX_HEAD_BYTES} bytes"
            assert await line.is_at_end()
            assert (await other.ask(request(QUERY)))[0] == b"HTTP/1.1 200 OK"

    run(main())


def test_a_large_chunk_is_no_trailer() -> None:
    async def main() -> None:
        async with a_service() as connect:
            line = await connect()
            head = b"POST /query HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            body = QUERY + b" " * 8 * MAX_HEAD_BYTES
            line.writer.write(head + b"%x\r\n" % len(body))
            await (await connect()).ask(request(QUERY))  # so the server has read what was sent before
            assert (await line.ask(body + b"\r\n0\r\n\r\n"))[0] == b"HTTP/1.1 200 OK"

    run(main())


def test_trailers_without_end_are_refused() -> None:
    async def main() -> None:
        async with a_service() as connect:
            line = await connect()
            head = b"POST /query HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            line.writer.write(head + b"1\r\n{\r\n0\r\n")
            await (await connect()).ask(request(QUERY))  # so the server has read what was sent before
            line.writer.write(b"X: %b\r\n" % (b"y" * MAX_HEAD_BYTES))
            assert (await line.answer())[0].startswith(b"HTTP/1.1 431 ")
            assert await line.is_at_end()

    run(main())


def test_the_second_request_of_a_connection_is_refused_as_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "ARRIVAL_S", 0.5)

    async def main() -> None:
        async with a_service() as connect:
            line = await connect()
            await line.ask(request(QUERY, "/query?"))
            line.writer.write(b"POST /query HTTP/1.1\r\nHost: h\r\n")
            assert (await line.answer())[0] == b"HTTP/1.1 408 Request Timeout"

    run(main())


def test_requests_that_arrive_in_time_are_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "ARRIVAL_S", 1.0)

    async def main() -> None:
        async with a_service() as connect:
            line = await connect()
            data = request(QUERY)
            loop, number = asyncio.get_running_loop(), 0
            end = loop.time() + 2.0
            line.writer.write(data[:50])
            while loop.time() < end:  # each packet ends inside a request
                assert (await line.ask(data[50:] + data[:50]))[0] == b"HTTP/1.1 200 OK"
                await asyncio.sleep(0.02)
                number += 1
            assert number > 2

    run(main())


@pytest.mark.parametrize("path", ["/query", "/query?"])
def test_a_request_that_does_not_arrive_is_given_up(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "ARRIVAL_S", 0.5)

    async def main() -> None:
        async with a_service() as connect:
            line = await connect()
            assert (await line.ask(request(QUERY, path), pieces=3))[0] == b"HTTP/1.1 200 OK"
            line.writer.write(request(QUERY, path)[:-1])
            status, _, body = await line.answer()
            assert status == b"HTTP/1.1 408 Request Timeout"
            assert "not complete" in json.loads(body)["detail"]
            assert await line.is_at_end()

    run(main())


@pytest.mark.parametrize("pieces", [2, 3, 7, 10_000])
def test_a_request_may_arrive_in_pieces(pieces: int) -> None:
    async def main() -> None:
        async with a_service() as connect:
            line = await connect()
            whole = await line.ask(request(QUERY))
            assert await line.ask(request(QUERY), pieces=pieces) == whole
            assert whole[0] == b"HTTP/1.1 200 OK"

    run(main())


def test_pipelined_requests_are_answered_in_order() -> None:
    async def main() -> None:
        async with a_service() as connect:
            line = await connect()
            short = body_of(token_ids=TOKENS[:4])
            health = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
            line.writer.write(request(QUERY) + request(short) + health + request(QUERY)[:50])
            answers = [await line.answer() for _ in range(3)]
            answers.append(await line.ask(request(QUERY)[50:]))
            single = await connect()
            expected = [await single.ask(data) for data in (request(QUERY), request(short), health, request(QUERY))]
            assert answers == expected

    run(main())


def every_kind() -> list[bytes]:
    """Return requests that take different ways through the server."""
    return [
        request(QUERY),
        b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n",
        request(body_of(token_ids=[1.5])),
        request(QUERY, "/query?"),
        request(body_of(token_ids=list(range(1000)))),
        request(b"0\r\n\r\n", extra=b"Transfer-Encoding: chunked\r\n").replace(b"Content-Length: 5\r\n", b""),
    ]


def test_many_pipelined_requests_of_every_kind_are_answered_in_order() -> None:
    kinds = every_kind()

    async def main() -> None:
        async with a_service() as connect:
            line, single = await connect(), await connect()
            expected = [await single.ask(data) for data in kinds]
            for times in (1, 10):
                line.writer.write(b"".join(kinds * times))
                assert [await line.answer() for _ in kinds * times] == expected * times
            line.writer.write(kinds[0] + kinds[4] + b"garbage")
            assert [await line.answer() for _ in range(2)] == [expected[0], expected[4]]
            assert (await line.answer())[0] == b"HTTP/1.1 400 Bad Request"
            assert await line.is_at_end()

    run(main())


@settings(max_examples=num_examples(40))
@given(st.integers(0, 2**32))
def test_requests_of_every_kind_may_arrive_in_any_pieces(seed: int) -> None:
    choices = random.Random(seed)
    kinds = every_kind()
    usual = prompts()

    async def main() -> None:
        async with a_service() as connect:
            line, single = await connect(), await connect()
            expected = {data: await single.ask(data) for data in kinds + usual}
            asked: list[bytes] = []
            for _ in range(40):
                source = usual if choices.random() < 0.7 else kinds
                burst = choices.choices(source, k=choices.choice([1, 1, 1, 5]))
                asked += burst
                text = b"".join(burst)
                cuts = sorted(choices.choices(range(len(text)), k=choices.choice([0, 0, 1, 4])))
                for start, end in itertools.pairwise([0, *cuts, len(text)]):
                    line.writer.write(text[start:end])
                    await single.ask(usual[0])  # so the server has read what was sent before
                while len(asked) > choices.choice([0, 0, 5]):
                    assert await line.answer() == expected[asked.pop(0)]
            for data in asked:
                assert await line.answer() == expected[data]

    run(main())


def test_a_client_that_pipelines_does_not_hold_up_others() -> None:
    async def main() -> None:
        async with a_service() as connect:
            hostile, ordinary = await connect(), await connect()
            health = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
            hostile.writer.write(health * 1000)
            await hostile.answer()
            for _ in range(100):
                await ordinary.ask(request(QUERY))
            expected = await ordinary.ask(health)
            assert [await hostile.answer() for _ in range(50)] == [expected] * 50

    run(main())


@pytest.mark.parametrize(
    "extra",
    [
        b"Expect: 100-continue\r\n",
        b"Connection: keep-alive\r\n",
        b"X-Long: " + b"x" * 3000 + b"\r\n",
        b"A: 1\r\nA: 2\r\n",
    ],
)
def test_other_heads_are_answered_alike(extra: bytes) -> None:
    async def main() -> None:
        async with a_service() as connect:
            line = await connect()
            plain = await line.ask(request(QUERY))
            assert await line.ask(request(QUERY, extra=extra)) == plain

    run(main())


def test_a_client_that_asks_for_it_is_disconnected_after_the_answer() -> None:
    async def main() -> None:
        async with a_service() as connect:
            line = await connect()
            status, headers, _ = await line.ask(request(QUERY, extra=b"Connection: close\r\n"))
            assert (status, b"connection: close" in headers) == (b"HTTP/1.1 200 OK", True)
            assert await line.is_at_end()

    run(main())


def test_chunked_bodies_are_answered_alike() -> None:
    async def main() -> None:
        async with a_service() as connect:
            line = await connect()
            plain = await line.ask(request(QUERY))
            head = b"POST /query HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (QUERY[:10], QUERY[10:]))
            assert await line.ask(head + chunks + b"0\r\n\r\n") == plain

    run(main())


def test_a_token_is_required_where_one_is_set() -> None:
    async def main() -> None:
        async with a_service(api_token=TOKEN) as connect:
            line = await connect()
            given = {word: b"Authorization: Bearer %s\r\n" % word.encode() for word in (TOKEN, TOKEN[:-1], TOKEN + "x")}
            statuses = {word: (await line.ask(request(QUERY, extra=extra)))[0] for word, extra in given.items()}
            assert statuses.pop(TOKEN) == b"HTTP/1.1 200 OK"
            assert set(statuses.values()) == {b"HTTP/1.1 401 Unauthorized"}
            assert (await line.ask(request(QUERY)))[0] == b"HTTP/1.1 401 Unauthorized"

    run(main())


def test_queries_in_the_lane_are_counted() -> None:
    async def main() -> None:
        async with a_service() as connect:
            line = await connect()
            for _ in range(3):
                await line.ask(request(QUERY))
            await line.ask(request(QUERY, "/query?"))
            scrape = await line.ask(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n")
            assert b'kvsight_queries_total{route="/query"} 4.0' in scrape[2]
            assert b'kvsight_query_seconds_count{route="/query"} 4.0' in scrape[2]

    run(main())


def test_a_request_that_is_arriving_when_the_server_ends_is_answered() -> None:
    async def main() -> None:
        async with AsyncExitStack() as service:
            api = ApiSettings(port=0)
            url = await service.enter_async_context(running_server(create_app(HandFed().consumer, api), api))
            line = await Line.connect(url)
            while (known := await line.ask(request(QUERY)))[0] != b"HTTP/1.1 404 Not Found":
                pass  # the service starts
            line.writer.write(request(QUERY)[:-5])
            other = await Line.connect(url)
            await other.ask(request(QUERY))  # so the server has read what was sent before
            await other.close()
            ending = asyncio.create_task(service.aclose())
            while await is_listening(url):
                pass
            status, headers, body = await line.ask(request(QUERY)[-5:])
            assert (status, body) == (known[0], known[2])
            assert b"connection: close" in headers
            await line.close()
            await ending

    run(main())


def test_more_connections_than_allowed_get_the_ordinary_refusal() -> None:
    async def main() -> None:
        async with a_service(max_connections=1) as connect:
            line = await connect()
            assert (await line.ask(request(QUERY)))[0] == b"HTTP/1.1 200 OK"
            refused = await (await connect()).ask(request(QUERY))
            assert refused[0] == b"HTTP/1.1 503 Service Unavailable"
            assert b"KVSIGHT_MAX_CONNECTIONS" in refused[2]

    run(main())


def test_a_connection_lost_in_the_middle_of_a_request_leaves_the_others_alone() -> None:
    async def main() -> None:
        async with a_service() as connect:
            for end in (10, 120, len(request(QUERY)) - 1):
                lost = await connect()
                lost.writer.write(request(QUERY)[:end])
                await lost.close()
            assert (await (await connect()).ask(request(QUERY)))[0] == b"HTTP/1.1 200 OK"

    run(main())


def prompts() -> list[bytes]:
    """Return requests that differ only in their numbers and their length."""
    return [request(body_of(token_ids=TOKENS[:end] + [end] * (end % 3))) for end in range(1, 17)]


def test_requests_that_repeat_do_not_reach_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Head] = []
    ordinary = HotLane.answer

    def noted(lane: HotLane, head: Head, data: bytes, start: int) -> bytes | None:
        taken.append(head)
        return ordinary(lane, head, data, start)

    monkeypatch.setattr(HotLane, "answer", noted)

    async def main() -> None:
        async with a_service() as connect:
            lines = [await connect() for _ in range(40)]
            single = await connect()
            for data in prompts():
                expected = await single.ask(data.replace(b"/query", b"/query?"))
                assert {await line.ask(data) for line in lines} == {expected}
            assert len(taken) == 2 * len(lines)
            for line in lines:
                line.writer.write(prompts()[0])
            assert {await line.answer() for line in lines} == {await single.ask(prompts()[0])}
            scrape = await single.ask(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n")
            count = 41 * len(prompts()) + len(lines) + 1
            assert b'kvsight_queries_total{route="/query"} %d.0' % count in scrape[2]

    run(main())


@pytest.mark.parametrize(
    "other",
    [
        request(body_of(token_ids=TOKENS, x=1)),
        request(body_of(token_ids=[1.5])),
        request(body_of(token_ids=TOKENS[:3]), "/query_by_hash"),
        request(body_of(token_ids=TOKENS), extra=b"X-Other: 1\r\n"),
        request(body_of(token_ids=TOKENS), content_type="application/msgpack"),
        request(body_of(token_ids=list(range(10_000)))),
        b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n",
        b"-",
    ],
)
@pytest.mark.parametrize("pieces", [1, 3])
def test_other_requests_of_a_direct_connection_are_answered_as_before(other: bytes, pieces: int) -> None:
    async def main() -> None:
        async with a_service() as connect:
            line, single = await connect(), await connect()
            for data in prompts()[:5]:
                await line.ask(data)
            status, headers, body = await single.ask(other)
            assert await line.ask(other, pieces=pieces) == (status, headers, body)
            if status.startswith(b"HTTP/1.1 400 Bad") and b"text/plain" in headers:
                assert await line.is_at_end()
                return
            for data in [*prompts(), *prompts()]:
                assert await line.ask(data) == await single.ask(data)

    run(main())


def test_pipelined_requests_of_a_direct_connection_are_answered_in_order() -> None:
    async def main() -> None:
        async with a_service() as connect:
            line, single = await connect(), await connect()
            for _ in range(3):
                for data in prompts():
                    await line.ask(data)
                line.writer.write(b"".join(prompts()))
                for data in prompts():
                    assert await line.answer() == await single.ask(data)

    run(main())


def test_direct_connections_may_end_at_any_time() -> None:
    async def main() -> None:
        async with a_service() as connect:
            kept = await connect()
            expected = await kept.ask(prompts()[0])
            for number in range(60):  # file descriptors are used again
                lines = [await connect() for _ in range(3)]
                for line in lines:
                    for data in prompts()[:3]:
                        await line.ask(data)
                lines[0].writer.transport.abort()
                lines[1].writer.write(prompts()[0][: number % 40])
                await lines[1].close()
                lines[2].writer.write(prompts()[0])
                lines[2].writer.write_eof()
                assert await lines[2].answer() == expected
                assert await lines[2].is_at_end()
                assert await kept.ask(prompts()[0]) == expected

    run(main())


def test_a_client_that_reads_late_gets_all_answers() -> None:
    async def main() -> None:
        async with a_service(num_more=200) as connect:
            line, other = await connect(), await connect()
            expected = await line.ask(request(QUERY))
            for _ in range(3):
                await line.ask(request(QUERY))
            for _ in range(500):
                line.writer.write(request(QUERY))
                await other.ask(prompts()[0])  # so the server has read what was sent before
            for _ in range(500):
                assert await line.answer() == expected

    run(main())


def test_a_client_that_pipelines_without_end_is_not_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[protocol.HotProtocol] = []
    ordinary = protocol.HotProtocol.connection_made

    def noted(server: protocol.HotProtocol, transport: asyncio.Transport) -> None:
        servers.append(server)
        ordinary(server, transport)

    monkeypatch.setattr(protocol.HotProtocol, "connection_made", noted)

    async def main() -> None:
        async with a_service() as connect:
            hostile, other = await connect(), await connect()
            text = (request(QUERY) * 10 + b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n") * 20_000
            hostile.writer.write(text)
            for _ in range(60):
                for _ in range(10):
                    assert (await hostile.answer())[0] == b"HTTP/1.1 200 OK"
                await other.ask(request(QUERY))
            assert max(len(server._rest) for server in servers) < 2**20 < len(text)
            hostile.writer.transport.abort()

    run(main())


def test_a_connection_stays_ordinary_while_too_many_files_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(select, "epoll", fails)

    async def main() -> None:
        async with a_service() as connect:
            line, single = await connect(), await connect()
            for data in prompts() * 2:
                assert await line.ask(data) == await single.ask(data)

    run(main())


def test_an_error_of_one_direct_connection_is_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = protocol.HotProtocol.resume

    def fails_once(server: protocol.HotProtocol, data: bytes, rest: bytes) -> None:
        if b"hostile" in data:
            raise ValueError("hostile")
        ordinary(server, data, rest)

    monkeypatch.setattr(protocol.HotProtocol, "resume", fails_once)

    async def main() -> None:
        async with a_service() as connect:
            hostile, line, single = await connect(), await connect(), await connect()
            for data in prompts()[:5]:
                for each in (hostile, line):
                    await each.ask(data)
            other = request(body_of(token_ids=TOKENS, x=1))
            hostile.writer.write(b"hostile")
            line.writer.write(other)
            assert await line.answer() == await single.ask(other)
            assert await hostile.is_at_end()

    run(main())


def test_direct_connections_are_refused_as_others_when_there_are_too_many() -> None:
    async def main() -> None:
        async with a_service(max_connections=1) as connect:
            line = await connect()
            for data in prompts():
                assert (await line.ask(data))[0] == b"HTTP/1.1 200 OK"
            await connect()
            assert (await line.ask(prompts()[0]))[0] == b"HTTP/1.1 503 Service Unavailable"

    run(main())


def test_a_server_ends_with_its_direct_connections() -> None:
    async def main() -> None:
        async with AsyncExitStack() as service:
            api, fed = ApiSettings(port=0), HandFed()
            url = await service.enter_async_context(running_server(create_app(fed.consumer, api), api))
            await fed.hold(Stream("1"), TOKENS)
            line = await Line.connect(url)
            for data in prompts():
                assert (await line.ask(data))[0] == b"HTTP/1.1 200 OK"
            await service.aclose()
            assert await line.is_at_end()
            await line.close()

    run(main())


@pytest.mark.soak
def test_an_idle_direct_connection_is_closed_and_a_busy_one_is_not() -> None:
    async def main() -> None:
        async with a_service() as connect:
            idle, busy = await connect(), await connect()
            for line in (idle, busy):
                for data in prompts():
                    await line.ask(data)
            closed = asyncio.create_task(idle.is_at_end())
            while not closed.done():  # uvicorn's keep-alive ends after 5 s
                assert (await busy.ask(prompts()[0]))[0] == b"HTTP/1.1 200 OK"
                await asyncio.sleep(0.1)
            assert closed.result()
            async with asyncio.timeout(20):
                assert await busy.is_at_end()

    run(main())


@pytest.mark.soak
def test_an_idle_connection_is_closed_and_a_slow_request_is_not() -> None:
    async def main() -> None:
        async with a_service() as connect:
            idle, slow = await connect(), await connect()
            for line in (idle, slow):
                await line.ask(request(QUERY))
            slow.writer.write(request(QUERY)[:-1])
            async with asyncio.timeout(20):
                assert await idle.is_at_end()  # uvicorn's keep-alive ends after 5 s
            assert (await slow.ask(request(QUERY)[-1:]))[0] == b"HTTP/1.1 200 OK"
            async with asyncio.timeout(20):
                assert await slow.is_at_end()

    run(main())
