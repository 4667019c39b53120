"""Asks an engine for the tokens of a prompt: vLLM's render routes, and /tokenize of vLLM and SGLang."""

from functools import partial
from http import HTTPStatus
from typing import Annotated

import msgspec
import numpy as np

from api.http_pool import HttpAnswer, HttpPool, NoAnswerError
from api.prompts.bodies import EngineBody
from api.prompts.rendered import Rendered
from kv_events.http.queries import MediaSpan
from kv_events.limits import MAX_TOKEN_ID, MAX_TOKENS_PER_QUERY

NO_ENGINE = "none is known; start the service with --tokenize-url, the address of a vLLM or SGLang engine"
_MAX_ANSWER_BYTES = 32 * 2**20
_NO_ROUTE = frozenset({HTTPStatus.FORBIDDEN, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED})
_LONGEST_TEXT = 200
_HEADERS = {"Content-Type": "application/json"}
_Token = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
_Tokens = Annotated[list[_Token], msgspec.Meta(max_length=MAX_TOKENS_PER_QUERY)]


class _Place(msgspec.Struct, frozen=True):
    offset: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=1)]


class _Features(msgspec.Struct, frozen=True):
    """Media, by modality."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Place]]


class _RenderAnswer(msgspec.Struct, frozen=True):
    """vLLM's answer about a chat. About a completion it is a list with one for each prompt."""

    token_ids: _Tokens
    features: _Features | None = None


class _TokenizeAnswer(msgspec.Struct, frozen=True):
    tokens: _Tokens


_render_answer = msgspec.json.Decoder(_RenderAnswer | list[_RenderAnswer])
_tokenize_answer = msgspec.json.Decoder(_TokenizeAnswer)


class EngineRenderer:
    """A client of one engine. Belongs to one event loop."""

    def __init__(self, url: str | None) -> None:
        self._url = url and url.rstrip("/")
        self._http = HttpPool(_MAX_ANSWER_BYTES)
        self.close = self._http.close

    async def render(self, asked: EngineBody, deadline_s: float) -> Rendered:
        """Return the tokens of a body. Raises NoAnswerError, also if the engine refuses it."""
        if self._url is None:
            raise NoAnswerError(NO_ENGINE)
        send = partial(self._http.send, "POST", deadline_s=deadline_s, headers=_HEADERS, body=asked.data)
        try:
            answer = await send(self._url + asked.path)
            if not _lacks_route(answer):
                return _of_render(_checked(answer))
            if not asked.can_be_tokenized:
                raise NoAnswerError(f"it has no {asked.path}; vLLM has, with --enable-scale-out")
            tokens = _tokenize_answer.decode(_checked(await send(f"{self._url}/tokenize"))).tokens
            return Rendered(np.array(tokens, np.uint32))
        except (msgspec.DecodeError, ValueError, KeyError, RecursionError) as error:
            raise NoAnswerError(f"its answer cannot be read: {error}") from None


def _lacks_route(answer: HttpAnswer) -> bool:
    """Return whether the engine lacks a route. An engine that has it answers 404, too: `error` names the model."""
    return answer.status in _NO_ROUTE or (answer.status == HTTPStatus.NOT_FOUND and b'"error"' not in answer.body)


def _checked(answer: HttpAnswer) -> bytes:
    if answer.status != HTTPStatus.OK:
        said = " ".join(answer.body[:_LONGEST_TEXT].decode(errors="replace").split())
        raise NoAnswerError(f"it answers with status {answer.status}: {said}")
    return answer.body


def _of_render(body: bytes) -> Rendered:
    """Return the tokens and media of an answer. Raises ValueError, KeyError if it is not about one prompt."""
    answers = _render_answer.decode(body)
    (answer,) = answers if isinstance(answers, list) else [answers]
    media = [
        MediaSpan(hash=name, offset=place.offset, length=place.length)
        for kind, names in (answer.features.mm_hashes if answer.features else {}).items()
        for name, place in zip(names, answer.features.mm_placeholders[kind], strict=True)
    ]
    if sum(span.length for span in media) > len(answer.token_ids):
        raise ValueError("its media are longer than the prompt")
    return Rendered(np.array(answer.token_ids, np.uint32), tuple(media))
