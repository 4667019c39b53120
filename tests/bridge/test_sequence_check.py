"""The order of batches, the incarnations that sent them, and connections that a subscriber reports."""

from types import SimpleNamespace

import numpy as np
import pytest
import zmq

from bridge import BridgeSettings
from bridge.context import BridgeCounters
from bridge.decoding.decoder import Messages
from bridge.registry import StreamRegistry
from bridge.settings import EngineDefaults
from bridge.shared_sink import SharedSink
from bridge.stream.engine_stream import EngineStream
from bridge.stream.rank_streams import RankStreams
from bridge.stream.sequence_check import BatchOrder, RestartLimit, SequenceCheck
from bridge.stream.subscriber import Connections
from kv_events.log.memory import MemoryLog
from kv_events.schema import ENGINE_UNHEARD
from kv_events.streams import StreamId
from publisher import PublisherSettings
from publisher.sinks.memory import MemorySink
from tests.models.stream_reader import StreamReader
from tests.rigs.bridge import pages, store
from tests.support.waiting import async_wait_until

_ORDERS = {"+": BatchOrder.APPLY, "=": BatchOrder.DUPLICATE, "?": BatchOrder.GAP, "!": BatchOrder.RESTART}


def follow(script: str) -> SequenceCheck:
    """Follow steps: a number, the content of its batch, and what a live batch must be; `r` after it: a replayed one.

    "2c?": batch 2 with content c is live, and a gap is before it. "restart": another incarnation.
    """
    sequence = SequenceCheck()
    for step in script.split():
        if step == "restart":
            sequence.restart()
            assert not sequence.has_begun
            continue
        seq, payload, order = int(step[:-2]), step[-2].encode(), step[-1]
        if order == "r":
            sequence.applied(seq, payload)
            continue
        assert sequence.classify(seq, payload) is _ORDERS[order], step
        if order == "+":
            sequence.applied(seq, payload)
        if order in "+=":
            sequence.note_live(seq, payload)
    return sequence


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("0a+ 1b+ 2c+", 3),
        ("0a+ 2c?", 1),
        ("1b?", 0),
        ("0a+ 1b+ 2c+ 0a!", 3),
        ("0a+ 1b+ 1b=", 2),
        ("0a+ 1b+ 1x!", 2),
        ("0a+ 1br 2cr 3dr 1b= 3x! 3d= 4e+", 5),  # replayed before they came live
        ("0a+ 1b+ restart 0x+", 1),
    ],
)
def test_a_batch_is_judged_by_its_number_and_content(script: str, expected: int) -> None:
    assert follow(script).expected == expected


def test_the_last_batch_applied_is_known_by_its_content() -> None:
    sequence = follow("0a+ 1b+")
    assert sequence.is_last_applied(b"b")
    assert not sequence.is_last_applied(b"a")


@pytest.mark.parametrize(
    ("script", "seqs", "num"),
    [
        ("0a+ 1b+", [2, 3, 4], 3),
        ("0a+ 1b+", [2, 3, 5, 6], 2),
        ("0a+ 1b+", [2, 2, 3], 1),
        ("0a+ 1b+", [3], 0),
        ("0a+ 1b+", [1, 2], 0),
        ("0a+ 1b+", [], 0),
        ("0a+ 1br", [1, 2], 0),  # batch 1 may still come live
        ("0a+ 1br 1b=", [2, 3], 2),
        (f"{2**64 - 2}ar {2**64 - 2}a=", [2**64 - 1, 0, 1], 1),  # the highest number is followed by none
    ],
)
def test_batches_in_their_order_are_counted_up_to_the_first_that_is_not(script: str, seqs: list[int], num: int) -> None:
    assert follow(script).num_in_order(np.array(seqs, np.uint64)) == num


def test_batches_that_are_applied_together_are_as_if_applied_one_by_one() -> None:
    sequence = follow("0a+")
    sequence.applied_live(3, b"d")
    assert sequence.expected == 4
    assert sequence.is_last_applied(b"d")
    orders = [sequence.classify(seq, payload) for seq, payload in ((3, b"d"), (3, b"x"), (4, b"e"))]
    assert orders == [BatchOrder.DUPLICATE, BatchOrder.RESTART, BatchOrder.APPLY]


async def test_a_connection_that_was_back_before_the_loss_was_seen_is_not_taken_for_unbroken() -> None:
    log = MemoryLog()
    template = PublisherSettings(model="-", worker="-", block_size=1, ledger_pages=10_000)
    registry = StreamRegistry(BridgeSettings(), template, SharedSink(MemorySink(log)))
    stream = StreamId("m", "default", "w", 0)
    ranks = RankStreams(stream, EngineDefaults(block_size=4), registry, BridgeCounters())
    engine_stream = EngineStream(ranks, registry.threads, BridgeCounters(), None)

    def shown() -> tuple[object, ...]:
        view = StreamReader().read_all(log.read(0))
        return view.pages, view.degraded_reason

    engine_stream.set_receiving(True)
    await engine_stream.take_live(Messages.of([(0, store(1))]))
    await async_wait_until(lambda: shown() == (pages(1), ""))
    await engine_stream.reconnected()
    await async_wait_until(lambda: shown() == (set(), ENGINE_UNHEARD))
    await engine_stream.ranks.close(1.0, clear=False)


# --- connections ----------------------------------------------------------------------------------------------------

BEGUN, MADE, LOST = zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


def after(*events: tuple[int, int]) -> Connections:
    connections = Connections()
    for event, descriptor in events:
        connections.take(event, descriptor)
    return connections


@pytest.mark.parametrize(
    ("events", "is_connected"),
    [
        ([(BEGUN, 5)], False),
        ([(BEGUN, 5), (MADE, 0)], True),
        ([(BEGUN, 5), (MADE, 0), (LOST, 5)], False),
        ([(BEGUN, 5), (MADE, 0), (LOST, 5), (BEGUN, 5), (MADE, 0)], True),
        ([(BEGUN, 5), (MADE, 0), (BEGUN, 6), (LOST, 6)], True),  # 6 never completed a handshake
        ([(BEGUN, 6), (BEGUN, 5), (MADE, 0), (LOST, 6)], True),
        ([(BEGUN, 6), (LOST, 6)], False),
        ([(MADE, 0)], False),  # of a connection that was not seen to begin
    ],
)
def test_a_connection_is_there_from_its_handshake_until_it_is_lost(
    events: list[tuple[int, int]], is_connected: bool
) -> None:
    assert bool(after(*events)) is is_connected


def test_a_message_shows_which_connection_shook_hands() -> None:
    connections = after((BEGUN, 5), (BEGUN, 6), (MADE, 0))
    assert connections.note_message(5)
    connections.take(LOST, 6)
    assert connections
    assert not connections.note_message(6)
    assert not connections.note_message(-1)


def test_ten_restarts_within_ten_seconds_are_too_many_for_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("bridge.stream.sequence_check.time", SimpleNamespace(monotonic=lambda: now))
    limit = RestartLimit()
    for _ in range(40):
        now += 1.2
        assert not limit.restarted()
    now += 10
    for _ in range(2):
        for number in range(10):
            assert not limit.is_exceeded()
            now += 1
            assert limit.restarted() == (number == 9)
        now += 29.9
        assert limit.is_exceeded()
        now += 0.1
    assert not limit.is_exceeded()
