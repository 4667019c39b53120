"""Prompts given on the command line: token ids, JSON files, and text that an engine tokenizes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kv_events.errors import InvalidValueError, shorten
from kvsight.cli.console import UsageError, json_fault, shown

if TYPE_CHECKING:
    import httpx

    from kv_events.http.parsed_query import ParsedQuery, PromptArray

_TIMEOUT_S = 30.0
_LONGEST_TEXT = 200


class _Query(msgspec.Struct):
    """The tokens in the body of a query."""

    token_ids: list[int]


class _Tokenized(msgspec.Struct):
    """The answer of POST /tokenize, of vLLM and of SGLang."""

    tokens: list[int]


def parse_tokens(text: str, field: str = "token_ids") -> list[int]:
    """Token ids separated by spaces or commas. field: for the message. Raises InvalidValueError."""
    numbers = []
    for word in text.replace(",", " ").split():
        if not (word.isascii() and word.isdecimal() and len(word) <= len(str(2**32))):
            raise InvalidValueError(field, word, "integers in 0 .. 4294967295")
        numbers.append(int(word))
    return numbers


def read_tokens(file: Path) -> list[int]:
    """Token ids in a file: plain, a JSON list, or the body of a query. `-` reads stdin."""
    text = read_text(file)
    if not text.lstrip().startswith(("[", "{")):
        return parse_tokens(text)
    data = text.encode()
    try:
        found = msgspec.json.decode(data, type=list[int] | _Query)
    except msgspec.ValidationError as error:
        raise UsageError(f"{shown(file)}: not a list of token ids: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{shown(file)}: {json_fault(data, error)}") from error
    return found if isinstance(found, list) else found.token_ids


def read_text(file: Path) -> str:
    """The text of a file, or of stdin for `-`. Raises UsageError, OSError."""
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text()
    except UnicodeDecodeError as error:
        raise UsageError(f"{shown(file)}: not text: {error}") from error


def decode_query(body: dict[str, msgspec.Raw]) -> tuple[ParsedQuery, PromptArray]:
    """The body of a query as the API understands it. Needs the extra `serve`. Raises KvsightError."""
    from api.queries.body_formats import format_of
    from api.queries.parsing import BY_ANY, decode_question

    return decode_question(msgspec.json.encode(body), format_of("application/json"), BY_ANY)


def tokenize(url: str, model: str, text: str) -> list[int]:
    """Let an engine tokenize a prompt. url: of an engine's HTTP server, vLLM or SGLang. Raises UsageError."""
    import httpx

    where = f"--tokenize-url {shorten(url)}"
    try:
        answer = httpx.post(
            f"{url.rstrip('/')}/tokenize", json={"model": model, "prompt": text}, timeout=_TIMEOUT_S, trust_env=False
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UsageError(f"{where}: {str(error) or type(error).__name__}") from error
    return _tokens_in(where, answer)


def _tokens_in(where: str, answer: httpx.Response) -> list[int]:
    if not answer.is_success:
        said = " ".join(answer.text[:_LONGEST_TEXT].split())
        raise UsageError(f"{where}: status {answer.status_code}: {said}")
    try:
        return msgspec.json.decode(answer.content, type=_Tokenized).tokens
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{where}: not the answer of a tokenizer: {error}") from error
