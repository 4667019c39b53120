"""The order of batches, the incarnations that sent them, and connections that a subscriber reports."""

import numpy as np
import zmq

from bridge import BridgeSettings
from bridge.context import BridgeCounters
from bridge.decoding.decoder import Messages
from bridge.registry import StreamRegistry
from bridge.settings import EngineDefaults
from bridge.shared_sink import SharedSink
from bridge.stream.engine_stream import EngineStream
from bridge.stream.sequence_check import BatchOrder, SequenceCheck
from bridge.stream.subscriber import Connections
from kv_events.log.memory import MemoryLog
from kv_events.schema import ENGINE_UNHEARD
from kv_events.streams import StreamId
from publisher import PublisherSettings
from publisher.sinks import MemorySink
from tests.models.stream_reader import StreamReader
from tests.rigs.bridge import pages, store
from tests.support.waiting import async_wait_until


def live(sequence: SequenceCheck, seq: int, payload: bytes) -> BatchOrder:
    verdict = sequence.classify(seq, payload)
    if verdict is BatchOrder.APPLY:
        sequence.applied(seq, payload)
    if verdict in (BatchOrder.APPLY, BatchOrder.DUPLICATE):
        sequence.note_live(seq, payload)
    return verdict


def begun(*payloads: bytes) -> SequenceCheck:
    sequence = SequenceCheck()
    for seq, payload in enumerate(payloads):
        assert live(sequence, seq, payload) is BatchOrder.APPLY
    return sequence


def test_batches_in_their_order_are_applied() -> None:
    assert begun(b"a", b"b", b"c").expected == 3


def test_a_number_left_out_is_a_gap() -> None:
    assert live(begun(b"a"), 2, b"c") is BatchOrder.GAP
    assert live(SequenceCheck(), 1, b"b") is BatchOrder.GAP


def test_a_number_that_goes_back_is_a_restart() -> None:
    assert live(begun(b"a", b"b", b"c"), 0, b"a") is BatchOrder.RESTART


def test_the_last_one_again_is_a_duplicate_and_with_another_content_a_restart() -> None:
    assert live(begun(b"a", b"b"), 1, b"b") is BatchOrder.DUPLICATE
    assert live(begun(b"a", b"b"), 1, b"x") is BatchOrder.RESTART


def test_what_was_replayed_before_it_came_is_a_duplicate_if_it_is_the_same() -> None:
    sequence = begun(b"a")
    for seq, payload in ((1, b"b"), (2, b"c"), (3, b"d")):
        sequence.applied(seq, payload)
    assert live(sequence, 1, b"b") is BatchOrder.DUPLICATE
    assert live(sequence, 3, b"x") is BatchOrder.RESTART
    assert live(sequence, 3, b"d") is BatchOrder.DUPLICATE
    assert live(sequence, 4, b"e") is BatchOrder.APPLY


def test_the_last_batch_applied_is_known_by_its_content() -> None:
    sequence = begun(b"a", b"b")
    assert sequence.is_last_applied(b"b")
    assert not sequence.is_last_applied(b"a")


def test_after_a_restart_everything_starts_again() -> None:
    sequence = begun(b"a", b"b")
    sequence.restart()
    assert not sequence.has_begun
    assert live(sequence, 0, b"x") is BatchOrder.APPLY


def test_batches_in_their_order_are_counted_up_to_the_first_that_is_not() -> None:
    sequence = begun(b"a", b"b")
    for seqs, num in (([2, 3, 4], 3), ([2, 3, 5, 6], 2), ([2, 2, 3], 1), ([3], 0), ([1, 2], 0), ([], 0)):
        assert sequence.num_in_order(np.array(seqs, np.uint64)) == num


def test_the_highest_number_is_followed_by_none() -> None:
    sequence = SequenceCheck()
    sequence.applied(2**64 - 2, b"a")
    sequence.note_live(2**64 - 2, b"a")
    assert sequence.num_in_order(np.array([2**64 - 1, 0, 1], np.uint64)) == 1


def test_batches_that_are_applied_together_are_as_if_applied_one_by_one() -> None:
    sequence = begun(b"a")
    sequence.applied_live(3, b"d")
    assert sequence.expected == 4
    assert sequence.is_last_applied(b"d")
    assert live(sequence, 3, b"d") is BatchOrder.DUPLICATE
    assert live(sequence, 3, b"x") is BatchOrder.RESTART
    assert live(sequence, 4, b"e") is BatchOrder.APPLY


def test_batches_after_replayed_ones_are_in_order_once_the_replayed_ones_came() -> None:
    sequence = begun(b"a")
    sequence.applied(1, b"b")
    assert sequence.num_in_order(np.array([1, 2], np.uint64)) == 0
    assert live(sequence, 1, b"b") is BatchOrder.DUPLICATE
    assert sequence.num_in_order(np.array([2, 3], np.uint64)) == 2


async def test_a_connection_that_was_back_before_the_loss_was_seen_is_not_taken_for_unbroken() -> None:
    log = MemoryLog()
    template = PublisherSettings(model="-", worker="-", block_size=1, ledger_pages=10_000)
    registry = StreamRegistry(BridgeSettings(), template, SharedSink(MemorySink(log)))
    stream = StreamId("m", "default", "w", 0)
    engine_stream = EngineStream(stream, EngineDefaults(block_size=4), registry, BridgeCounters(), None)

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


def test_a_connection_is_there_from_its_handshake_until_it_is_lost() -> None:
    assert not after((BEGUN, 5))
    assert after((BEGUN, 5), (MADE, 0))
    assert not after((BEGUN, 5), (MADE, 0), (LOST, 5))
    assert after((BEGUN, 5), (MADE, 0), (LOST, 5), (BEGUN, 5), (MADE, 0))


def test_losing_what_never_shook_hands_changes_nothing() -> None:
    assert after((BEGUN, 5), (MADE, 0), (BEGUN, 6), (LOST, 6))
    assert after((BEGUN, 6), (BEGUN, 5), (MADE, 0), (LOST, 6))
    assert not after((BEGUN, 6), (LOST, 6))


def test_a_message_shows_which_connection_shook_hands() -> None:
    connections = after((BEGUN, 5), (BEGUN, 6), (MADE, 0))
    assert connections.note_message(5)
    connections.take(LOST, 6)
    assert connections
    assert not connections.note_message(6)
    assert not connections.note_message(-1)


def test_a_handshake_of_a_connection_that_was_not_seen_to_begin_is_ignored() -> None:
    assert not after((MADE, 0))
