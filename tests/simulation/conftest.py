"""Workers that are not started, and an index that receives their events on demand."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from simulation import Request, SimulationSettings
from simulation.run import TimedFleet


class TimelessFleet(TimedFleet):
    """A fleet that serves requests without delay."""

    def serve(self, request: Request) -> int:
        """Route and serve a request, and apply its events. Returns the number of the worker."""
        self.advance(request.arrival_s)
        chosen = self.run.step(request)
        self.deliver(chosen)
        return chosen


MakeFleet = Callable[..., TimelessFleet]


@pytest.fixture
def make_fleet() -> MakeFleet:
    """Creates a fleet of `workers`. By default, pages have 16 tokens and each worker has room for 64 pages."""

    def make(policy: str = "overlap-load", **changes: object) -> TimelessFleet:
        values = {"workers": 3, "capacity_tokens": 1024, "page_size": 16} | changes
        return TimelessFleet(SimulationSettings(**values), policy)  # type: ignore[arg-type]

    return make


@dataclass
class Prompts:
    """Random prompts that share nothing unless a test combines them."""

    random: np.random.Generator

    def tokens(self, length: int) -> np.ndarray:
        """Return random tokens, uint32[length]."""
        return self.random.integers(0, 1000, length, dtype=np.uint32)

    def request(self, length: int, arrival_s: float = 0.0) -> Request:
        """Return a request without output."""
        return Request(arrival_s, self.tokens(length))


@pytest.fixture
def prompts() -> Prompts:
    """Prompts with a fixed seed."""
    return Prompts(np.random.default_rng(5))
