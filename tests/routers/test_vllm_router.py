"""The real vllm-router, with an index of its own, on events that kvsight sends on."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.rigs.routed_fleet import INSTALLS_A_ROUTER, RepublishedFleet, conversations, run
from tests.support.http_checks import WITHOUT_TLS
from tests.support.servers.vllm_router import VllmRouter
from tests.support.waiting import wait_until

pytestmark = INSTALLS_A_ROUTER


@pytest.fixture
def fleet() -> Iterator[RepublishedFleet]:
    with RepublishedFleet() as running:
        yield running


def cached(url: str, tokens: list[int]) -> int:
    """Tokens of a prompt that its engine reused."""
    body = {"model": "m", "prompt": tokens}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30, verify=WITHOUT_TLS)
    return int(answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_requests_go_where_their_prompt_is(fleet: RepublishedFleet, tmp_path: Path) -> None:
    with VllmRouter(tmp_path, fleet.events) as router:
        outcome = asyncio.run(run(router.url, conversations(12, 5), at_once=1, model="m"))
        assert outcome.failures == 0
        assert outcome.share > 0.9


def test_a_router_that_comes_late_knows_all(fleet: RepublishedFleet, tmp_path: Path) -> None:
    prompts = [[engine * 1000 + number for number in range(64)] for engine in range(1, 4)]
    for engine, prompt in zip(fleet.events, prompts, strict=True):
        cached(engine, prompt)
    with VllmRouter(tmp_path, fleet.events) as router:
        # each prompt goes on with a new token, so that a wrong engine would not know the next one, either
        wait_until(lambda: [cached(router.url, [*each, 1]) for each in prompts] == [64, 64, 64], 20)


def test_without_kvsight_no_request_fails(fleet: RepublishedFleet, tmp_path: Path) -> None:
    waves = conversations(6, 4)
    with VllmRouter(tmp_path, fleet.events) as router:
        first = asyncio.run(run(router.url, waves[:2], model="m"))
        fleet.kill_kvsight()
        second = asyncio.run(run(router.url, waves[2:], model="m"))
    assert first.failures + second.failures == 0
