"""Clients of the API: `Client` blocks, `AsyncClient` has the same methods as coroutines.

Prompts are sent as msgpack with packed numbers, the fastest form. Requests that can be repeated safely are retried
after a broken connection, a 429 and a 503 (`RetryPolicy`). `calls` defines the requests and how answers are read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from kvsight import calls
from kvsight.base_client import BaseClient, Outcome
from kvsight.calls import Call
from kvsight.choice import WorkerChoice
from kvsight.errors import KvsightHttpError
from kvsight.feed import feed_request
from kvsight.prompts import Numbers, Prompt
from kvsight.retrying import RetryPolicy
from kvsight.schemas.events import FeedEvent
from kvsight.schemas.queries import PeerAnswer, TierWeights
from kvsight.schemas.workers import RadixView, Worker

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"


class Client(BaseClient):
    """A blocking client of one API address. Threads may share it.

    Every method raises KvsightHttpError if the API refuses the request, KvsightConnectionError if the server does not
    answer, UnexpectedAnswerError if the answer is not from a kvsight API, and InvalidValueError for invalid arguments.

    url: may contain a user and a password, which are sent instead of a token. Errors and log lines show neither.
    timeout_s: for each of connecting, sending and receiving, in every attempt. transport: replaces the network.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        timeout_s: float = 5.0,
        retry: RetryPolicy | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(url, token, timeout_s, retry)
        self._http = httpx.Client(transport=transport, **self._options)

    def send(self, call: Call[T]) -> T:
        """Send a call of `kvsight.calls`."""
        attempts = self._attempts(call)
        try:
            attempt = next(attempts)
            while True:
                if attempt.pause_s:
                    time.sleep(attempt.pause_s)
                attempt = attempts.send(self._outcome(attempt.request))
        except StopIteration as end:
            result: T = end.value
            return result

    def query(
        self,
        model: str,
        token_ids: Numbers,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        is_eagle: bool = False,
        tenant: str | None = None,
        tier_weights: TierWeights | None = None,
    ) -> PeerAnswer:
        """How much of a prompt each worker holds. The prompt is given by its tokens.

        is_eagle: the workers' pages consist of token pairs (EAGLE-type models). tenant: None selects the default
        tenant. tier_weights: of gpu, cpu, disk and external, in this order or by name; requests the `weighted` fields.
        """
        return self.send(
            calls.query(
                model,
                token_ids,
                lora_name=lora_name,
                cache_salt=cache_salt,
                is_eagle=is_eagle,
                tenant=tenant,
                tier_weights=tier_weights,
            )
        )

    def query_by_hash(
        self,
        model: str,
        *,
        seq_hashes: Numbers | None = None,
        block_hashes: Numbers | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        is_eagle: bool = False,
        tenant: str | None = None,
        tier_weights: TierWeights | None = None,
    ) -> PeerAnswer:
        """How much of a prompt each worker holds. Its pages are given as rolling unsigned or local signed hashes."""
        return self.send(
            calls.query_by_hash(
                model,
                seq_hashes=seq_hashes,
                block_hashes=block_hashes,
                lora_name=lora_name,
                cache_salt=cache_salt,
                is_eagle=is_eagle,
                tenant=tenant,
                tier_weights=tier_weights,
            )
        )

    def query_batch(self, prompts: Sequence[Prompt]) -> list[PeerAnswer | KvsightHttpError]:
        """An answer for each prompt, in order. For a refused prompt, the error takes its place and is not raised."""
        return self.send(calls.query_batch(prompts))

    def query_raw(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send the fields of a query in either dialect as they are, and return the answer undecoded."""
        return self.send(calls.query_raw(body))

    def best_worker(
        self,
        model: str,
        token_ids: Numbers,
        *,
        load: Mapping[str, float] | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        is_eagle: bool = False,
        tenant: str | None = None,
        tier_weights: TierWeights | None = None,
    ) -> WorkerChoice | None:
        """Query, and choose a worker by the rule of `kvsight.best_worker`. No worker holds pages of an unknown model.

        tier_weights: default to 1, 0.75, 0.5 and 0.25.
        """
        return self.send(
            calls.best_worker(
                model,
                token_ids,
                load=load,
                lora_name=lora_name,
                cache_salt=cache_salt,
                is_eagle=is_eagle,
                tenant=tenant,
                tier_weights=tier_weights,
            )
        )

    def workers(self, model: str | None = None, tenant: str | None = None) -> list[Worker]:
        """All workers with the state of their views."""
        return self.send(calls.workers(model, tenant))

    def view(
        self,
        worker: str,
        *,
        dp_rank: int | None = None,
        model: str | None = None,
        tenant: str | None = None,
        limit: int = 1000,
        cursor: int = 0,
    ) -> RadixView:
        """Up to `limit` pages of a worker stream. cursor: `next_cursor` of the previous part."""
        return self.send(calls.view(worker, dp_rank=dp_rank, model=model, tenant=tenant, limit=limit, cursor=cursor))

    def resync(
        self, worker: str, *, dp_rank: int | None = None, model: str | None = None, tenant: str | None = None
    ) -> list[str]:
        """Request a resync from the publishers of a worker. Returns the keys of the streams that will be asked."""
        return self.send(calls.resync(worker, dp_rank=dp_rank, model=model, tenant=tenant))

    def dump(self) -> dict[str, Any]:
        """The contents of all views, in Dynamo's format. The answer can be large."""
        return self.send(calls.dump())

    def register(
        self,
        instance_id: str | int,
        endpoint: str,
        model: str,
        block_size: int,
        *,
        dp_rank: int = 0,
        replay_endpoint: str | None = None,
        tenant: str | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Let the service read an engine's ZMQ events. endpoint: such as tcp://HOST:5557.

        lora_name, cache_salt: defaults for pages whose events contain none. A service that reads a log refuses with
        404.
        """
        self.send(
            calls.register(
                instance_id,
                endpoint,
                model,
                block_size,
                dp_rank=dp_rank,
                replay_endpoint=replay_endpoint,
                tenant=tenant,
                lora_name=lora_name,
                cache_salt=cache_salt,
            )
        )

    def unregister(
        self, instance_id: str | int, model: str, *, dp_rank: int | None = None, tenant: str | None = None
    ) -> None:
        """Undo `register`, for one rank or for all."""
        self.send(calls.unregister(instance_id, model, dp_rank=dp_rank, tenant=tenant))

    def health(self) -> bool:
        """Whether the service is healthy."""
        return self.send(calls.health())

    def ready(self) -> bool:
        """Whether the service has caught up with its log."""
        return self.send(calls.ready())

    def events(
        self, *, worker: str | None = None, model: str | None = None, tenant: str | None = None
    ) -> Generator[FeedEvent]:
        """Iterate over what happens to the views: first the state of each, then batches and state changes.

        The iterator ends when the server stops, or after `ClientDropped`, which reports that this client read too
        slowly. Events between two calls are missed. Closing the iterator closes the connection.
        """
        reader = self._feed()
        try:
            with self._http.stream(**feed_request(worker, model, tenant, self._timeout_s)) as response:
                if not response.is_success:
                    response.read()
                self._check_feed(response)
                for received in response.iter_raw():
                    yield from reader.take(received)
        except httpx.HTTPError as error:
            raise self._broken("/events", error) from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _outcome(self, request: dict[str, Any]) -> Outcome:
        try:
            return self._http.request(**request)
        except httpx.HTTPError as error:
            return error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(BaseClient):
    """`Client` for asyncio: the same methods, as coroutines."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        timeout_s: float = 5.0,
        retry: RetryPolicy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, token, timeout_s, retry)
        self._http = httpx.AsyncClient(transport=transport, **self._options)

    async def send(self, call: Call[T]) -> T:
        """Send a call of `kvsight.calls`."""
        attempts = self._attempts(call)
        try:
            attempt = next(attempts)
            while True:
                if attempt.pause_s:
                    await asyncio.sleep(attempt.pause_s)
                attempt = attempts.send(await self._outcome(attempt.request))
        except StopIteration as end:
            result: T = end.value
            return result

    async def query(
        self,
        model: str,
        token_ids: Numbers,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        is_eagle: bool = False,
        tenant: str | None = None,
        tier_weights: TierWeights | None = None,
    ) -> PeerAnswer:
        """See `Client.query`."""
        return await self.send(
            calls.query(
                model,
                token_ids,
                lora_name=lora_name,
                cache_salt=cache_salt,
                is_eagle=is_eagle,
                tenant=tenant,
                tier_weights=tier_weights,
            )
        )

    async def query_by_hash(
        self,
        model: str,
        *,
        seq_hashes: Numbers | None = None,
        block_hashes: Numbers | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        is_eagle: bool = False,
        tenant: str | None = None,
        tier_weights: TierWeights | None = None,
    ) -> PeerAnswer:
        """See `Client.query_by_hash`."""
        return await self.send(
            calls.query_by_hash(
                model,
                seq_hashes=seq_hashes,
                block_hashes=block_hashes,
                lora_name=lora_name,
                cache_salt=cache_salt,
                is_eagle=is_eagle,
                tenant=tenant,
                tier_weights=tier_weights,
            )
        )

    async def query_batch(self, prompts: Sequence[Prompt]) -> list[PeerAnswer | KvsightHttpError]:
        """See `Client.query_batch`."""
        return await self.send(calls.query_batch(prompts))

    async def query_raw(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `Client.query_raw`."""
        return await self.send(calls.query_raw(body))

    async def best_worker(
        self,
        model: str,
        token_ids: Numbers,
        *,
        load: Mapping[str, float] | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        is_eagle: bool = False,
        tenant: str | None = None,
        tier_weights: TierWeights | None = None,
    ) -> WorkerChoice | None:
        """See `Client.best_worker`."""
        return await self.send(
            calls.best_worker(
                model,
                token_ids,
                load=load,
                lora_name=lora_name,
                cache_salt=cache_salt,
                is_eagle=is_eagle,
                tenant=tenant,
                tier_weights=tier_weights,
            )
        )

    async def workers(self, model: str | None = None, tenant: str | None = None) -> list[Worker]:
        """See `Client.workers`."""
        return await self.send(calls.workers(model, tenant))

    async def view(
        self,
        worker: str,
        *,
        dp_rank: int | None = None,
        model: str | None = None,
        tenant: str | None = None,
        limit: int = 1000,
        cursor: int = 0,
    ) -> RadixView:
        """See `Client.view`."""
        return await self.send(
            calls.view(worker, dp_rank=dp_rank, model=model, tenant=tenant, limit=limit, cursor=cursor)
        )

    async def resync(
        self, worker: str, *, dp_rank: int | None = None, model: str | None = None, tenant: str | None = None
    ) -> list[str]:
        """See `Client.resync`."""
        return await self.send(calls.resync(worker, dp_rank=dp_rank, model=model, tenant=tenant))

    async def dump(self) -> dict[str, Any]:
        """See `Client.dump`."""
        return await self.send(calls.dump())

    async def register(
        self,
        instance_id: str | int,
        endpoint: str,
        model: str,
        block_size: int,
        *,
        dp_rank: int = 0,
        replay_endpoint: str | None = None,
        tenant: str | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """See `Client.register`."""
        await self.send(
            calls.register(
                instance_id,
                endpoint,
                model,
                block_size,
                dp_rank=dp_rank,
                replay_endpoint=replay_endpoint,
                tenant=tenant,
                lora_name=lora_name,
                cache_salt=cache_salt,
            )
        )

    async def unregister(
        self, instance_id: str | int, model: str, *, dp_rank: int | None = None, tenant: str | None = None
    ) -> None:
        """See `Client.unregister`."""
        await self.send(calls.unregister(instance_id, model, dp_rank=dp_rank, tenant=tenant))

    async def health(self) -> bool:
        """See `Client.health`."""
        return await self.send(calls.health())

    async def ready(self) -> bool:
        """See `Client.ready`."""
        return await self.send(calls.ready())

    async def events(
        self, *, worker: str | None = None, model: str | None = None, tenant: str | None = None
    ) -> AsyncGenerator[FeedEvent]:
        """See `Client.events`."""
        reader = self._feed()
        try:
            async with self._http.stream(**feed_request(worker, model, tenant, self._timeout_s)) as response:
                if not response.is_success:
                    await response.aread()
                self._check_feed(response)
                async for received in response.aiter_raw():
                    for event in reader.take(received):
                        yield event
        except httpx.HTTPError as error:
            raise self._broken("/events", error) from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _outcome(self, request: dict[str, Any]) -> Outcome:
        try:
            return await self._http.request(**request)
        except httpx.HTTPError as error:
            return error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()
