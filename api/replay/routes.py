"""Routes that only the replay has: the extent of the log, a moment, and the difference of two."""

import asyncio
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from analysis.diff import diff, holdings_of
from api.openapi import answers, problem
from api.problems import ProblemError, ProblemKind
from api.queries.routes import json_response
from api.replay.markers import MarkerSearch
from api.replay.moments import OpenMoments
from indexer.replay import Timeline
from kv_events.codec import batch_or_none
from kv_events.http.log import BatchOfMoment, LogOverview, MomentOfLog, StreamDiff
from kv_events.log.moments import MOMENT_FORMS, LogMoment
from kv_events.records import LogRecord
from kv_events.schema import MEDIA

_OUTSIDE = problem(422, "The moment is outside the log, or a parameter is invalid")

AT_TEXT: Final = f"The moment: {MOMENT_FORMS}"

At = Annotated[str | None, Query(description=AT_TEXT)]


def past_routes(moments: OpenMoments, marks: MarkerSearch, name: str, damage: list[str]) -> APIRouter:
    """Return the routes. name: of the log. damage: what is known to be unusable besides what the search finds."""
    router = APIRouter(tags=["past"])

    @router.get("/span", response_class=Response, responses=answers(LogOverview, "The span of the log"))
    async def span() -> Response:
        """Return the extent of the log, with marks at faults, restarts and resyncs, which are found one by one."""
        await moments.refresh()
        marks.follow(moments.extent.next_index)
        extent = moments.extent
        first_time, last_time = extent.span_s or (0.0, 0.0)
        found = LogOverview(
            log=name,
            first_index=extent.first_index,
            next_index=extent.next_index,
            first_time=first_time,
            last_time=last_time,
            at=moments.default.text,
            marks=marks.marks,
            num_marks=marks.counts,
            marks_until=marks.next_index,
            marks_failure=marks.failure,
            damage=list(dict.fromkeys([*damage, *marks.damage])),
        )
        return json_response(found)

    @router.get("/moment", response_class=Response, responses={**answers(MomentOfLog, "The moment"), **_OUTSIDE})
    async def moment(at: At = None, step: Annotated[Literal["next", "previous"] | None, Query()] = None) -> Response:
        """Return a moment by its index in the log, with its newest batch.

        `step` selects the moment one batch later or earlier.
        """
        asked = await moments.parse(at)
        if step is not None:
            async with moments.opened(asked) as opened:
                start = opened.views.index
            asked = await moments.work(lambda timeline: _stepped(timeline, start, step))
        async with moments.opened(asked) as opened:
            found = MomentOfLog(
                at=opened.moment.text,
                index=opened.views.index,
                time=opened.views.now,
                records=opened.views.applier.records,
                batch=None if opened.newest is None else _batch(*opened.newest),
            )
        return json_response(found)

    comparing = asyncio.Lock()  # each comparison needs two moments in memory

    @router.get("/diff", response_class=Response, responses={**answers(list[StreamDiff], "Each stream"), **_OUTSIDE})
    async def difference(
        first: Annotated[str, Query(alias="from", description="The moment to compare with, in the forms of `at`.")],
        at: At = None,
    ) -> Response:
        """Return how the pages of each worker stream differ at two moments, with examples. `at` is the later one."""
        before, after = await moments.parse(first, "from"), await moments.parse(at)
        async with comparing, moments.opened(before) as one, moments.opened(after) as other:
            found = await asyncio.to_thread(lambda: diff(holdings_of(one.views), holdings_of(other.views)))
        return json_response(found)

    return router


def _stepped(timeline: Timeline, index: int, step: Literal["next", "previous"]) -> LogMoment:
    """Return the moment one batch after or before the one that ends at an index. Raises ProblemError."""
    found = timeline.event_from(index) if step == "next" else timeline.event_before(index)
    stop = None if found is None else found[0] + (step == "next")
    if stop is None or stop <= timeline.first_index:
        detail = f"step: the log has no moment {'after' if step == 'next' else 'before'} {index}"
        raise ProblemError(422, ProblemKind.OUTSIDE_THE_LOG, detail, "step", step)
    return LogMoment(index=stop)


def _batch(index: int, record: LogRecord) -> BatchOfMoment | None:
    batch = batch_or_none(record.payload)
    if batch is None:
        return None
    none, pages = dict.fromkeys((medium.value for medium in MEDIA), 0), batch.pages()
    return BatchOfMoment(
        index=index,
        time=record.timestamp_ms / 1000,
        stream=batch.stream.key,
        worker=batch.stream.worker,
        epoch=batch.epoch,
        seq=batch.seq,
        stored=none | pages.stored,
        removed=none | pages.removed,
    )
