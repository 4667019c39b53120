"""Which batch is the next one, and of whom."""

from __future__ import annotations

from bridge.stream.continuity import Continuity, Verdict


def live(continuity: Continuity, seq: int, payload: bytes) -> Verdict:
    verdict = continuity.judge(seq, payload)
    if verdict is Verdict.APPLY:
        continuity.applied(seq, payload)
    if verdict in (Verdict.APPLY, Verdict.DUPLICATE):
        continuity.came_live(seq, payload)
    return verdict


def begun(*payloads: bytes) -> Continuity:
    continuity = Continuity()
    for seq, payload in enumerate(payloads):
        assert live(continuity, seq, payload) is Verdict.APPLY
    return continuity


def test_batches_in_their_order_are_applied() -> None:
    assert begun(b"a", b"b", b"c").expected == 3


def test_a_number_left_out_is_a_gap() -> None:
    assert live(begun(b"a"), 2, b"c") is Verdict.GAP
    assert live(Continuity(), 1, b"b") is Verdict.GAP


def test_a_number_that_goes_back_is_a_restart() -> None:
    assert live(begun(b"a", b"b", b"c"), 0, b"a") is Verdict.RESTART


def test_the_last_one_again_is_a_duplicate_and_with_another_content_a_restart() -> None:
    assert live(begun(b"a", b"b"), 1, b"b") is Verdict.DUPLICATE
    assert live(begun(b"a", b"b"), 1, b"x") is Verdict.RESTART


def test_what_was_replayed_before_it_came_is_a_duplicate_if_it_is_the_same() -> None:
    continuity = begun(b"a")
    for seq, payload in ((1, b"b"), (2, b"c"), (3, b"d")):
        continuity.applied(seq, payload)
    assert live(continuity, 1, b"b") is Verdict.DUPLICATE
    assert live(continuity, 3, b"x") is Verdict.RESTART
    assert live(continuity, 3, b"d") is Verdict.DUPLICATE
    assert live(continuity, 4, b"e") is Verdict.APPLY


def test_the_last_batch_applied_is_known_by_its_content() -> None:
    continuity = begun(b"a", b"b")
    assert continuity.is_last_applied(b"b")
    assert not continuity.is_last_applied(b"a")


def test_after_a_restart_everything_begins_anew() -> None:
    continuity = begun(b"a", b"b")
    continuity.restart()
    assert not continuity.has_begun
    assert live(continuity, 0, b"x") is Verdict.APPLY
