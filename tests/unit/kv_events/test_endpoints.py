"""ZMQ addresses."""

from __future__ import annotations

import pytest

from kv_events.endpoints import endpoint_of_rank, has_wildcard
from kv_events.errors import InvalidValueError


@pytest.mark.parametrize(
    ("endpoint", "wildcard"),
    [
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://10.0.0.1:5557", False),
        ("tcp://[fe80::1]:5557", False),
        ("ipc:///run/kv", False),
        ("inproc://kv", False),
    ],
)
def test_an_address_with_a_wildcard_is_found(endpoint: str, wildcard: bool) -> None:
    assert has_wildcard(endpoint) is wildcard


def test_ranks_count_ports_up() -> None:
    assert endpoint_of_rank("tcp://h:5557", 0) == "tcp://h:5557"
    assert endpoint_of_rank("tcp://h:5557", 3) == "tcp://h:5560"
    assert endpoint_of_rank("inproc://kv", 2) == "inproc://kv_dp2"


@pytest.mark.parametrize("endpoint", ["tcp://h:65535", "ipc:///run/kv"])
def test_an_address_that_has_no_place_for_a_rank_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidValueError, match="endpoint"):
        endpoint_of_rank(endpoint, 1)
