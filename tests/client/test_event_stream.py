"""Parsing of events from bytes that arrive in any pieces from any server."""

import asyncio
import gzip
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager

import pytest

from kv_events.http.events import ClientDropped, FeedEvent
from kvsight import AsyncClient, Client
from kvsight.base_client import MAX_EVENT_BYTES, EventReader
from kvsight.errors import UnexpectedAnswerError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
DROPPED = b'event: dropped\ndata: {"lost": 7}\n\n'


def read(received: Iterable[bytes]) -> list[FeedEvent]:
    reader = EventReader("http://t/events")
    return [event for part in received for event in reader.take(part)]


def test_unknown_kinds_and_comments_are_passed_over_and_nonsense_is_not() -> None:
    passed_over = b': hello\n\nevent: novelty\ndata: {}\n\ndata: 5\n\nevent:dropped\ndata:{"lost":\ndata: 7}\n'
    assert read([passed_over]) == []
    assert read([passed_over, b"\n"]) == [ClientDropped(lost=7)]
    for nonsense in (b"{}", b"\xff", b'{"stream": "\xe9"}', b'{"novelty":' * 50_000):
        with pytest.raises(UnexpectedAnswerError, match="http://t/events: not an event of a kvsight API"):
            read([b"event: state\ndata: " + nonsense + b"\n\n"])


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_bytes_may_be_cut_anywhere(end: bytes) -> None:
    stream = (DROPPED + b": quiet\n\n" + DROPPED).replace(b"\n", end)
    assert read(bytes([byte]) for byte in stream) == read([stream]) == [ClientDropped(lost=7)] * 2


def test_only_line_ends_end_lines() -> None:
    text = '{"lost": 7, "name": "a\u2028b\x85c\x0bd"}'.replace("\x0b", "\\u000b")
    assert read([b"event: dropped\ndata: " + text.encode() + b"\n\n"]) == [ClientDropped(lost=7)]


def test_an_event_comes_before_the_nonsense_behind_it() -> None:
    reader = EventReader("http://t/events")
    events = reader.take(DROPPED + b"event: dropped\ndata: {}\n\n")
    assert next(events) == ClientDropped(lost=7)
    with pytest.raises(UnexpectedAnswerError):
        next(events)


@pytest.mark.parametrize("part", [b"x" * 1000, b"data: " + b"x" * 1000 + b"\n", b"data\n" * 1000, b"data:\n" * 1000])
def test_an_event_without_an_end_is_refused_at_its_bound(part: bytes) -> None:
    taken: list[bytes] = []

    def received() -> Iterator[bytes]:
        while True:
            taken.append(part)
            yield part

    with pytest.raises(UnexpectedAnswerError, match=f"/events: an event is larger than {MAX_EVENT_BYTES} bytes"):
        read(received())
    assert MAX_EVENT_BYTES <= len(taken) * len(part) <= 7 * MAX_EVENT_BYTES


def test_many_events_are_no_long_one() -> None:
    assert len(read(itertools.repeat(DROPPED * 200, 300))) * len(DROPPED) > MAX_EVENT_BYTES


@asynccontextmanager
async def sending(head: bytes, parts: Callable[[], Iterator[bytes]]) -> AsyncIterator[tuple[str, list[int]]]:
    """Run a server that sends these bytes until its client disconnects. Yields its address and the bytes sent."""
    sent = [0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head + b"\r\n")
            for part in parts():
                writer.write(part)
                await writer.drain()
                sent[0] += len(part)
        except ConnectionError:
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()[:2]
    async with listening:
        yield f"http://{host}:{port}", sent


def endless() -> Iterator[bytes]:
    return itertools.repeat(b"x" * 2**16, 2**12)


async def listen(kind: str, url: str) -> list[FeedEvent]:
    if kind == "async":
        async with AsyncClient(url) as client:
            return [event async for event in client.events()]

    def blocking() -> list[FeedEvent]:
        with Client(url) as client:
            return list(client.events())

    return await asyncio.to_thread(blocking)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_client_disconnects_from_a_line_without_an_end(kind: str) -> None:
    async with sending(HEAD, endless) as (url, sent):
        with pytest.raises(UnexpectedAnswerError, match="larger than"):
            await listen(kind, url)
    assert sent[0] < 32 * MAX_EVENT_BYTES  # including the buffers of the sockets


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_client_unpacks_nothing(kind: str) -> None:
    packed = gzip.compress((b"data: " + b"x" * 1000 + b"\n\n") * 100_000 + DROPPED)
    async with sending(HEAD + b"content-encoding: gzip\r\n", lambda: iter([packed])) as (url, _):
        assert await listen(kind, url) == []
