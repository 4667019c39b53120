"""Retries of a client when a server fails, is busy, or is not a kvsight server."""

import time
from typing import Any

import httpx
import pytest

from kv_events.errors import InvalidValueError
from kvsight import AsyncClient, KvsightConnectionError, KvsightHttpError, RetryPolicy
from kvsight.errors import UnexpectedAnswerError
from tests.support.servers.scripted_server import HANG_UP, Reply, scripted

AT_ONCE = RetryPolicy(attempts=3, first_pause_s=0)
LATIN_1 = b'{"scores": {"indispon\xedvel": {}}, "instances": {}}'
DEEP = b'{"a":' * 200_000
ANSWER = Reply(body=b'{"scores": {}, "instances": {}}')


async def outcome(*replies: Reply | None, retry: RetryPolicy = AT_ONCE) -> tuple[int | str, list[bytes]]:
    """The status, the error, or "" of a query, and the bodies of its attempts."""
    async with scripted(*replies) as server, AsyncClient(server.url, retry=retry) as client:
        try:
            assert (await client.query("m", [1])).instances == {}
            found: int | str = ""
        except KvsightHttpError as error:
            found = error.status
        except KvsightConnectionError as error:
            found = str(error)
    return found, [request.body for request in server.requests]


@pytest.mark.parametrize("first", [HANG_UP, Reply(503), Reply(429), Reply(503, headers=("retry-after: 0",))])
async def test_an_attempt_that_may_be_repeated_is(first: Reply | None) -> None:
    found, bodies = await outcome(first, first, ANSWER)
    assert (found, len(bodies), len(set(bodies))) == ("", 3, 1)


@pytest.mark.parametrize(
    "final", [Reply(400), Reply(404), Reply(422), Reply(500), Reply(502), Reply(503, headers=("retry-after: 30",))]
)
async def test_a_refusal_and_a_server_that_asks_for_a_long_pause_are_final(final: Reply) -> None:
    found, bodies = await outcome(final)
    assert (found, len(bodies)) == (final.status, 1)


async def test_the_last_attempts_outcome_is_the_callers() -> None:
    found, bodies = await outcome(HANG_UP, Reply(503), Reply(429))
    assert (found, len(bodies)) == (429, 3)
    assert "/query" in str((await outcome(HANG_UP, HANG_UP, HANG_UP))[0])


async def test_what_must_not_be_done_twice_is_sent_once() -> None:
    async with scripted(HANG_UP) as server, AsyncClient(server.url, retry=AT_ONCE) as client:
        with pytest.raises(KvsightConnectionError):
            await client.register("w", "tcp://e:5557", "m", 16)
    assert len(server.requests) == 1


async def test_a_probe_believes_a_busy_server() -> None:
    async with scripted(Reply(503), Reply(503), Reply(404)) as server, AsyncClient(server.url, retry=AT_ONCE) as client:
        assert await client.ready() is False
        assert await client.health() is False
        with pytest.raises(KvsightHttpError, match="404"):
            await client.ready()


async def test_a_slow_server_is_not_asked_again() -> None:
    async with AsyncClient("http://t", transport=SlowTransport(), retry=AT_ONCE) as client:
        with pytest.raises(KvsightConnectionError, match="too slow"):
            await client.query("m", [1])


class SlowTransport(httpx.AsyncBaseTransport):
    """Simulates a slow network: it fails immediately, and on a second request with another error."""

    _num_requests = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._num_requests += 1
        raise httpx.ReadTimeout("too slow" if self._num_requests == 1 else "asked again")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"scores": 1}', b"\xff", LATIN_1, DEEP])
async def test_an_answer_of_another_server_is_an_error(body: bytes) -> None:
    async with scripted(Reply(body=body)) as server, AsyncClient(server.url) as client:
        with pytest.raises(UnexpectedAnswerError, match=r"/query: status 200, but not an answer of a kvsight API"):
            await client.query("m", [1])


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'{"error": "instance 9 not found"}', "instance 9 not found"),  # Dynamo's service
        (b"failed to parse\n  the body", "failed to parse the body"),  # its parser
        (b"", ""),
        (b"\xff" * 1000, "\ufffd" * 200),
        (b'{"error": "indispon\xedvel"}', '{"error": "indispon\ufffdvel"}'),  # a proxy's
        (DEEP, '{"a":' * 40),
    ],
)
async def test_refusals_of_strangers_are_understood_as_far_as_they_go(body: bytes, detail: str) -> None:
    async with scripted(Reply(404, body)) as server, AsyncClient(server.url) as client:
        with pytest.raises(KvsightHttpError) as caught:
            await client.unregister(9, "m")
    assert (caught.value.title, caught.value.detail, caught.value.kind) == ("Not Found", detail, "about:blank")


def test_pauses_double_up_to_a_bound() -> None:
    policy = RetryPolicy(attempts=6, first_pause_s=1, longest_pause_s=4)
    pauses = [policy.pause(attempt, httpx.ConnectError("")) for attempt in range(6)]
    for pause, most in zip(pauses, [1, 2, 4, 4, 4], strict=False):
        assert pause is not None
        assert most / 2 <= pause <= most
    assert pauses[5] is None


def test_a_servers_wish_is_heeded() -> None:
    def wish(after: str) -> float | None:
        return RetryPolicy(first_pause_s=0).pause(0, httpx.Response(503, headers={"retry-after": after}))

    assert [wish(after) for after in ("2", "3", "0", "Wed, 21 Oct 2015 07:28:00 GMT", "-1")] == [2, None, 0, 0, 0]


async def test_the_client_waits_between_attempts() -> None:
    began = time.monotonic()
    assert (await outcome(Reply(503), ANSWER, retry=RetryPolicy(attempts=2, first_pause_s=0.1)))[0] == ""
    assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize("policy", [{"attempts": 0}, {"first_pause_s": -1.0}, {"longest_pause_s": float("nan")}])
def test_an_impossible_policy_is_refused(policy: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match=next(iter(policy))):
        RetryPolicy(**policy)
