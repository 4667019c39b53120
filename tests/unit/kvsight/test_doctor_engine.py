"""The client that `kvsight doctor` has for an engine."""

from __future__ import annotations

import asyncio

import pytest

from kvsight.cli.shared.engine_client import EngineClient, EngineError
from tests.support.servers.scripted_server import Reply, scripted


async def test_a_normal_answer_is_read() -> None:
    async with scripted(Reply(body=b'{"data":[{"id":"m"}]}')) as server:
        with EngineClient(server.url) as engine:
            assert await asyncio.to_thread(engine.model) == "m"


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_without_end_is_refused(status: int) -> None:
    async with scripted(Reply(status, b" " * (17 * 2**20))) as server:
        with EngineClient(server.url) as engine, pytest.raises(EngineError) as error:
            await asyncio.to_thread(engine.model)
    assert str(error.value) == f"{server.url}/v1/models: the answer is larger than 16777216 bytes"
