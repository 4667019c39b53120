"""From the body of a request to the tokens of its prompt, within a deadline."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from api.http_pool import NoAnswerError
from api.problems import ProblemError, ProblemKind
from api.prompts.bodies import TRUNCATED, engine_body
from api.prompts.engine import NO_ENGINE, EngineRenderer
from api.prompts.local import LocalTokenizer
from api.prompts.rendered import Rendered, RenderedCache
from api.settings import ApiSettings
from kv_events.errors import InvalidValueError
from kv_events.hashing import token_array


class PromptRenderer:
    """Renders prompts, a bounded number of them at once. Belongs to one event loop."""

    def __init__(self, settings: ApiSettings) -> None:
        """Raises InvalidValueError if the file of the tokenizer cannot be read."""
        self._deadline_s = settings.tokenize_timeout_s
        self._turns = asyncio.Semaphore(settings.tokenize_at_once)
        self._cache = RenderedCache()
        self.outcomes = dict.fromkeys(("rendered", "cached", "failed"), 0)
        """Bodies with text, by what became of them."""
        self._engine = EngineRenderer(settings.tokenize_url)
        self._local = None
        if settings.tokenizer_file is not None:
            self._local = LocalTokenizer(settings.tokenizer_file, settings.tokenize_at_once)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Close the connections after a block."""
        try:
            yield
        finally:
            await self._engine.close()

    async def render(self, body: Mapping[str, Any], deadline_s: float | None = None) -> Rendered:
        """Return the tokens of a decoded body of OpenAI's or Anthropic's, or why they are not known.

        deadline_s: None: that of the settings. Raises ProblemError (400, 422) for a body that no engine can take.
        """
        prompt = body.get("prompt")
        if isinstance(prompt, list) and isinstance(next(iter(prompt), None), int) and not body.get(TRUNCATED):
            try:
                return Rendered(token_array(prompt, "prompt"))
            except InvalidValueError as error:
                raise ProblemError.of_value(error) from None
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        asked = engine_body(body)
        key = hashlib.blake2b(asked.path.encode() + asked.data, digest_size=16).digest()
        if (kept := self._cache.get(key)) is not None:
            self.outcomes["cached"] += 1
            return kept
        try:
            async with asyncio.timeout(deadline_s), self._turns:
                if self._local is not None and isinstance(prompt, str) and asked.can_be_tokenized:
                    found = await self._local.render(prompt, is_special=body.get("add_special_tokens") is not False)
                else:
                    found = await self._engine.render(asked, deadline_s)
        except (TimeoutError, NoAnswerError) as error:
            self.outcomes["failed"] += 1
            return Rendered(degraded=f"the tokenizer: {str(error) or f'no answer within {deadline_s:g} s'}")
        self.outcomes["rendered"] += 1
        self._cache.put(key, found)
        return found

    async def tokens(self, body: Mapping[str, Any], deadline_s: float | None = None) -> Rendered:
        """Return the tokens of a body, see `render`. Raises ProblemError (404, 503) if they are not known."""
        rendered = await self.render(body, deadline_s)
        if NO_ENGINE in rendered.degraded:
            raise ProblemError(404, ProblemKind.NO_TOKENIZER, rendered.degraded)
        if rendered.degraded:
            raise ProblemError(503, ProblemKind.UNAVAILABLE, rendered.degraded)
        return rendered
