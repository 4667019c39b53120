"""Untrusted bytes are accepted or refused as documented: no crash and no unbounded memory."""

import pytest

from tests.fuzz.runner import check, within_bounds
from tests.fuzz.targets import Target, targets
from tests.support.effort import num_examples

pytestmark = pytest.mark.timing("one step of a flooded bridge must end within its bound")

TARGETS = targets()
EXAMPLES = num_examples(80)


@pytest.mark.random_cases
@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_stands_hostile_bytes(name: str) -> None:
    check(TARGETS[name], EXAMPLES, number=0)


@pytest.mark.parametrize("name", TARGETS)
def test_the_examples_themselves_are_taken(name: str) -> None:
    for example in TARGETS[name].examples:
        TARGETS[name].run(example)


def test_a_decoder_that_raises_is_found() -> None:
    def fragile(data: bytes) -> None:
        if b"\xff" in data:
            raise KeyError("unexpected")

    with pytest.raises(KeyError):
        check(Target([b"\x01\x02\x03"], fragile), 150, number=0)


def test_memory_beyond_the_bound_is_found() -> None:
    with pytest.raises(AssertionError, match="took"):
        check(Target([b"\x01"], lambda _data: bytearray(2**28).clear()), 1, number=0)
    within_bounds(lambda _data: None, b"")
