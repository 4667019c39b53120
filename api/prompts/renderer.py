"""From the body of a request to the tokens of its prompt, within a deadline."""

import asyncio
import hashlib
import time
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
import numpy as np

from api.http_pool import HttpAnswer, HttpPool, NoAnswerError
from api.problems import ProblemError, ProblemKind
from api.prompts.bodies import TRUNCATED, EngineBody, Rendered, engine_body, prompt_field
from api.prompts.local import LocalTokenizer
from api.settings import ApiSettings
from kv_events.errors import InvalidValueError
from kv_events.hashing import token_array
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

    def __post_init__(self) -> None:
        for kind, names in self.mm_hashes.items():
            if len(names) != (found := len(self.mm_placeholders.get(kind, ()))):
                raise ValueError(f"expected a place for each of {len(names)} hashes of {kind}, got {found}")


class _RenderAnswer(msgspec.Struct, frozen=True):
    """vLLM's answer about a chat. About a completion it is a list with one for each prompt."""

    token_ids: _Tokens
    features: _Features | None = None


class _TokenizeAnswer(msgspec.Struct, frozen=True):
    tokens: _Tokens


_OfOne = Annotated[list[_RenderAnswer], msgspec.Meta(min_length=1, max_length=1)]
_render_answer = msgspec.json.Decoder(_RenderAnswer | _OfOne)
_tokenize_answer = msgspec.json.Decoder(_TokenizeAnswer)


def _lacks_route(answer: HttpAnswer) -> bool:
    """Return whether the engine lacks a route. An engine that has it answers 404, too: `error` names the model."""
    return answer.status in _NO_ROUTE or (answer.status == HTTPStatus.NOT_FOUND and b'"error"' not in answer.body)


def _checked(answer: HttpAnswer) -> bytes:
    if answer.status != HTTPStatus.OK:
        said = " ".join(answer.body[:_LONGEST_TEXT].decode(errors="replace").split())
        raise NoAnswerError(f"it answers with status {answer.status}: {said}")
    return answer.body


def _of_render(body: bytes) -> Rendered:
    """Return the tokens and media of an answer. Raises ValueError if they do not fit together."""
    answers = _render_answer.decode(body)
    answer = answers[0] if isinstance(answers, list) else answers
    media = [
        MediaSpan(hash=name, offset=place.offset, length=place.length)
        for kind, names in (answer.features.mm_hashes if answer.features else {}).items()
        for name, place in zip(names, answer.features.mm_placeholders.get(kind, ()), strict=True)
    ]
    if sum(span.length for span in media) > len(answer.token_ids):
        raise ValueError("its media are longer than the prompt")
    return Rendered(np.array(answer.token_ids, np.uint32), tuple(media))


_MAX_CACHED = 256
_MAX_CACHED_TOKENS = 2**16
_MAX_AGE_S = 60.0  # chat templates may contain the date


class PromptRenderer:
    """Renders prompts, a bounded number of them at once. Belongs to one event loop.

    It keeps the tokens of whole bodies for a minute: the newest 256 prompts of at most 65,536 tokens. The tokens of one
    body say nothing of another body that begins alike: a chat template may look at all messages before it writes the
    first, and a tokenizer merges across the border of two texts.
    """

    def __init__(self, settings: ApiSettings) -> None:
        """Raises InvalidValueError if the file of the tokenizer cannot be read."""
        self._deadline_s = settings.tokenize_timeout_s
        self._turns = asyncio.Semaphore(settings.tokenize_at_once)
        self._cached: dict[bytes, tuple[float, Rendered]] = {}  # by body, until when; the oldest first
        self.outcomes = dict.fromkeys(("rendered", "cached", "failed"), 0)
        """Bodies with text, by what became of them."""
        self._url = settings.tokenize_url and settings.tokenize_url.rstrip("/")
        self._http = HttpPool(_MAX_ANSWER_BYTES)
        self._local = None
        if settings.tokenizer_file is not None:
            self._local = LocalTokenizer(settings.tokenizer_file, settings.tokenize_at_once)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def render(self, body: Mapping[str, Any], deadline_s: float | None = None) -> Rendered:
        """Return the tokens of a decoded body of OpenAI's or Anthropic's, or why they are not known.

        deadline_s: None: that of the settings. Raises ProblemError (400, 422) for a body that no engine can take.
        """
        prompt = body.get("prompt") if prompt_field(body) == "prompt" else None
        if isinstance(prompt, list) and isinstance(next(iter(prompt), None), int) and not body.get(TRUNCATED):
            try:
                return Rendered(token_array(prompt, "prompt"))
            except InvalidValueError as error:
                raise ProblemError.of_value(error) from None
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        asked = engine_body(body)
        key = hashlib.blake2b(asked.path.encode() + asked.data, digest_size=16).digest()
        until, kept = self._cached.get(key, (0.0, None))
        if kept is not None and time.monotonic() < until:
            self.outcomes["cached"] += 1
            return kept
        try:
            async with asyncio.timeout(deadline_s), self._turns:
                if self._local is not None and isinstance(prompt, str) and asked.can_be_tokenized:
                    found = await self._local.render(prompt, is_special=body.get("add_special_tokens") is not False)
                else:
                    found = await self._ask_engine(asked, deadline_s)
        except (TimeoutError, NoAnswerError) as error:
            self.outcomes["failed"] += 1
            return Rendered(degraded=f"the tokenizer: {str(error) or f'no answer within {deadline_s:g} s'}")
        self.outcomes["rendered"] += 1
        if len(found.token_ids) <= _MAX_CACHED_TOKENS:
            self._cached.pop(key, None)
            self._cached[key] = time.monotonic() + _MAX_AGE_S, found
        if len(self._cached) > _MAX_CACHED:
            del self._cached[next(iter(self._cached))]
        return found

    async def tokens(self, body: Mapping[str, Any], deadline_s: float | None = None) -> Rendered:
        """Return the tokens of a body, see `render`. Raises ProblemError (404, 503) if they are not known."""
        rendered = await self.render(body, deadline_s)
        if NO_ENGINE in rendered.degraded:
            raise ProblemError(404, ProblemKind.NO_TOKENIZER, rendered.degraded)
        if rendered.degraded:
            raise ProblemError(503, ProblemKind.UNAVAILABLE, rendered.degraded)
        return rendered

    async def _ask_engine(self, asked: EngineBody, deadline_s: float) -> Rendered:
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
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise NoAnswerError(f"its answer cannot be read: {error}") from None
