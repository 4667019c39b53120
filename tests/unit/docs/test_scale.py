"""The tables of docs/scale.md are what benchmarks/paper.py calculates from the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import paper
from indexer.index import OverlapIndex
from kv_events.schema import NUM_MEDIA

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "scale.md").read_text()


def test_the_tables_are_calculated() -> None:
    lines = PAGE.splitlines()
    wanted = paper.tables()
    assert len(wanted) > 30
    assert [line for line in wanted if line.rstrip(".") not in {each.rstrip(".") for each in lines}] == []


def test_a_constant_that_is_not_measured_is_an_error() -> None:
    with pytest.raises(LookupError, match="no row 'answers by magic'"):
        paper.measured("answers by magic")


def test_more_load_needs_more() -> None:
    few, many = paper.FLEETS[1], paper.FLEETS[2]
    for mode in (paper.by_namespace, paper.by_partition):
        assert mode(few).processes < mode(many).processes
        assert mode(many).applying <= paper.BUSY
    assert paper.replicas(many).processes == 0  # one core cannot apply everything


@pytest.mark.parametrize("streams", [64, 100, 1000])
def test_a_holder_set_is_as_large_as_in_the_index(streams: int) -> None:
    index = OverlapIndex(max_pages=1024, max_streams=1024)
    for _ in range(streams):
        index.add_stream()
    assert index.most_streams * NUM_MEDIA // 8 == paper.set_bytes(streams)
