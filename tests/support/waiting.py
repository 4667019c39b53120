"""Waits for a condition with a time limit."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def wait_until(condition: Callable[[], Any], deadline_s: float = 30.0, what: str = "") -> None:
    """Return once `condition()` is true. Raises AssertionError naming `what` after `deadline_s` seconds."""
    start = began = time.monotonic()
    while not condition():
        if time.monotonic() > start + deadline_s:
            raise AssertionError(_complaint(condition, deadline_s, what))
        time.sleep(_pause_s(start, began))
        began = time.monotonic()


async def async_wait_until(
    condition: Callable[[], Any | Awaitable[Any]], deadline_s: float = 30.0, what: str = ""
) -> None:
    """`wait_until` inside an event loop; `condition` may be a coroutine function."""
    start = time.monotonic()
    while True:
        began = time.monotonic()
        met = condition()
        if inspect.isawaitable(met):
            met = await met
        if met:
            return
        if time.monotonic() > start + deadline_s:
            raise AssertionError(_complaint(condition, deadline_s, what))
        await asyncio.sleep(_pause_s(start, began))


async def async_wait_for(
    ask: Callable[[], Awaitable[_T]], is_right: Callable[[_T], bool], deadline_s: float = 30.0, what: str = ""
) -> _T:
    """Ask again and again until the answer is right, and return it. Raises as `wait_until` does."""
    answer: _T

    async def has_come() -> bool:
        nonlocal answer
        answer = await ask()
        return is_right(answer)

    await async_wait_until(has_come, deadline_s, what)
    return answer


def _pause_s(start: float, began: float) -> float:
    """The pause after a look that began then: longer than the look, because it slows down what is waited for, and in
    proportion to the time since the start, so that short waits end soon and long ones cost little.
    """
    now = time.monotonic()
    return min(max(0.001, 3 * (now - began), (now - start) / 20), 0.1)


def _complaint(condition: Callable[[], Any], deadline_s: float, what: str) -> str:
    return f"not within {deadline_s:g} s: {what or getattr(condition, '__qualname__', condition)}"
