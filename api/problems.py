"""Problem documents according to RFC 9457, which answer every error of a caller.

`error` repeats `detail` for clients of Dynamo.
"""

from __future__ import annotations

from enum import StrEnum
from http import HTTPStatus
from typing import Self

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kv_events.errors import InvalidValueError, KvsightError, shorten
from kv_events.http.service import ProblemDocument

MEDIA_TYPE = "application/problem+json"
_LONGEST_VALUE = 80


class ProblemKind(StrEnum):
    """The kinds of problems, which are the end of `type`. Each has a title."""

    heading: str

    def __new__(cls, kind: str, heading: str) -> Self:
        """heading: the title of its documents."""
        member = str.__new__(cls, kind)
        member._value_, member.heading = kind, heading
        return member

    MALFORMED_BODY = "malformed-body", "The body cannot be read"
    MISSING_FIELD = "missing-field", "A field is missing"
    INVALID_VALUE = "invalid-value", "A value is invalid"
    BLOCK_SIZE = "block-size", "The workers use another block size, or several"
    SALT_WITH_LOCAL_HASHES = "salt-with-local-hashes", "A salt cannot be applied to hashes"
    UNKNOWN_MODEL = "unknown-model", "No worker serves this model"
    UNKNOWN_WORKER = "unknown-worker", "No such worker"
    AMBIGUOUS_WORKER = "ambiguous-worker", "Several streams match"
    ALREADY_REGISTERED = "already-registered", "Already registered with other values"
    TOO_MANY_REGISTRATIONS = "too-many-registrations", "No room for another registration"
    KERNELS_LOADING = "kernels-loading", "Kernels are being compiled"
    REGISTRATIONS_AWAY = "registrations-away", "Registrations cannot be changed at the moment"
    INVALID_ENDPOINT = "invalid-endpoint", "Events cannot be read from the address"
    ENDPOINT_NOT_ALLOWED = "endpoint-not-allowed", "This service may not connect to the address"
    ALREADY_RESERVED = "already-reserved", "The id of a reservation is in use"
    UNKNOWN_RESERVATION = "unknown-reservation", "No such reservation, selection or worker"
    NOT_EMBEDDED = "not-embedded", "This service reads no engines itself"
    CONTENT_TYPE = "content-type", "The content type is not supported"
    CONTENT_ENCODING = "content-encoding", "The content coding is not supported"
    BODY_TOO_LARGE = "body-too-large", "The body is too large"
    UNAUTHORIZED = "unauthorized", "A token is needed"
    OTHER_SITE = "other-site", "A page of another site may not do this"
    OTHER_HOST = "other-host", "This service does not have that name"
    FORBIDDEN = "forbidden", "The token does not permit this"
    TOO_MANY_REQUESTS = "too-many-requests", "Too many requests"
    TENANT_LIMIT = "tenant-limit", "The tenant has reached a limit"
    UNAVAILABLE = "unavailable", "The service is not available"
    NO_LOG = "no-log", "This service keeps no log"
    NO_TOKENIZER = "no-tokenizer", "This service knows no tokenizer"
    EXPLAINING = "explaining", "Another explanation is being made"
    OVERLOADED = "overloaded", "The service is at a limit"
    OUTSIDE_THE_LOG = "outside-the-log", "The moment is outside the log"
    READ_ONLY = "read-only", "The past does not change"
    TOO_MANY_CLIENTS = "too-many-clients", "Too many callers listen to events"


class ProblemError(KvsightError):
    """A request that is answered with a problem document.

    kind: None if the HTTP status is sufficient. field, value: the invalid field and its value, if
    any. retry_after_s: time after which a retry may succeed.
    """

    def __init__(
        self,
        status: int,
        kind: ProblemKind | None,
        detail: str,
        field: str | None = None,
        value: object = UNSET,
        *,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.field = field
        self.value = value
        self.retry_after_s = retry_after_s

    @classmethod
    def of_value(
        cls, error: InvalidValueError, status: int = 422, kind: ProblemKind = ProblemKind.INVALID_VALUE
    ) -> ProblemError:
        """Return the problem of an invalid value."""
        return cls(status, kind, str(error), error.field, error.value)

    def document(self) -> ProblemDocument:
        """Return the document that the caller gets."""
        return ProblemDocument(
            type=f"urn:kvsight:problem:{self.kind}" if self.kind else "about:blank",
            title=self.kind.heading if self.kind else HTTPStatus(self.status).phrase,
            status=self.status,
            detail=self.detail,
            field=UNSET if self.field is None else self.field,
            value=_shortened(self.value),
            error=self.detail,
        )

    def response(self) -> Response:
        """Return the document as a response."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == HTTPStatus.UNAUTHORIZED else {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        body = msgspec.json.encode(self.document())
        return Response(body, self.status, headers, media_type=MEDIA_TYPE)


def _shortened(value: object) -> bool | int | float | str | UnsetType | None:
    if isinstance(value, bool | float | UnsetType) or value is None:
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return value
    if isinstance(value, str) and value[:_LONGEST_VALUE].isprintable():
        return value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}..."
    return shorten(value, _LONGEST_VALUE)


def install(app: FastAPI) -> None:
    """Answer every error of the application's routes with a problem document."""

    @app.exception_handler(ProblemError)
    async def on_problem(_request: Request, problem: ProblemError) -> Response:
        return problem.response()

    @app.exception_handler(HTTPException)
    async def on_http_exception(request: Request, error: HTTPException) -> Response:
        detail = error.detail
        if error.status_code == HTTPStatus.NOT_FOUND:
            detail = f"no such path: {request.url.path[:_LONGEST_VALUE]}"
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            detail = f"{request.method[:_LONGEST_VALUE]} is not supported here"
        response = ProblemError(error.status_code, None, detail).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def on_bad_parameter(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field, message = str(first["loc"][-1]), str(first["msg"])
        expected = (message[:1].lower() + message[1:]).removeprefix("input should be ")
        return ProblemError.of_value(InvalidValueError(field, first.get("input"), expected)).response()
