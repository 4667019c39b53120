"""The routes from which the page takes its data. They work for any scene: now, or a moment of the past."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from api.decisions.window import WINDOW_S
from api.openapi import answers, problem
from api.page.answer_cache import AnswerCache
from api.page.fleet import describe_fleet
from api.page.residency import MAX_ROWS, Wanted, describe_residency
from api.page.state import PageStateAt
from api.queries.routes import json_response
from kv_events.http.fleet import DecisionFunnel, Fleet, Residency

_MAX_WORKERS = 4096
_MIN_RANGE_S, _MAX_RANGE_S = 600, 172_800

_BAD_PARAMETER = problem(422, "A parameter is invalid")

At = Annotated[str | None, Query(description="A moment of the log, in `kvsight replay --serve`. Default: the newest.")]


def page_routes(open_scene: PageStateAt) -> APIRouter:
    """Return the routes. Viewers of the same scene share its descriptions."""
    router = APIRouter(tags=["page"])
    shared = AnswerCache()

    @router.get("/fleet", response_class=Response, responses={**answers(Fleet, "The fleet"), **_BAD_PARAMETER})
    async def fleet(
        at: At = None,
        limit: Annotated[int, Query(ge=1, le=_MAX_WORKERS)] = 200,
        contains: Annotated[str, Query(max_length=256)] = "",
        worker: str | None = None,
    ) -> Response:
        """Return whether the views are true, and all workers, those in trouble first.

        `contains` selects workers by a part of their names, `worker` by the whole name. At most `limit` are returned.
        """
        scene = await open_scene(at)
        found = await shared.get("fleet", scene.key, lambda: describe_fleet(scene))
        return json_response(found.select(limit, contains, worker))

    @router.get(
        "/residency",
        response_class=Response,
        responses={
            **answers(Residency, "The most shared prefixes"),
            **problem(404, "The model is unknown"),
            **_BAD_PARAMETER,
        },
    )
    async def residency(
        at: At = None,
        model: str | None = None,
        tenant: str | None = None,
        block_size: Annotated[int | None, Query(ge=1)] = None,
        worker: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 100,
    ) -> Response:
        """Return the prefixes of which most is held more than once, and how much of each every worker holds.

        Without a model, the index with most pages is shown. `worker` selects prefixes that it holds.
        """
        scene = await open_scene(at)
        wanted = Wanted(model, tenant, block_size, worker)
        of_all = wanted._replace(worker=None)
        found = await shared.get("residency", (scene.key, of_all), lambda: describe_residency(scene, of_all))
        if worker is not None and not found.shows_all:
            found = await shared.get("residency", (scene.key, wanted), lambda: describe_residency(scene, wanted))
        return json_response(found.select(limit, worker))

    @router.get(
        "/funnel", response_class=Response, responses={**answers(DecisionFunnel, "The funnel"), **_BAD_PARAMETER}
    )
    async def funnel(
        at: At = None, range_s: Annotated[float, Query(ge=_MIN_RANGE_S, le=_MAX_RANGE_S)] = WINDOW_S
    ) -> Response:
        """Return what routers reported and services chose in the last hour, what engines reused, and what was lost.

        `range_s` is the time that `curve` covers. A moment of the past has that of an hour.
        """
        scene = await open_scene(at)
        return json_response(scene.funnel(scene.views.now(), range_s))

    return router
