"""The routes from which the page takes its data. They work for any scene: now, or a moment of the past."""

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Generator, Hashable
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Query
from starlette.responses import Response

from api.decisions.window import WINDOW_S
from api.openapi import answers, problem
from api.page.fleet import describe_fleet
from api.page.residency import MAX_ROWS, Wanted, describe_residency
from api.page.state import PageState
from api.prompts.renderer import PromptRenderer
from api.queries.body_formats import Body, BodyFormat, decode_as
from api.queries.routes import RawEndpoint, json_response
from indexer.slices import Slices
from kv_events.http.fleet import DecisionFunnel, Fleet, Residency, Tokenized, TokenizeRequest

_MAX_TEXT_BYTES: Final = 2**20
_TOKENIZE_DEADLINE_S: Final = 30.0
_MIN_AGE_S: Final = 0.9
"""Answers are used for so long, a little less than the second at which pages ask."""
_AGE_PER_COST: Final = 30
"""An answer is kept for this many times the time that it took, so that it costs a thirtieth of a core at most."""
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


_MAX_WORKERS = 4096
_MIN_RANGE_S, _MAX_RANGE_S = 600, 172_800

_BAD_PARAMETER = problem(422, "A parameter is invalid")

At = Annotated[str | None, Query(description="A moment of the log, in `kvsight replay --serve`. Default: the newest.")]


def page_routes(open_scene: Callable[[str | None], Awaitable[PageState]]) -> APIRouter:
    """Return the routes. Viewers of the same scene share its descriptions. open_scene: see `Service.page_state`."""
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
        if worker is not None and len(found.residency.columns) < found.residency.num_columns:
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


def tokenize_endpoint(renderer: PromptRenderer) -> RawEndpoint:
    """Return what answers POST /tokenize: the tokens of a text, so that the page can ask about it."""

    async def tokenize(body: Body, body_format: BodyFormat) -> Response:
        request = decode_as(TokenizeRequest, body, body_format)
        asked = {"model": request.model_name, "prompt": request.text}
        found = await renderer.tokens(asked, _TOKENIZE_DEADLINE_S)
        return json_response(Tokenized(token_ids=found.token_ids.tolist()))

    return RawEndpoint(tokenize, _MAX_TEXT_BYTES)
