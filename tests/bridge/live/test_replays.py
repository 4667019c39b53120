"""A bridge keeps reading with any behaviour of an engine's replay socket, and large batches do not block its loop."""

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import count, repeat
from typing import Self

import pytest
import zmq
import zmq.asyncio

from bridge.stream.rank_streams import RankStreams
from bridge.stream.replay import ReplayClient, ReplayError
from tests.rigs.bridge import GPU, Play, bridged, on, pages, store
from tests.support.engines.event_payloads import names_of, payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import free_port
from tests.support.waiting import async_wait_until


class OddReplays:
    """A replay socket that answers with batches of these numbers and never sends the end."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.num_requests = 0
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self._numbers = numbers
        self._ending = threading.Event()

    @contextmanager
    def answering(self) -> Iterator[Self]:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(self.endpoint)
            thread = threading.Thread(target=self._answer, args=(router,))
            thread.start()
            try:
                yield self
            finally:
                self._ending.set()
                thread.join()
                router.close(linger=0)

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        reader = None
        while not self._ending.is_set():
            if router.poll(1):
                reader = router.recv_multipart()[0]
                self.num_requests += 1
            number = None if reader is None else next(self._numbers, None)
            if reader is not None and number is not None:
                router.send_multipart([reader, b"", b"", number.to_bytes(8, "big"), store(number)])


async def test_a_replay_port_without_a_listener_costs_no_more_than_moments() -> None:
    async with bridged(read={"replay_endpoint": f"tcp://127.0.0.1:{free_port()}"}, replay=False) as (engine, bridge):
        engine.seq = 5
        engine.send(store(0))
        await bridge.shows(pages(0), deadline_s=8)


async def test_live_batches_do_not_wait_for_an_answer_to_a_question_that_they_answer() -> None:
    with OddReplays(iter(())).answering() as mute:
        settings = {"bridge_idle_check_s": 0.1, "bridge_replay_timeout_s": 60}
        async with bridged(read={"replay_endpoint": mute.endpoint}, settings=settings, replay=False) as (
            engine,
            bridge,
        ):
            for number in range(4):
                await async_wait_until(lambda: mute.num_requests > number)  # noqa: B023  (called before the next number)
                engine.send(store(number))
                await bridge.shows(pages(*range(number + 1)), deadline_s=30)
            assert bridge.counters()["failed_replays"] == 0


@pytest.mark.parametrize(
    ("answers", "settings", "script", "counters"),
    [
        pytest.param(*case, id=name)
        for name, *case in (
            (
                "none",
                iter(()),
                {"bridge_replay_timeout_s": 0.2},
                "send 0, show 0, lose 1, send 2, show 2",
                {"failed_replays": 3, "losses": 1},
            ),
            ("one again and again", repeat(0), {}, "until failed_replays, count 1, send 1, show 0 1", {}),
            ("no end", count(), {}, "count 1000000, send 7, show 7, until losses", {}),
        )
    ],
)
async def test_an_answer_that_helps_nobody_is_left(
    answers: Iterator[int],
    settings: dict[str, float],
    script: str,
    counters: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bridge.stream.engine_stream._DEADLINE_S", 2.0)
    with OddReplays(answers).answering() as odd:
        read = {"replay_endpoint": odd.endpoint}
        counted, _ = await Play.follow(script, read=read, settings=settings, replay=False)
    assert {name: counted[name] for name in counters} == counters


async def test_a_replay_socket_that_is_closed_costs_what_was_missed_and_is_asked_again_when_it_is_open() -> None:
    with ZmqEngine() as keeper:
        keeper.stop()
        async with bridged(read={"replay_endpoint": keeper.replay_endpoint}, replay=False) as (engine, bridge):
            await async_wait_until(lambda: bridge.counters()["failed_replays"] > 0)
            keeper.restart()
            for number in range(4):
                keeper.send(store(number))
            engine.seq = 3
            engine.send(store(3))  # the first batch that is heard
            await bridge.shows(pages(0, 1, 2, 3), deadline_s=30)
            keeper.stop()
            engine.send(store(4), "dropped")
            engine.send(store(5))
            await bridge.shows(pages(5))


async def test_a_replay_socket_that_never_knows_what_comes_live_is_not_believed_for_ever() -> None:
    with ZmqEngine() as other:
        other.send(store(100))
        async with bridged(read={"replay_endpoint": other.replay_endpoint}, replay=False) as (engine, bridge):
            engine.seq = 50

            def all_shown() -> bool:
                engine.send(store(1))
                return pages(1) <= bridge.view().pages

            await async_wait_until(all_shown, deadline_s=30)


@pytest.mark.parametrize("has_batches", [True, False])
async def test_an_engine_whose_replays_lack_its_last_batch_has_restarted_unless_they_are_empty(
    has_batches: bool,
) -> None:
    with ZmqEngine() as keeper:
        read = {"replay_endpoint": keeper.replay_endpoint}
        async with bridged(read=read, settings={"bridge_idle_check_s": 0.1}, replay=False) as (engine, bridge):
            for number in range(3):
                engine.send(store(number))
            await bridge.shows(pages(0, 1, 2))
            if has_batches:
                keeper.send(store(7))
                await bridge.shows(pages(7))
            else:
                num_asked = len(keeper.requests)
                await async_wait_until(lambda: len(keeper.requests) > num_asked + 4)
            assert bridge.counters()["restarts"] == has_batches
            assert bridge.view().pages == (pages(7) if has_batches else pages(0, 1, 2))


async def test_large_batches_of_a_replay_are_worked_on_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[tuple[int, str]] = []
    apply_waiting = RankStreams.apply_waiting

    def watched(ranks: RankStreams) -> Generator[None, None, None]:
        where.append((ranks.waiting_bytes, threading.current_thread().name))
        yield from apply_waiting(ranks)

    def large_ones() -> list[str]:
        return [thread for num_bytes, thread in where if num_bytes > 2**17]

    monkeypatch.setattr(RankStreams, "apply_waiting", watched)
    num_pages = 20_000
    tokens = list(range(num_pages * 4))
    async with bridged(is_read=False) as (engine, bridge):
        for _ in range(3):
            engine.send(payload(stored(range(num_pages), tokens)), "dropped")
        await bridge.read(engine)
        await bridge.shows(on(GPU, names_of(tokens)))
        await async_wait_until(lambda: len(large_ones()) == 3)  # the first one already shows all pages
        assert bridge.counters()["replayed_batches"] == 3
    assert all(thread.startswith("bridge") for thread in large_ones())


def answer_and_die(context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes]) -> None:
    """Answer with a message of many frames, so that the connection is lost while the reader parses it."""
    identity = router.recv_multipart()[0]
    router.send_multipart([identity, b"", *[b"x"] * 900])
    router.close(linger=1000)
    context.term()


async def test_an_engine_that_dies_while_its_answer_is_read_does_not_end_the_reader() -> None:
    for _ in range(20):
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dying = threading.Thread(target=answer_and_die, args=(context, router))
        dying.start()
        with zmq.asyncio.Context() as own:
            client = ReplayClient(own, f"tcp://127.0.0.1:{port}", 5.0)
            with pytest.raises(ReplayError, match="901 frames"):
                await anext(client.batches(0, time.monotonic() + 60))
        dying.join()
