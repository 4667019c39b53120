"""The snapshot in Redis: chunks under a fresh name, then one pointer is changed."""

from __future__ import annotations

import uuid

from redis.asyncio import Redis
from redis.exceptions import RedisError

from indexer.snapshots.base import SnapshotStoreError

_CHUNK_BYTES = 16 * 2**20  # far below the 512 MB that one value may have
_EXPIRE_S = 24 * 3600  # chunks of a writer that died between writing and pointing


class RedisStore:
    """See `SnapshotStore`. Keys: `<prefix>:current` names the chunks `<prefix>:<id>:<number>` and their count."""

    def __init__(self, url: str, prefix: str = "kvsight:snapshot") -> None:
        self._redis: Redis = Redis.from_url(url)
        self._prefix = prefix

    async def save(self, image: bytes) -> None:
        name = uuid.uuid4().hex
        chunks = [image[i : i + _CHUNK_BYTES] for i in range(0, len(image), _CHUNK_BYTES)] or [b""]
        try:
            for number, chunk in enumerate(chunks):
                await self._redis.set(self._chunk(name, number), chunk, ex=_EXPIRE_S)
            old = await self._current()
            await self._point_to(name, len(chunks))
            if old is not None:
                await self._redis.delete(*[self._chunk(old[0], number) for number in range(old[1])])
        except RedisError as error:
            raise SnapshotStoreError(f"Redis: {error}") from error

    async def load(self) -> bytes | None:
        try:
            current = await self._current()
            if current is None:
                return None
            chunks = await self._redis.mget([self._chunk(current[0], number) for number in range(current[1])])
        except RedisError as error:
            raise SnapshotStoreError(f"Redis: {error}") from error
        if any(chunk is None for chunk in chunks):
            raise SnapshotStoreError("Redis: chunks of the newest snapshot are missing")
        return b"".join(chunk for chunk in chunks if isinstance(chunk, bytes))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _point_to(self, name: str, num_chunks: int) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            for number in range(num_chunks):
                pipe.persist(self._chunk(name, number))
            pipe.set(f"{self._prefix}:current", f"{name} {num_chunks}")
            await pipe.execute()

    async def _current(self) -> tuple[str, int] | None:
        value = await self._redis.get(f"{self._prefix}:current")
        if value is None:
            return None
        name, num_chunks = (value if isinstance(value, str) else value.decode()).split(" ")
        return name, int(num_chunks)

    def _chunk(self, name: str, number: int) -> str:
        return f"{self._prefix}:{name}:{number}"
