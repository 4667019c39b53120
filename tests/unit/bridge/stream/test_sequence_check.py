"""The order of batches and the incarnations that sent them."""

from __future__ import annotations

from bridge.stream.sequence_check import SequenceCheck, Verdict


def live(sequence: SequenceCheck, seq: int, payload: bytes) -> Verdict:
    verdict = sequence.judge(seq, payload)
    if verdict is Verdict.APPLY:
        sequence.applied(seq, payload)
    if verdict in (Verdict.APPLY, Verdict.DUPLICATE):
        sequence.note_live(seq, payload)
    return verdict


def begun(*payloads: bytes) -> SequenceCheck:
    sequence = SequenceCheck()
    for seq, payload in enumerate(payloads):
        assert live(sequence, seq, payload) is Verdict.APPLY
    return sequence


def test_batches_in_their_order_are_applied() -> None:
    assert begun(b"a", b"b", b"c").expected == 3


def test_a_number_left_out_is_a_gap() -> None:
    assert live(begun(b"a"), 2, b"c") is Verdict.GAP
    assert live(SequenceCheck(), 1, b"b") is Verdict.GAP


def test_a_number_that_goes_back_is_a_restart() -> None:
    assert live(begun(b"a", b"b", b"c"), 0, b"a") is Verdict.RESTART


def test_the_last_one_again_is_a_duplicate_and_with_another_content_a_restart() -> None:
    assert live(begun(b"a", b"b"), 1, b"b") is Verdict.DUPLICATE
    assert live(begun(b"a", b"b"), 1, b"x") is Verdict.RESTART


def test_what_was_replayed_before_it_came_is_a_duplicate_if_it_is_the_same() -> None:
    sequence = begun(b"a")
    for seq, payload in ((1, b"b"), (2, b"c"), (3, b"d")):
        sequence.applied(seq, payload)
    assert live(sequence, 1, b"b") is Verdict.DUPLICATE
    assert live(sequence, 3, b"x") is Verdict.RESTART
    assert live(sequence, 3, b"d") is Verdict.DUPLICATE
    assert live(sequence, 4, b"e") is Verdict.APPLY


def test_the_last_batch_applied_is_known_by_its_content() -> None:
    sequence = begun(b"a", b"b")
    assert sequence.is_last_applied(b"b")
    assert not sequence.is_last_applied(b"a")


def test_after_a_restart_everything_starts_again() -> None:
    sequence = begun(b"a", b"b")
    sequence.restart()
    assert not sequence.has_begun
    assert live(sequence, 0, b"x") is Verdict.APPLY
