"""POST /tokenize: lets an engine tokenize a text, so that the page can ask about it."""

import asyncio
from functools import cache
from typing import Annotated, Final

import httpx
import msgspec
from starlette.responses import Response

from api.problems import ProblemError, ProblemKind
from api.queries.body_formats import decode_as
from api.queries.large_bodies import Body, BodyFormat
from api.queries.routes import RawEndpoint, json_response
from kv_events.http.fleet import Tokenized, TokenizeRequest

MAX_BODY_BYTES: Final = 2**20
_MAX_ANSWER_BYTES: Final = 16 * 2**20
_TIMEOUT_S: Final = 30.0
_MAX_AT_ONCE: Final = 4
_tls = cache(httpx.create_ssl_context)  # takes 20 ms


class _EngineAnswer(msgspec.Struct, frozen=True):
    """The answer of POST /tokenize, of vLLM and of SGLang."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]


class TokenizeRoute:
    """The route. It connects to one address only, which the operator has chosen."""

    def __init__(self, url: str | None) -> None:
        """url: of an engine's HTTP server. None: there is none."""
        self._url = url
        self._turns = asyncio.Semaphore(_MAX_AT_ONCE)

    def endpoints(self) -> dict[str, RawEndpoint]:
        """Path -> ASGI application for POST."""
        return {"/tokenize": RawEndpoint(self._tokenize, MAX_BODY_BYTES)}

    async def _tokenize(self, body: Body, body_format: BodyFormat) -> Response:
        request = decode_as(TokenizeRequest, body, body_format)
        if self._url is None:
            detail = (
                "this service knows no tokenizer; start it with --tokenize-url, the address of a vLLM or SGLang "
                "engine, or give token ids"
            )
            raise ProblemError(404, ProblemKind.NO_TOKENIZER, detail)
        async with self._turns:
            answer = await _ask(f"{self._url.rstrip('/')}/tokenize", request)
        try:
            tokens = msgspec.json.decode(answer, type=_EngineAnswer).tokens
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProblemError(
                503, ProblemKind.UNAVAILABLE, f"the tokenizer's answer cannot be read: {error}"
            ) from None
        return json_response(Tokenized(token_ids=tokens))


async def _ask(url: str, request: TokenizeRequest) -> bytes:
    """Return the answer of the engine. Raises ProblemError (503)."""
    body = {"model": request.model_name, "prompt": request.text}
    answer, tls = bytearray(), await asyncio.to_thread(_tls)
    try:
        async with (
            asyncio.timeout(_TIMEOUT_S),
            httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=tls) as client,
            client.stream("POST", url, json=body) as response,
        ):
            if not response.is_success:
                raise ProblemError(
                    503, ProblemKind.UNAVAILABLE, f"the tokenizer answers with status {response.status_code}"
                )
            async for part in response.aiter_bytes():
                answer += part
                if len(answer) > _MAX_ANSWER_BYTES:
                    raise ProblemError(503, ProblemKind.UNAVAILABLE, "the tokenizer's answer is too large")
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        raise ProblemError(
            503, ProblemKind.UNAVAILABLE, f"the tokenizer: {str(error) or type(error).__name__}"
        ) from None
    return bytes(answer)
