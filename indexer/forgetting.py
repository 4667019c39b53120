"""Removal of workers that are silent, and of those that a caller selects."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import NamedTuple

from indexer.applier import Applier
from indexer.freshness import Freshness
from indexer.progress import Progress
from indexer.slices import Slices
from kv_events.streams import StreamId


class _Demand(NamedTuple):
    streams: Collection[StreamId]
    goal: Mapping[int, int]
    done: asyncio.Future[None]


class Forgetting:
    """Drops views with their pages, between two records."""

    def __init__(self, applier: Applier, freshness: Freshness, forget_after_s: float, slices: Slices) -> None:
        self._applier = applier
        self._freshness = freshness
        self._forget_after_s = forget_after_s
        self._slices = slices
        self._demands: list[_Demand] = []

    async def demand(self, streams: Collection[StreamId], goal: Mapping[int, int]) -> None:
        """Wait until streams have been dropped, once the event log is applied up to a goal: partition -> offset."""
        demand = _Demand(streams, goal, asyncio.get_running_loop().create_future())
        self._demands.append(demand)
        await demand.done

    async def drop_demanded(self, progress: Progress) -> None:
        """Drop the streams of demands whose goal has been reached."""
        if not self._demands:
            return
        demands, self._demands = self._demands, []
        for demand in demands:
            if not progress.has_reached(demand.goal):
                self._demands.append(demand)
                continue
            for stream in demand.streams:
                if self._applier.namespaces.view(stream) is not None:
                    await self._drop(stream)
            if not demand.done.done():
                demand.done.set_result(None)

    async def drop_silent(self) -> None:
        """Drop workers that have been silent for too long, and refused ones that have expired."""
        self._applier.namespaces.drop_refused(self._freshness.expired_before())
        for view in self._applier.namespaces.views:
            if self._freshness.silence_s(view) > self._forget_after_s:
                await self._drop(view.stream)

    async def _drop(self, stream: StreamId) -> None:
        await self._slices.run(self._applier.namespaces.forget(stream))
