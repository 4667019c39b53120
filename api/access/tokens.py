"""The tokens that a service accepts: what each of them permits, and how often. Their file may change at any time."""

import hmac
import logging
import re
import tomllib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec

from api.access.rate_limits import RateLimit
from api.background import following
from api.settings import ApiSettings
from kv_events.errors import InvalidValueError, shorten
from kv_events.runtime.settings import read_secret
from kv_events.runtime.variables import variable
from kv_events.runtime.words import count

logger = logging.getLogger(__name__)

Scope = Literal["read", "decisions", "register", "resync", "dump", "admin"]
"""What a token permits. `admin` permits everything."""

_FIELD = "api_tokens_file"
_SCHEME = b"Bearer "
_MAX_TOKENS = 256
_TOKEN = re.compile(r"[!-~]{16,512}")  # what a header can carry unchanged, and nobody guesses


class Principal(NamedTuple):
    """Whom a token stands for."""

    scopes: frozenset[str]
    limit: RateLimit | None = None
    """Bound on the requests with the token."""


_ANYONE = Principal(frozenset(get_args(Scope)))


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file."""

    token: str
    scopes: Annotated[list[Scope], msgspec.Meta(min_length=1)]
    requests_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None

    def caller(self) -> Principal:
        limit = None if self.requests_per_s is None else RateLimit(self.requests_per_s)
        return Principal(_ANYONE.scopes if "admin" in self.scopes else frozenset(self.scopes), limit)


class TokenRegistry:
    """The tokens of one service. The event loop's thread uses them."""

    def __init__(self, settings: ApiSettings) -> None:
        """The token of the settings permits everything, and their file has further ones. Without both, everything is
        permitted to anyone.

        Raises InvalidValueError if the file cannot be read. Its text shows no token.
        """
        token, file = settings.api_token, settings.api_tokens_file
        self.are_required = token is not None or file is not None
        self._own = [] if token is None else [(_digest(token.get_secret_value()), _ANYONE)]
        self._file = file
        self._text = "" if file is None else read_secret(_FIELD, file)
        self._known = [*self._own, *_callers(self._text, file)]

    def caller(self, authorization: bytes) -> Principal | None:
        """Return whom the header `Authorization` stands for, or None if it is unknown.

        Takes the same time for every value: digests are compared, and all of them.
        """
        if not self.are_required:
            return _ANYONE
        scheme, token = authorization[: len(_SCHEME)], authorization[len(_SCHEME) :]
        scheme = _SCHEME if scheme.lower() == _SCHEME.lower() else scheme  # RFC 9110: in any case
        given, found = sha256(scheme + token).digest(), None
        for expected, caller in self._known:
            if hmac.compare_digest(given, expected):
                found = caller
        return found

    def permits(self, authorization: bytes, scope: Scope) -> bool:
        """Return whether the token of the header `Authorization` has a scope."""
        caller = self.caller(authorization)
        return caller is not None and scope in caller.scopes

    def following(self, on_change: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """Read the file again whenever it changes, in the background of a block. on_change: is called after that.

        The tokens of a deleted file are no longer valid.
        """
        file = self._file
        if file is None:
            return nullcontext()

        def use(text: str) -> None:
            self._known = [*self._own, *_callers(text, file)]
            if text:
                logger.info("%s known now", count(len(self._known), "token"))
            else:
                logger.warning("%s was deleted: its tokens are no longer valid", file)
            on_change()

        def read() -> str:
            return read_secret(_FIELD, file) if file.exists() else ""

        return following("tokens", self._text, read, use, logger)


def _callers(text: str, file: Path | None) -> list[tuple[bytes, Principal]]:
    """Return digest and caller of each token of a file. Raises InvalidValueError, whose text shows no token."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line \d+, column \d+|at end of document", str(error))
        raise _wrong(file, f"TOML{f', wrong {place[0]}' if place else ''}") from None
    if len(tables) > _MAX_TOKENS:
        raise _wrong(file, f"at most {_MAX_TOKENS} tokens, not {len(tables)}")
    found = {}
    for name, table in tables.items():
        entry = _entry(name, table, file)
        digest = _digest(entry.token)
        if digest in found:
            raise _wrong(file, f"another token in table {shorten(name)}: it is that of an earlier one")
        found[digest] = entry.caller()
    return list(found.items())


def _entry(name: str, table: object, file: Path | None) -> _Entry:
    where = f"table {shorten(name)}"
    try:
        entry = msgspec.convert(table, _Entry)
    except msgspec.ValidationError as error:
        field = str(error).rpartition(" - at `$")[2].rstrip("`").lstrip(".") if " - at " in str(error) else ""
        expected = f"{where} with token, scopes ({', '.join(get_args(Scope))}) and optionally requests_per_s"
        raise _wrong(file, expected + (f"; {field} is wrong" if field else "")) from None
    if not _TOKEN.fullmatch(entry.token):
        raise _wrong(file, f"in {where} a token of 16 .. 512 printable ASCII characters without spaces")
    return entry


def _wrong(file: Path | None, expected: str) -> InvalidValueError:
    return InvalidValueError(variable(_FIELD), file, expected)


def _digest(token: str) -> bytes:
    """The digest of the header that a caller sends."""
    return sha256(_SCHEME + token.encode()).digest()
