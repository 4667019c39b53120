"""Tokens of the API: their scopes, their limits, and a file of them that changes while the service runs."""

import asyncio
import json
import logging
import signal
import time
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from api.access.guard import OPEN_PATHS, scope_of
from api.access.rate_limits import RateLimit
from api.access.tokens import Scope
from api.app import create_app
from api.service import LiveService
from api.settings import ApiSettings
from kv_events.errors import InvalidValueError
from tests.rigs.api import replace, served_worker
from tests.support.commands import RunningCommand
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.waiting import async_wait_for, async_wait_until

TOKENS = list(range(1, 17))
QUERY = {"model_name": "m", "token_ids": TOKENS}
SCOPES: tuple[str, ...] = get_args(Scope)


def secret(name: str) -> str:
    """The token of a name."""
    return f"{name}-0123456789abcdef"


def as_(name: str) -> dict[str, str]:
    """The headers of a caller with the token of a name."""
    return {"authorization": f"Bearer {secret(name)}"}


def table(name: str, *scopes: str, limit: float | None = None) -> str:
    text = f'[{name}]\ntoken = "{secret(name)}"\nscopes = {list(scopes)}\n'
    return text if limit is None else f"{text}requests_per_s = {limit}\n"


a_service = partial(served_worker, TOKENS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens.toml"


async def test_a_query_needs_the_scope_read(file: Path) -> None:
    """On the fast path, too. `test_hostile_input` has the scopes of all routes."""
    replace(file, "".join(table(scope, scope) for scope in SCOPES))
    async with a_service(api_tokens_file=file, api_token="of-everything") as client:
        for _ in range(3):  # the fast path knows the callers from the second one on
            for scope in SCOPES:
                answer = await client.post("/query", json=QUERY, headers=as_(scope))
                if scope in ("read", "admin"):
                    assert answer.is_success, scope
                else:
                    detail = check_problem(answer, 403)["detail"]
                    assert detail == "Authorization: the token lacks the scope read", scope
            for wrong in (b"", b"Bearer unknown", secret("read").encode(), "é".encode()):
                refused = await client.post("/query", json=QUERY, headers=[(b"authorization", wrong)])
                assert secret("read") not in str(check_problem(refused, 401))
                assert refused.headers["www-authenticate"] == "Bearer"
            for scheme in ("Bearer", "bearer", "BEARER"):
                own = {"authorization": f"{scheme} of-everything"}
                assert (await client.post("/query", json=QUERY, headers=own)).is_success
        for path in ("/health", "/ready", "/metrics", "/docs"):
            assert (await client.get(path)).is_success


async def test_the_steps_of_a_reservation_need_the_scope_decisions_and_count_for_a_limit(file: Path) -> None:
    slow = table("slow", "decisions", limit=4)
    replace(file, "".join(table(scope, scope) for scope in SCOPES) + slow)
    async with a_service(api_tokens_file=file) as client:
        reserved = await client.post("/select_and_reserve", json=QUERY, headers=as_("decisions"))
        steps = f"/reservations/{reserved.json()['selection_id']}"
        for scope in SCOPES:
            answer = await client.post(f"{steps}/output_block", headers=as_(scope))
            assert answer.status_code == (200 if scope in ("decisions", "admin") else 403), scope
        assert (await client.delete(steps)).status_code == 401
        codes = [(await client.post(f"{steps}/output_block", headers=as_("slow"))).status_code for _ in range(20)]
        assert 429 in codes
        assert (await client.delete(steps, headers=as_("decisions"))).is_success


def test_every_route_that_changes_something_needs_more_than_reading() -> None:
    paths = create_app(LiveService(HandFed().consumer, ApiSettings())).openapi()["paths"]
    assert {method for operations in paths.values() for method in operations} == {"get", "post", "patch", "delete"}
    changes = [(method.upper(), path) for path, operations in paths.items() for method in operations if method != "get"]
    scopes = {(method, path): scope_of(method, path) for method, path in changes}
    assert {path for (_, path), scope in scopes.items() if scope == "read"} == {
        *("/query", "/query_by_hash", "/query/batch", "/explain", "/tokenize"),
        *("/select", "/potential_loads", "/overlap_scores"),
    }
    one, reservation = "/workers/{worker}", "/reservations/{reservation_id}"
    assert {change: scope for change, scope in scopes.items() if scope != "read"} == {
        **{("POST", path): "register" for path in ("/register", "/unregister", "/workers")},
        **{(method, one): "register" for method in ("PATCH", "DELETE")},
        ("POST", f"{one}/resync"): "resync",
        **{("POST", path): "decisions" for path in ("/decisions", "/select_and_reserve", "/reservations")},
        **{("POST", f"{reservation}/{step}"): "decisions" for step in ("prefill_complete", "output_block")},
        ("DELETE", reservation): "decisions",
    }
    assert not {path for _, path in changes} & OPEN_PATHS


async def test_tokens_change_while_the_service_runs(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    replace(file, table("old", "read"))
    async with a_service(api_tokens_file=file) as client:

        async def status(name: str) -> int:
            return (await client.post("/query", json=QUERY, headers=as_(name))).status_code

        for _ in range(10):  # one connection whose requests are alike
            assert await status("old") == 200
        replace(file, table("old", "read") + table("new", "read"))
        async with asyncio.timeout(60):
            while await status("new") != 200:
                assert await status("old") == 200
        replace(file, table("new", "read"))
        async with asyncio.timeout(60):
            while await status("old") != 401:
                assert await status("new") == 200
        with caplog.at_level(logging.ERROR):
            for wrong in ('[new]\ntoken = "secret-of-someone"\n', "secret-of-someone", ""):
                caplog.clear()
                replace(file, wrong)
                await async_wait_until(lambda: "the tokens stay as they are" in caplog.text, 60, wrong)
                assert "secret-of-someone" not in caplog.text
                assert await status("new") == 200


async def test_the_tokens_of_a_deleted_file_are_no_longer_valid(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    replace(file, table("caller", "read"))
    async with a_service(api_tokens_file=file) as client:

        async def is_permitted() -> bool:
            return (await client.post("/query", json=QUERY, headers=as_("caller"))).is_success

        async def is_refused() -> bool:
            return not await is_permitted()

        assert await is_permitted()
        await asyncio.to_thread(file.unlink)
        await async_wait_until(is_refused, 60, "the end of the token")
        replace(file, table("caller", "read"))
        await async_wait_until(is_permitted, 60, "the token of the new file")
    assert f"{file} was deleted" in caplog.text


async def test_an_open_stream_of_events_ends_with_its_token(file: Path) -> None:
    replace(file, table("stays", "read") + table("goes", "read") + table("shrinks", "read"))
    async with a_service(api_tokens_file=file) as client:
        received = dict.fromkeys(("stays", "goes", "shrinks"), 0)

        async def listen(name: str) -> None:
            async with client.stream("GET", "/events", headers=as_(name), timeout=None) as answer:
                assert answer.status_code == 200
                async for _ in answer.aiter_lines():
                    received[name] += 1

        listening = {name: asyncio.create_task(listen(name)) for name in received}
        await async_wait_until(lambda: all(received.values()), 60, "all streams to begin")
        replace(file, table("stays", "read") + table("shrinks", "decisions"))
        ended = [listening["goes"], listening["shrinks"]]
        await async_wait_until(lambda: all(task.done() for task in ended), 60, "the end of two streams")
        await asyncio.gather(*ended)
        assert not listening["stays"].done()
        for name, status in (("goes", 401), ("shrinks", 403), ("stays", 200)):
            assert (await client.get("/workers", headers=as_(name))).status_code == status
        listening["stays"].cancel()
        await asyncio.gather(*listening.values(), return_exceptions=True)


async def test_top_waits_out_a_limit_of_requests(file: Path) -> None:
    replace(file, table("slow", "read", limit=1))
    async with a_service(api_tokens_file=file) as client:
        words = ("top", "--json", "--interval", 0.1, "--url", client.base_url)
        with RunningCommand(*words, KVSIGHT_API_TOKEN=secret("slow")) as command:
            await async_wait_until(lambda: command.out.count("\n") >= 3, 60, "lines, two of them after refusals")
            assert await asyncio.to_thread(command.end, signal.SIGINT) == 0, command.err
        assert [json.loads(line)["num_workers"] for line in command.out.splitlines()[:3]] == [1, 1, 1]
        assert "more requests with this token than it permits in a second" in command.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a =\nb = 1", "TOML, wrong at line 1"),
        ('token = "secret-of-someone"', "table 'token' with token, scopes"),
        ('[a]\ntoken = "secret-of-someone"', "table 'a' with token, scopes"),
        ('[a]\ntoken = "secret-of-someone"\nscopes = []', "scopes is wrong"),
        ('[a]\ntoken = "secret-of-someone"\nscopes = ["secret-of-someone"]', "scopes[0] is wrong"),
        ('[a]\ntoken = "secret-of-someone"\nscopes = ["read"]\nrequests_per_s = 0', "requests_per_s is wrong"),
        ('[a]\ntoken = "secret-of-someone"\nscopes = ["read"]\nlimit = 1', "table 'a'"),
        ('[a]\ntoken = "secret of someone"\nscopes = ["read"]', "16 .. 512 printable ASCII"),
        ('[a]\ntoken = "short"\nscopes = ["read"]', "16 .. 512 printable ASCII"),
        (table("a", "read") + table("a", "read").replace("[a]", "[b]"), "another token in table 'b'"),
        ("\n".join(table(f"t{number}", "read") for number in range(257)), "at most 256 tokens, not 257"),
        (None, "a file that can be read"),
    ],
)
def test_a_bad_file_stops_the_start_and_shows_no_token(file: Path, text: str | None, words: str) -> None:
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidValueError) as raised:
        create_app(LiveService(HandFed().consumer, ApiSettings(api_tokens_file=file)))
    assert str(raised.value).startswith("--api-tokens-file: got ")
    assert words in str(raised.value)
    for token in ("secret", "someone", "0123456789abcdef"):
        assert token not in str(raised.value)


async def test_a_token_has_a_limit_on_either_path(file: Path) -> None:
    replace(file, table("limited", "read", limit=5) + table("free", "read"))
    async with a_service(api_tokens_file=file) as client:
        began, statuses = time.monotonic(), []
        for number in range(40):
            method, path, body = ("POST", "/query", QUERY) if number % 2 else ("GET", "/workers", None)
            answer = await client.request(method, path, json=body, headers=as_("limited"))
            statuses.append(answer.status_code)
            if answer.status_code == 429:
                check_problem(answer, 429, "too-many-requests")
                assert answer.headers["retry-after"] == "1"
            assert (await client.post("/query", json=QUERY, headers=as_("free"))).status_code == 200
        seconds = time.monotonic() - began
        assert set(statuses) <= {200, 429}
        assert 5 <= statuses.count(200) <= 5 + 5 * seconds + 1
        assert statuses[:5] == [200] * 5
        ask = partial(client.post, "/query", json=QUERY, headers=as_("limited"))
        await async_wait_for(ask, lambda answer: answer.is_success, 60, "room for a request")


async def test_each_query_of_a_batch_counts(file: Path) -> None:
    replace(file, table("limited", "read", limit=2))
    async with a_service(api_tokens_file=file) as client:
        for queries in ([], [QUERY] * 100):  # an empty one is a request, too
            answer = await client.post("/query/batch", json={"queries": queries}, headers=as_("limited"))
            assert (answer.status_code, len(answer.json()["results"])) == (200, len(queries))
        answer = await client.post("/query", json=QUERY, headers=as_("limited"))
    check_problem(answer, 429, "too-many-requests")
    assert 30 < int(answer.headers["retry-after"]) <= 51


class Clock:
    """Seconds that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def num_permitted(limit: RateLimit) -> int:
    """Send requests at one instant. Returns how many are permitted."""
    num_sent = 0
    while num_sent < 100 and not limit.wait_s():
        limit.note()
        num_sent += 1
    return num_sent


@pytest.mark.parametrize(("per_s", "at_once"), [(5.0, 5), (1.0, 1), (0.5, 1), (7.3, 7)])
def test_a_seconds_requests_are_permitted_at_once_and_then_by_and_by(per_s: float, at_once: int) -> None:
    clock = Clock()
    limit = RateLimit(per_s, clock)
    assert num_permitted(limit) == at_once
    wait_s = limit.wait_s()
    assert 0.0 < wait_s <= 1.0 / per_s + 1e-6
    clock.now += wait_s
    assert num_permitted(limit) == 1
    clock.now += 1000.0
    assert num_permitted(limit) == at_once
