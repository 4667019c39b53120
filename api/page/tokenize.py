"""POST /tokenize: the tokens of a text, so that the page can ask about it."""

from typing import Final

from starlette.responses import Response

from api.prompts.renderer import PromptRenderer
from api.queries.body_formats import Body, BodyFormat, decode_as
from api.queries.routes import RawEndpoint, json_response
from kv_events.http.fleet import Tokenized, TokenizeRequest

MAX_BODY_BYTES: Final = 2**20
_DEADLINE_S: Final = 30.0


class TokenizeRoute:
    """The route."""

    def __init__(self, renderer: PromptRenderer) -> None:
        self._renderer = renderer

    def endpoints(self) -> dict[str, RawEndpoint]:
        """Path -> ASGI application for POST."""
        return {"/tokenize": RawEndpoint(self._tokenize, MAX_BODY_BYTES)}

    async def _tokenize(self, body: Body, body_format: BodyFormat) -> Response:
        request = decode_as(TokenizeRequest, body, body_format)
        asked = {"model": request.model_name, "prompt": request.text}
        found = await self._renderer.tokens(asked, _DEADLINE_S)
        return json_response(Tokenized(token_ids=found.token_ids.tolist()))
