"""The order of batches and the incarnations that sent them."""

from __future__ import annotations

import numpy as np

from bridge.stream.sequence_check import BatchOrder, SequenceCheck


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
