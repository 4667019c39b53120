"""Prompts given on the command line: token ids, text and JSON files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kv_events.errors import InvalidValueError, KvsightError
from kvsight.cli.shared.console import UsageError

if TYPE_CHECKING:
    from kv_events.http.parsed_query import ParsedQuery, PromptArray


class _Query(msgspec.Struct):
    """The tokens in the body of a query."""

    token_ids: list[int]


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
    found: list[int] | _Query = _decoded(text.encode(), file, list[int] | _Query, "not a list of token ids: {error}")
    return found.token_ids if isinstance(found, _Query) else found


def read_text(file: Path) -> str:
    """The text of a file, or of stdin for `-`. Raises UsageError, OSError."""
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text()
    except UnicodeDecodeError as error:
        raise UsageError(f"{_shown(file)}: not text: {error}") from error


def text_of(value: str) -> str:
    """The text of a flag, or of the file that it names as `@FILE`. Raises UsageError, OSError."""
    return read_text(Path(value[1:])) if value.startswith("@") else value


def read_json_object(path: Path) -> dict[str, msgspec.Raw]:
    """Read the fields of a JSON object from a file, or from stdin for `-`. Values stay undecoded.

    Raises UsageError with line and column; OSError.
    """
    data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    expected = "{error}; a query is an object with model_name and token_ids"
    fields: dict[str, msgspec.Raw] = _decoded(data, path, dict[str, msgspec.Raw], expected)
    return fields


def decode_query(body: dict[str, msgspec.Raw], file: Path) -> tuple[ParsedQuery, PromptArray]:
    """The body of a query, which a file has, as the API understands it. Needs the extra `serve`. Raises UsageError."""
    from api.queries.body_formats import format_of
    from api.queries.parsing import BY_ANY, decode_question

    try:
        return decode_question(msgspec.json.encode(body), format_of("application/json"), BY_ANY)
    except KvsightError as error:
        raise UsageError(f"{_shown(file)}: {error}") from error


def _decoded(data: bytes, file: Path, kind: Any, expected: str) -> Any:
    """Decode JSON. expected: the message for another value, with `{error}` in it. Raises UsageError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{_shown(file)}: {expected.format(error=error)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{_shown(file)}: {_json_fault(data, error)}") from error


def _shown(path: Path) -> str:
    return "stdin" if str(path) == "-" else str(path)


def _json_fault(data: bytes, error: Exception) -> str:
    if not data.strip():
        return "not JSON: it is empty"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"not JSON: invalid UTF-8{_place(data, error.start)}"
    message, _, position = str(error).removeprefix("JSON is malformed: ").removesuffix(")").partition(" (byte ")
    return f"not JSON: {message}{_place(data, int(position) if position.isdecimal() else len(data))}"


def _place(data: bytes, position: int) -> str:
    before = data[:position]
    return f", line {before.count(10) + 1}, column {len(before) - before.rfind(10)}"
