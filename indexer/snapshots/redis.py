"""A snapshot store in Redis: writes chunks under a new name, then changes one pointer."""

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from indexer.settings import RedisSettings
from indexer.snapshots.base import Piece, SnapshotStoreError
from kv_events.errors import InvalidValueError, shorten
from kv_events.runtime.tls import TlsFiles, connection_reason
from kv_events.runtime.variables import variable

_CHUNK_BYTES = 2**20  # the event loop copies and sends a chunk in a fraction of a millisecond
_TIMEOUT_S = 10.0
_GRACE_S = 60
_LOAD_TRIES = 3  # a pointer may change while its chunks are read
_EXPIRE_S = 24 * 3600  # for chunks of a writer that ended before it changed the pointer


class RedisStore:
    """See `SnapshotStore`. The key `<prefix>:current` contains the name and count of the chunks, which are stored under
    `<prefix>:<id>:<number>`.
    """

    def __init__(self, settings: RedisSettings, prefix: str = "kvsight:snapshot") -> None:
        """Raises InvalidValueError for settings without a URL, or for a file that cannot be used."""
        self._redis = _client(settings)
        self._prefix = prefix

    async def save(self, pieces: Iterable[Piece]) -> None:
        name, num_chunks = uuid.uuid4().hex, 0
        with self._translated_errors():
            for chunk in _chunks(pieces):
                await self._redis.set(self._chunk(name, num_chunks), chunk, ex=_EXPIRE_S)
                num_chunks += 1
            await self._point_to(name, num_chunks)

    async def load(self) -> bytes | None:
        with self._translated_errors():
            for _ in range(_LOAD_TRIES):
                current = await self._current()
                if current is None:
                    return None
                name, num_chunks = current
                chunks = [await self._redis.get(self._chunk(name, number)) for number in range(num_chunks)]
                if None not in chunks:
                    return b"".join(chunk for chunk in chunks if isinstance(chunk, bytes))
        raise SnapshotStoreError("Redis: chunks of the newest snapshot are missing")

    async def has_snapshot(self) -> bool:
        """Return whether there is a snapshot, without loading it. Raises SnapshotStoreError."""
        with self._translated_errors():
            return await self._current() is not None

    async def time(self) -> float | None:
        """Return the server's time in seconds since 1970, or None if this user may not ask for it. Raises
        SnapshotStoreError.
        """
        with self._translated_errors():
            try:
                seconds, microseconds = await self._redis.time()
            except NoPermissionError:
                return None
        return float(seconds + microseconds / 1e6)

    async def close(self) -> None:
        await self._redis.aclose()

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise SnapshotStoreError for an error of the server or of the connection to it."""
        try:
            yield
        except (RedisError, RuntimeError) as error:  # uvloop's, for a write to a connection that was reset
            raise _error(self._redis, error) from error

    async def _point_to(self, name: str, num_chunks: int) -> None:
        """Change the pointer. The previous chunks are kept for a while, because other processes may be reading them."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for number in range(num_chunks):
                pipe.persist(self._chunk(name, number))
            pipe.set(f"{self._prefix}:current", f"{name} {num_chunks}", get=True)
            *_, pointer = await pipe.execute()
        old = _parsed(pointer)
        if old is not None:
            async with self._redis.pipeline(transaction=False) as pipe:
                for number in range(old[1]):
                    pipe.expire(self._chunk(old[0], number), _GRACE_S)
                await pipe.execute()

    async def _current(self) -> tuple[str, int] | None:
        pointer = await self._redis.get(f"{self._prefix}:current")
        if pointer is not None and _parsed(pointer) is None:
            raise SnapshotStoreError(f"Redis: {self._prefix}:current has {shorten(pointer)}, which names no snapshot")
        return _parsed(pointer)

    def _chunk(self, name: str, number: int) -> str:
        return f"{self._prefix}:{name}:{number}"


def _chunks(pieces: Iterable[Piece]) -> Iterator[bytes]:
    """Join pieces, or parts of them, to chunks of `_CHUNK_BYTES`; the last one is shorter."""
    chunk = bytearray()
    for piece in pieces:
        for start in range(0, len(piece), _CHUNK_BYTES):
            chunk += piece[start : start + _CHUNK_BYTES]
            if len(chunk) >= _CHUNK_BYTES:
                yield bytes(chunk[:_CHUNK_BYTES])
                del chunk[:_CHUNK_BYTES]
    if chunk:
        yield bytes(chunk)


def _client(settings: RedisSettings) -> Redis:
    if settings.redis is None:
        raise InvalidValueError(variable("redis"), None, "a URL such as redis://HOST:PORT/DB")
    options: dict[str, Any] = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S}
    password = settings.secret("redis_password")
    if password is not None:
        options["password"] = password
    if settings.is_redis_tls:
        files = (settings.redis_ca_file, settings.redis_cert_file, settings.redis_key_file)
        tls = TlsFiles("redis", *files, settings.redis_key_password_file)
        tls.context()  # a wrong file stops the start
        names = zip(("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"), files, strict=True)
        options |= {name: str(path) for name, path in names if path is not None}
        options |= {"ssl_password": tls.password(), "ssl_check_hostname": True}
    return Redis.from_url(settings.redis, **options)


def _error(client: Redis, error: RedisError | RuntimeError) -> SnapshotStoreError:
    """Say in one line, without secrets, which server fails and why."""
    known = client.connection_pool.connection_kwargs
    where = f"{known['host']}:{known.get('port', 6379)}" if "host" in known else str(known.get("path", ""))
    match error:
        case AuthenticationError() if "password" in known:
            user = known.get("username") or "default"
            reason = f"wrong user or password (user {shorten(user)})"
        case AuthenticationError():
            reason = f"it requires a login; set {variable('redis_password_file')}"
        case NoPermissionError():
            reason = f"a right is missing: {error}"
        case RuntimeError():
            reason = "connection lost"
        case _:
            reason = connection_reason(error.__cause__ or error.__context__) or str(error)
    return SnapshotStoreError(f"Redis at {where}: {reason}")


def _parsed(pointer: bytes | str | None) -> tuple[str, int] | None:
    if pointer is None:
        return None
    name, _, num_chunks = (pointer if isinstance(pointer, str) else pointer.decode(errors="replace")).partition(" ")
    return (name, int(num_chunks)) if num_chunks.isdecimal() else None
