"""An engine's HTTP server, in the dialect of OpenAI that vLLM, SGLang and TensorRT-LLM have."""

import re
import time
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar

import httpx
import msgspec

from kv_events.errors import KvsightError
from kvsight.base_client import address_and_authorization

_T = TypeVar("_T")

_TIMEOUT_S = 60.0
_LONGEST_TEXT = 200
_MOST_BYTES = 16 * 2**20
_VLLM_BLOCK_SIZE = re.compile(rb'cache_config_info\{[^}]*\bblock_size="(\d+)"')
_SGLANG_INFO = ("/server_info", "/get_server_info")


class EngineError(KvsightError):
    """The engine does not answer, or refuses a request. Names the address and the reason."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Completion(msgspec.Struct):
    usage: _Usage


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _ServerInfo(msgspec.Struct):
    page_size: int


class ClockReading(NamedTuple):
    """Another machine's clock and ours at the same moment, in seconds since 1970."""

    theirs: float
    ours: float


class EngineClient:
    """A client of one engine."""

    def __init__(self, url: str, token: str | None = None, *, field: str = "engine") -> None:
        """field: for the message. Raises InvalidValueError for an invalid address."""
        self.url, headers = address_and_authorization(url, token, field, f"{field}_token_file")
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        self.date: ClockReading | None = None
        """The engine's clock, as of its newest answer."""

    def model(self) -> str:
        """The first model that the engine serves. Raises EngineError."""
        found = self._ask("GET", "/v1/models", _Models).data
        if not found:
            raise EngineError(f"{self.url}/v1/models: the engine serves no model")
        return found[0].id

    def tokenize(self, model: str, text: str) -> list[int]:
        """The tokens of a text. Raises EngineError."""
        return self._ask("POST", "/tokenize", _Tokenized, {"model": model, "prompt": text}).tokens

    def complete(self, model: str, tokens: list[int]) -> int | None:
        """Let the engine compute a prompt and one token.

        Returns how many of the prompt's tokens came from the engine's cache, or None if it does not report that. Raises
        EngineError.
        """
        body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0}
        details = self._ask("POST", "/v1/completions", _Completion, body).usage.prompt_tokens_details
        return None if details is None else details.cached_tokens

    def block_size(self) -> int | None:
        """Tokens of a page, from vLLM's metrics or SGLang's settings. None if the engine has neither."""
        try:
            found = _VLLM_BLOCK_SIZE.search(self._answer("GET", "/metrics"))
        except EngineError:
            found = None
        if found is not None:
            return int(found[1])
        for path in _SGLANG_INFO:
            try:
                return self._ask("GET", path, _ServerInfo).page_size
            except EngineError:
                continue
        return None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _ask(self, method: str, path: str, kind: type[_T], body: Any = None) -> _T:
        try:
            return msgspec.json.decode(self._answer(method, path, body), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineError(f"{self.url}{path}: not the answer of an engine: {error}") from error

    def _answer(self, method: str, path: str, body: Any = None) -> bytes:
        try:
            with self._http.stream(method, path, json=body) as answer:
                content = bytearray()
                for part in answer.iter_bytes():
                    content += part
                    if len(content) > _MOST_BYTES:
                        raise EngineError(f"{self.url}{path}: the answer is larger than {_MOST_BYTES} bytes")
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url}{path}: {str(error) or type(error).__name__}") from error
        if not answer.is_success:
            said = " ".join(content.decode(errors="replace")[:_LONGEST_TEXT].split())
            raise EngineError(f"{self.url}{path}: status {answer.status_code}: {said}")
        self.date = read_date(answer)
        return bytes(content)


def read_date(answer: httpx.Response) -> ClockReading | None:
    """The clock of a server that has just answered. None if the answer has no valid `Date`."""
    try:
        return ClockReading(parsedate_to_datetime(answer.headers["date"]).timestamp(), time.time())
    except (KeyError, ValueError):
        return None
