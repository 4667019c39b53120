"""Bodies that clients of OpenAI and Anthropic send to engines: their kinds, and whom to ask for their tokens."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from api.problems import ProblemError, ProblemKind
from kv_events.errors import InvalidValueError
from kv_events.hashing import U32Array
from kv_events.http.queries import MediaSpan


class Rendered(NamedTuple):
    """The tokens that an engine makes of a prompt, or why they are not known."""

    token_ids: U32Array = np.empty(0, np.uint32)
    """uint32[n]."""
    media: tuple[MediaSpan, ...] = ()
    """What they contain besides text."""
    degraded: str = ""
    """Why there are no tokens. Empty: there are."""


ROUTES = {"messages": "chat/completions", "prompt": "completions", "input": "responses"}
"""Field that holds a prompt -> the engine's route for such bodies. Anthropic's have `messages`, too."""

_OF_ANTHROPIC = frozenset({"system", "thinking", "output_config", "stop_sequences", "anthropic_version"})
_BLOCKS = frozenset({"tool_use", "tool_result", "image", "thinking", "redacted_thinking"})
TRUNCATED = "truncate_prompt_tokens"
_ONLY_RENDERED = frozenset(
    {"documents", "kv_transfer_params", "reasoning_effort", "response_format", "tool_choice", TRUNCATED}
)
"""Fields that may change a prompt and that vLLM's /tokenize ignores."""


class EngineBody(NamedTuple):
    """What an engine is asked."""

    path: str
    """Of the route that renders such bodies."""
    data: bytes
    """The body as JSON."""
    can_be_tokenized: bool
    """Whether /tokenize makes the same tokens of it, in an engine without the route."""


def prompt_field(body: Mapping[str, Any]) -> str:
    """Return the field with the prompt, a key of `ROUTES`. Raises ProblemError (422) unless there is exactly one."""
    found = [field for field in ROUTES if body.get(field) is not None]
    if len(found) != 1:
        names = " and ".join(found) or "messages, prompt or input"
        raise ProblemError.of_value(InvalidValueError(names, len(found), "one of them"))
    return found[0]


def engine_body(body: Mapping[str, Any]) -> EngineBody:
    """Return what an engine is asked about a body. Raises ProblemError (400, 422)."""
    field, model = prompt_field(body), body.get("model", body.get("model_name"))
    if not isinstance(model, str):
        raise ProblemError.of_value(InvalidValueError("model", model, "the name of a model"))
    prompt, path = body[field], f"/v1/{ROUTES[field]}/render"
    if field == "prompt" and isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        raise ProblemError.of_value(InvalidValueError("len(prompt)", len(prompt), "one prompt"))
    is_plain = isinstance(prompt, str) and field == "prompt"
    if field == "messages":
        if not isinstance(prompt, list):
            raise ProblemError.of_value(InvalidValueError(field, prompt, "a list of messages"))
        for number, each in enumerate(prompt):
            if not isinstance(each, dict):
                raise ProblemError.of_value(InvalidValueError(f"{field}[{number}]", each, "a message"))
        kinds = {str(part.get("type")) for each in prompt for part in _objects(each.get("content"))}
        is_plain = kinds <= {"text"}  # /tokenize does not say where the tokens of media are
        tools = _objects(body.get("tools"))
        if _OF_ANTHROPIC & body.keys() or _BLOCKS & kinds or any("input_schema" in tool for tool in tools):
            path, is_plain = "/v1/messages/render", False
    asked = {**body, "model": model, "mm_payload": "none"}  # of media, the hashes suffice
    try:
        return EngineBody(path, msgspec.json.encode(asked), is_plain and _ONLY_RENDERED.isdisjoint(body))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProblemError(400, ProblemKind.MALFORMED_BODY, f"body: {error}") from None


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
