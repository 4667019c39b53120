"""Answers that many viewers share: each is computed once, in slices, and used for a while."""

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Hashable
from typing import Any, Final, TypeVar

from indexer.slices import Slices

_MIN_AGE_S: Final = 0.9
"""Answers are used for so long, a little less than the second at which pages ask."""
_AGE_PER_COST: Final = 100
"""An answer that takes long is used for so many times as long: each costs a hundredth of a core at most."""
_MAX_AGE_S: Final = 60.0
_SLICE_S: Final = 0.00025
_MAX_KEPT: Final = 16

_T = TypeVar("_T")


class AnswerCache:
    """Keeps the newest answers. For one event loop."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[float, asyncio.Task[Any]]] = OrderedDict()
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def get(self, kind: str, of: Hashable, compute: Callable[[], Generator[None, None, _T]]) -> _T:
        """Return what `compute` returns, or returned for an equal `of` not long ago. Raises what it raises.

        kind: one of a few words. Answers of one kind are computed one after the other.
        """
        key = kind, of
        until, task = self._kept.get(key, (0.0, None))
        if task is None or (task.done() and (time.monotonic() > until or task.cancelled() or task.exception())):
            task = asyncio.create_task(self._compute(key, compute()), name=kind)
            self._kept[key] = (0.0, task)
            self._kept.move_to_end(key)
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        answer: _T = await asyncio.shield(task)
        return answer

    async def _compute(self, key: tuple[str, Hashable], steps: Generator[None, None, _T]) -> _T:
        async with self._turns[key[0]]:
            slices = Slices(_SLICE_S)
            answer: _T = await slices.run(steps)
        age_s = min(max(_MIN_AGE_S, _AGE_PER_COST * slices.spent_s), _MAX_AGE_S)
        if key in self._kept:
            self._kept[key] = (time.monotonic() + age_s, self._kept[key][1])
        return answer
