"""Which batches are applied: by epoch, number and silence alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.position import Admission, Position
from tests.support.effort import num_examples

AT_5 = Position(epoch=10, next_seq=5)
AFTER_A_GAP = Position(epoch=10, next_seq=900, first_missing=5)


@pytest.mark.parametrize(
    ("position", "epoch", "seq", "is_silent", "admission", "after"),
    [
        (Position(), 10, 0, False, Admission.NEW_EPOCH, Position(10, 1)),
        (Position(), 10, 7, False, Admission.NEW_EPOCH_LATE, Position(10, 8, 0)),
        (AT_5, 10, 5, False, Admission.NEXT, Position(10, 6)),
        (AT_5, 10, 4, False, Admission.DUPLICATE, AT_5),
        (AT_5, 10, 899, False, Admission.GAP, AFTER_A_GAP),
        (AT_5, 10, 2**63 - 1, False, Admission.GAP, Position(10, 2**63, 5)),
        (AT_5, 11, 0, False, Admission.NEW_EPOCH, Position(11, 1)),
        (AT_5, 11, 3, False, Admission.NEW_EPOCH_LATE, Position(11, 4, 0)),
        (AT_5, 9, 0, False, Admission.OLD_EPOCH, AT_5),
        (AT_5, 9, 3, False, Admission.OLD_EPOCH, AT_5),
        (AFTER_A_GAP, 10, 900, False, Admission.NEXT, Position(10, 901, 5)),
        (AFTER_A_GAP, 10, 1000, False, Admission.GAP, Position(10, 1001, 5)),
        (AFTER_A_GAP, 10, 5, False, Admission.STEP_BACK, Position(10, 6, 5)),
        (AFTER_A_GAP, 10, 4, False, Admission.DUPLICATE, AFTER_A_GAP),
        (AFTER_A_GAP.without_gap(), 10, 5, False, Admission.DUPLICATE, Position(10, 900)),
        # silence: any sender is followed
        (AT_5, 9, 0, True, Admission.NEW_EPOCH, Position(9, 1)),
        (AT_5, 9, 3, True, Admission.NEW_EPOCH_LATE, Position(9, 4, 0)),
        (AT_5, 10, 5, True, Admission.NEXT, Position(10, 6)),
        (AT_5, 10, 2, True, Admission.STEP_BACK, Position(10, 3, 2)),
        (AFTER_A_GAP, 10, 2, True, Admission.STEP_BACK, Position(10, 3, 2)),
    ],
)
def test_the_verdict_on_a_batch(
    position: Position, epoch: int, seq: int, is_silent: bool, admission: Admission, after: Position
) -> None:
    assert position.after(epoch, seq, is_silent=is_silent) == (admission, after)


BATCHES = st.tuples(st.integers(0, 4), st.integers(0, 6), st.booleans())


@settings(max_examples=num_examples(300))
@given(st.lists(BATCHES, max_size=30), BATCHES)
def test_no_position_shuts_out_a_publisher(past: list[tuple[int, int, bool]], living: tuple[int, int, bool]) -> None:
    position = Position()
    for epoch, seq, is_silent in past:
        position = position.after(epoch, seq, is_silent=is_silent)[1]
    epoch, first, _ = living
    admission, position = position.after(epoch, first, is_silent=True)
    assert admission.is_applied
    for seq in range(first + 1, first + 5):
        admission, position = position.after(epoch, seq, is_silent=False)
        assert admission is Admission.NEXT


@settings(max_examples=num_examples(300))
@given(st.integers(0, 20), st.lists(st.integers(0, 20), max_size=10))
def test_a_batch_is_applied_once_while_none_is_missing(length: int, again: list[int]) -> None:
    position = Position()
    for seq in range(length):
        admission, position = position.after(1, seq, is_silent=False)
        assert admission.is_applied
    for seq in again:
        if seq < length:
            assert position.after(1, seq, is_silent=False) == (Admission.DUPLICATE, position)
