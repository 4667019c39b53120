"""A client that costs a router's process a third of `AsyncClient`: aiohttp sends, and nothing is sent twice."""

from __future__ import annotations

from typing import Self, TypeVar

import aiohttp
from yarl import URL

from kvsight.base_client import BaseClient
from kvsight.calls import Call
from kvsight.errors import KvsightConnectionError

T = TypeVar("T")
_KEEPALIVE_S = 4.0  # the server closes idle connections after 5


class LightClient(BaseClient):
    """Sends the calls of `kvsight.calls` and `kvsight.selection_calls`. Used with `async with`, in one event loop."""

    _session: aiohttp.ClientSession

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        """Arguments as those of `Client`. timeout_s: for the whole of each request. Raises InvalidValueError."""
        super().__init__(url, token, timeout_s, None)

    async def send(self, call: Call[T]) -> T:
        """Send a call. Raises KvsightHttpError, KvsightConnectionError and UnexpectedAnswerError."""
        params = {name: str(value) for name, value in (call.params or {}).items() if value is not None}
        headers = None if call.content_type is None else {"Content-Type": call.content_type}
        url = URL(self._address + call.path, encoded=True)
        try:
            async with self._session.request(
                call.method, url, params=params, data=call.content, headers=headers
            ) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            raise KvsightConnectionError(f"{self._shown_url}{call.path}: {error or type(error).__name__}") from error
        return call.result(self._shown_url, answer.status, content)

    async def __aenter__(self) -> Self:
        auth = self._options.get("auth")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(keepalive_timeout=_KEEPALIVE_S),
            headers=self._options.get("headers"),
            auth=aiohttp.BasicAuth(*auth) if auth else None,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
