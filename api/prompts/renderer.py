"""From the body of a request to the tokens of its prompt, within a deadline."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from api.http_pool import NoAnswerError
from api.problems import ProblemError, ProblemKind
from api.prompts.bodies import engine_body
from api.prompts.engine import EngineRenderer
from api.prompts.local import LocalTokenizer
from api.prompts.rendered import Rendered, RenderedCache
from api.settings import ApiSettings
from kv_events.errors import InvalidValueError
from kv_events.hashing import token_array

_UNKNOWN = "this service knows no tokenizer; start it with --tokenize-url, the address of a vLLM or SGLang engine"


class PromptRenderer:
    """Renders prompts, a bounded number of them at once. Belongs to one event loop."""

    def __init__(self, settings: ApiSettings) -> None:
        """Raises InvalidValueError if the file of the tokenizer cannot be read."""
        self._deadline_s = settings.tokenize_timeout_s
        self._turns = asyncio.Semaphore(settings.tokenize_at_once)
        self._cache = RenderedCache()
        self._engine = None if settings.tokenize_url is None else EngineRenderer(settings.tokenize_url)
        self._local = None
        if settings.tokenizer_file is not None:
            self._local = LocalTokenizer(settings.tokenizer_file, settings.tokenize_at_once)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Close the connections after a block."""
        try:
            yield
        finally:
            if self._engine is not None:
                await self._engine.close()

    async def render(self, body: Mapping[str, Any], deadline_s: float | None = None) -> Rendered:
        """Return the tokens of a decoded body of OpenAI's or Anthropic's, or why they are not known.

        deadline_s: None: that of the settings. Raises ProblemError (400, 422) for a body that no engine can take.
        """
        prompt, is_whole = body.get("prompt"), not body.get("truncate_prompt_tokens")
        if is_whole and isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            try:
                return Rendered(token_array(prompt, "prompt"))
            except InvalidValueError as error:
                raise ProblemError.of_value(error) from None
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        asked = engine_body(body)
        key = hashlib.blake2b(asked.path.encode() + asked.data, digest_size=16).digest()
        if (kept := self._cache.get(key)) is not None:
            return kept
        try:
            async with asyncio.timeout(deadline_s), self._turns:
                if self._local is not None and is_whole and isinstance(prompt, str):
                    rendered = await self._local.render(prompt, is_special=body.get("add_special_tokens", True))
                elif self._engine is not None:
                    rendered = await self._engine.render(asked, deadline_s)
                else:
                    return Rendered(degraded=_UNKNOWN)
        except TimeoutError:
            return Rendered(degraded=f"the tokenizer: no answer within {deadline_s:g} s")
        except NoAnswerError as error:
            return Rendered(degraded=f"the tokenizer: {error}")
        self._cache.put(key, rendered)
        return rendered

    async def tokens(self, body: Mapping[str, Any], deadline_s: float | None = None) -> Rendered:
        """Return the tokens of a body, see `render`. Raises ProblemError (404, 503) if they are not known."""
        rendered = await self.render(body, deadline_s)
        if rendered.degraded == _UNKNOWN:
            raise ProblemError(404, ProblemKind.NO_TOKENIZER, _UNKNOWN)
        if rendered.degraded:
            raise ProblemError(503, ProblemKind.UNAVAILABLE, rendered.degraded)
        return rendered
