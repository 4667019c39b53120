"""The same bytes get the same answers in all ways of the HTTP service."""

import asyncio

import pytest
import uvloop

from api.fast.fast_path import FastPath
from tests.fuzz.raw_http import compare_many
from tests.support.effort import num_examples

STREAMS = num_examples(3_000)


@pytest.mark.random_cases
def test_streams_of_bytes_get_the_same_answers_in_all_ways() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        number, differing = runner.run(compare_many(0, lambda number: number < STREAMS))
    assert number == STREAMS
    assert not differing, "\n".join(map(str, differing))


def test_a_way_that_answers_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = FastPath.answer
    monkeypatch.setattr(FastPath, "answer", lambda *args: (ordinary(*args) or b"").replace(b"scores", b"score") or None)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        _, differing = runner.run(compare_many(0, lambda number: number < 20))
    assert differing
