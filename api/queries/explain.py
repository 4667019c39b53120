"""POST /explain: why each worker holds no more of a prompt, from the log that the service keeps."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from math import isfinite
from pathlib import Path

import msgspec
from starlette.responses import Response

from analysis.explain.asked_prompt import ExplainError, ExplainJob
from api.problems import ProblemError, ProblemKind
from api.queries.body_formats import BodyFormat, LargeBodies, decode_as, slimmed
from api.queries.parsing import BY_ANY, decode_question
from api.queries.routes import RawEndpoint, json_response
from kv_events.errors import InvalidValueError
from kv_events.http.explanations import ExplainRequest
from kv_events.http.parsed_query import ParsedQuery, PromptArray
from kv_events.log.moments import LogMoment
from kv_events.runtime.helper_process import HelperEndedError, helper_results

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 2**20
MAX_NUMBERS = 131_072
"""Tokens or hashes of a prompt."""
_BUSY_RETRY_S = 5


class ExplainRoute:
    """The route. A process of its own reads the log, one at a time and for a limited time."""

    def __init__(self, folder: Path | None, timeout_s: float, present: Callable[[], LogMoment] = LogMoment) -> None:
        """folder: the event log with the records that this service applies. None: there is none.

        present: the moment of a request that names none in its body. `LogMoment()`: the end of the log.
        """
        self._present = present
        self._folder = folder
        self._timeout_s = timeout_s
        self._is_busy = False
        self._in_thread = LargeBodies().in_thread

    def endpoints(self) -> dict[str, RawEndpoint]:
        """Path -> ASGI application for POST."""
        return {"/explain": RawEndpoint(self._explain, MAX_BODY_BYTES)}

    async def _explain(self, body: bytes | bytearray, body_format: BodyFormat) -> Response:
        if self._folder is None:
            detail = (
                "this service keeps no log to explain from; start it with --record FOLDER, or run "
                "`kvsight record` and `kvsight explain`"
            )
            raise ProblemError(404, ProblemKind.NO_LOG, detail)
        if self._is_busy:
            detail = "another explanation is being made, and only one is made at a time"
            raise ProblemError(429, ProblemKind.EXPLAINING, detail, retry_after_s=_BUSY_RETRY_S)
        self._is_busy = True
        try:
            job = await self._job(self._folder, body, body_format)
            return json_response(await self._explained(job))
        finally:
            self._is_busy = False

    async def _job(self, folder: Path, body: bytes | bytearray, body_format: BodyFormat) -> ExplainJob:
        """Decode and check a request. Raises ProblemError."""
        present = self._present()
        request, question, numbers = await self._in_thread(body, _decoded, body, body_format)
        if request.at is not None and not isfinite(request.at):  # msgpack has such numbers
            raise ProblemError.of_value(InvalidValueError("at", request.at, "seconds since 1970"))
        if len(numbers) > MAX_NUMBERS:
            fault = InvalidValueError(f"len({question.field})", len(numbers), f"at most {MAX_NUMBERS}")
            raise ProblemError.of_value(fault)
        return ExplainJob(
            folder=str(folder),
            query=question,
            numbers=numbers.tobytes(),
            named=request.worker,
            moment=present if request.at is None else LogMoment(time_s=request.at),
        )

    async def _explained(self, job: ExplainJob) -> bytes:
        """Return the explanation as JSON. Raises ProblemError."""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                aclosing(helper_results("explanation", "analysis.explain", job=job)) as results,
            ):
                (answer,) = [each async for each in results]
        except TimeoutError:
            detail = f"not explained within {self._timeout_s:g} s; run `kvsight explain` on the log"
            raise ProblemError(503, ProblemKind.UNAVAILABLE, detail) from None
        except HelperEndedError as error:
            logger.warning("%s", error)
            detail = "the explanation failed; the service's log says why"
            raise ProblemError(503, ProblemKind.UNAVAILABLE, detail) from None
        refusal = msgspec.json.decode(answer, type=ExplainError)
        if refusal.detail:
            raise _refused(refusal, job)
        return answer


def _decoded(body: bytes | bytearray, body_format: BodyFormat) -> tuple[ExplainRequest, ParsedQuery, PromptArray]:
    rest, _ = slimmed(body, body_format)
    request = decode_as(ExplainRequest, rest, body_format)
    return request, *decode_question(body, body_format, BY_ANY)


def _refused(refusal: ExplainError, job: ExplainJob) -> ProblemError:
    match refusal.field:
        case "model_name":
            return ProblemError(404, ProblemKind.UNKNOWN_MODEL, refusal.detail, "model_name", job.query.model)
        case "worker":
            return ProblemError(404, ProblemKind.UNKNOWN_WORKER, refusal.detail, "worker", job.prompt.worker)
        case "at":
            return ProblemError(422, ProblemKind.INVALID_VALUE, refusal.detail, "at", job.moment.time_s)
        case _:
            return ProblemError(503, ProblemKind.UNAVAILABLE, refusal.detail)
