"""Requests of a workload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from kv_events.hashing import U32Array

NO_TOKENS: U32Array = np.zeros(0, np.uint32)


class Request(NamedTuple):
    """One request with its prompt."""

    arrival_s: float
    """Arrival, in seconds since the workload began."""
    token_ids: U32Array
    """uint32[n], the prompt."""
    output_tokens: U32Array = NO_TOKENS
    """uint32[m], the tokens that the engine will generate; empty if the workload does not contain them."""
    session: str = ""
    """The conversation or loop that it belongs to."""
    extra_key: str | None = None
    """Namespace of its pages (adapter, cache salt)."""


class Requests(Protocol):
    """A workload, which can be iterated any number of times, in order of arrival. A list of requests is one."""

    def __len__(self) -> int:
        """Number of requests."""
        ...

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the same requests every time."""
        ...
