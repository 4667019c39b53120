"""Errors of the clients. Each message contains the address and what the server answered."""

from typing import ClassVar

from kv_events.errors import KvsightError


class KvsightConnectionError(KvsightError):
    """The server did not answer within the attempts and the time limit."""

    retriable: ClassVar[bool] = True


class ClientClosedError(KvsightError):
    """The client was closed before."""


class UnexpectedAnswerError(KvsightError):
    """The answer is not one of a kvsight API. The address probably belongs to another service."""


class KvsightHttpError(KvsightError):
    """The API refused a request.

    status: the HTTP status. title, detail: for people. kind: the `type` of the problem document, for programs, such as
    `urn:kvsight:problem:unknown-model`; `about:blank` if the status says everything. field: the invalid field, if any.
    """

    def __init__(
        self, where: str, status: int, title: str, detail: str, kind: str = "about:blank", field: str | None = None
    ) -> None:
        super().__init__(f"{where}: {detail or title} (status {status})")
        self.where = where
        self.status = status
        self.title = title
        self.detail = detail
        self.kind = kind
        self.field = field
