"""The contract of a fault, and the table of all faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import NamedTuple, TypeAlias

from tests.chaos.rig import Rig

Course: TypeAlias = Callable[[Rig, Random], Iterator[None]]
"""A generator function: it injects the fault, yields once, and heals it. Everything is drawn from `Random`."""


class Fault(NamedTuple):
    """A kind of fault."""

    name: str
    course: Course
    touches: frozenset[str]
    """Parts that it breaks, or that it needs. Two faults overlap only if they touch different parts."""
    within_s: float
    """Seconds from the end of the fault in which all views must be right."""
    hold_s: float
    """Seconds for which the fault lasts."""


FAULTS: dict[str, Fault] = {}
"""All faults, by name."""


def fault(
    name: str, *, touches: Iterable[str], within_s: float = 10.0, hold_s: float = 2.0
) -> Callable[[Course], Course]:
    """Register a fault. It leaves as many engines and services running as it found.

    The time until all views are right is counted from its return.
    """

    def register(course: Course) -> Course:
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, course, frozenset(touches), within_s, hold_s)
        return course

    return register
