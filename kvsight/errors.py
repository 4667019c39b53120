"""What a client may meet. Each says where, and what the other side said."""

from __future__ import annotations

from typing import ClassVar

from kv_events.errors import KvsightError


class KvsightConnectionError(KvsightError):
    """Nobody answered, within the attempts and the time that the client had."""

    retriable: ClassVar[bool] = True


class UnexpectedAnswerError(KvsightError):
    """An answer came, but not one of kvsight's API: the address is probably somebody else's."""


class KvsightHttpError(KvsightError):
    """The API refused a request.

    status: HTTP status. title, detail: for people. kind: `type` of the problem document, for programs, such as
    `urn:kvsight:problem:unknown-model`; `about:blank` where the status says all. field: the field at fault, if any.
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
