"""A snapshot store in Redis: writes chunks under a new name, then changes one pointer."""

from __future__ import annotations

import uuid

from redis.asyncio import Redis
from redis.exceptions import RedisError

from indexer.snapshots.base import SnapshotStoreError

_CHUNK_BYTES = 16 * 2**20  # far below the limit of 512 MB for one value
_TIMEOUT_S = 10.0
_GRACE_S = 60
_LOAD_TRIES = 3  # a pointer may change while its chunks are read
_EXPIRE_S = 24 * 3600  # for chunks of a writer that ended before it changed the pointer


class RedisStore:
    """See `SnapshotStore`. The key `<prefix>:current` contains the name and count of the chunks, which are stored under
    `<prefix>:<id>:<number>`.
    """

    def __init__(self, url: str, prefix: str = "kvsight:snapshot") -> None:
        self._redis: Redis = Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        self._prefix = prefix

    async def save(self, image: bytes) -> None:
        name = uuid.uuid4().hex
        chunks = [image[i : i + _CHUNK_BYTES] for i in range(0, len(image), _CHUNK_BYTES)] or [b""]
        try:
            for number, chunk in enumerate(chunks):
                await self._redis.set(self._chunk(name, number), chunk, ex=_EXPIRE_S)
            await self._point_to(name, len(chunks))
        except RedisError as error:
            raise SnapshotStoreError(f"Redis: {error}") from error

    async def load(self) -> bytes | None:
        try:
            for _ in range(_LOAD_TRIES):
                current = await self._current()
                if current is None:
                    return None
                chunks = await self._redis.mget([self._chunk(current[0], number) for number in range(current[1])])
                if all(chunk is not None for chunk in chunks):
                    return b"".join(chunk for chunk in chunks if isinstance(chunk, bytes))
        except RedisError as error:
            raise SnapshotStoreError(f"Redis: {error}") from error
        raise SnapshotStoreError("Redis: chunks of the newest snapshot are missing")

    async def close(self) -> None:
        await self._redis.aclose()

    async def _point_to(self, name: str, num_chunks: int) -> None:
        """Change the pointer. The previous chunks are kept for a while, because other processes may be reading them."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for number in range(num_chunks):
                pipe.persist(self._chunk(name, number))
            pipe.set(f"{self._prefix}:current", f"{name} {num_chunks}", get=True)
            *_, pointer = await pipe.execute()
        old = _parsed(pointer)
        if old is not None:
            for number in range(old[1]):
                await self._redis.expire(self._chunk(old[0], number), _GRACE_S)

    async def _current(self) -> tuple[str, int] | None:
        return _parsed(await self._redis.get(f"{self._prefix}:current"))

    def _chunk(self, name: str, number: int) -> str:
        return f"{self._prefix}:{name}:{number}"


def _parsed(pointer: bytes | str | None) -> tuple[str, int] | None:
    """Return name and number of the chunks of a pointer."""
    if pointer is None:
        return None
    name, num_chunks = (pointer if isinstance(pointer, str) else pointer.decode()).split(" ")
    return name, int(num_chunks)
