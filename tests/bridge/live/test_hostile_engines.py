"""No engine's messages hold up the service: other engines, registrations and its end take no longer than usual."""

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kv_events.limits import MAX_ENGINE_EVENTS
from tests.support.engines.event_payloads import payload, stored
from tests.support.engines.hostile_payloads import hostile
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.http_checks import WITHOUT_TLS
from tests.support.servers.service_process import ServiceProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timing("other engines must be registered within a second")

SOON_S = 3.0
"""Each of these takes less than half a second on an idle machine."""
LOST = "batches lost"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("service")) as running:
        running.wait_until_ready()
        yield running


class Soon:
    """`with Soon("what"):` fails unless the block is left soon."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *error: object) -> None:
        took = time.monotonic() - self._began
        assert error[0] is not None or took < SOON_S, f"{self._what} took {took:.1f} s"


def posted(service: ServiceProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(service.url + path, json=body, timeout=60, verify=WITHOUT_TLS)


def register(service: ServiceProcess, name: str, engine: ZmqEngine) -> None:
    """Register an engine and wait until the service reads it."""
    body = {"instance_id": name, "endpoint": engine.endpoint, "model_name": "m", "block_size": 4}
    with Soon(f"registering {name}"):
        answer = posted(service, "/register", replay_endpoint=engine.replay_endpoint, **body)
    assert answer.status_code == 201, answer.text
    engine.wait_for_readers()


@contextlib.contextmanager
def registered(service: ServiceProcess, name: str, engine: ZmqEngine) -> Iterator[None]:
    """Keep an engine registered for the duration of the block."""
    register(service, name, engine)
    try:
        yield
    finally:
        with Soon(f"unregistering {name}"):
            assert posted(service, "/unregister", instance_id=name, model_name="m").is_success


def check_freshness(service: ServiceProcess, engine: ZmqEngine) -> None:
    """Check that a page that an engine stores is soon in the answers."""
    tokens = [random.randrange(2**31) for _ in range(4)]

    def is_known() -> bool:
        answer = posted(service, "/query", model_name="m", token_ids=tokens)
        return "good" in answer.json().get("instances", {})

    engine.send(payload(stored([tokens[0]], tokens)))
    with Soon("a page of another engine"):
        wait_until(is_known, 60)


def reason(service: ServiceProcess) -> str | None:
    return service.listener("bad").get("stale_reason")


@pytest.mark.parametrize(
    ("shape", "num_events"),
    [
        ("empty maps", MAX_ENGINE_EVENTS),
        ("two kinds of junk", MAX_ENGINE_EVENTS),
        ("junk, clears and stores", MAX_ENGINE_EVENTS),
        ("distinct salts", 120_000),
        ("groups and removals", 120_000),
    ],
)
def test_an_engine_whose_message_costs_seconds_holds_up_nothing(
    service: ServiceProcess, shape: str, num_events: int
) -> None:
    good, bad, other = (ZmqEngine(replay=False) for _ in range(3))
    with good, bad, other, registered(service, "good", good), registered(service, "bad", bad):
        for _ in range(4):
            bad.send(hostile(shape, num_events))
        check_freshness(service, good)
        with registered(service, "other", other):
            check_freshness(service, good)


def test_more_events_than_a_message_may_have_are_lost_until_the_engine_clears(service: ServiceProcess) -> None:
    with ZmqEngine(replay=False) as bad, registered(service, "bad", bad):
        bad.send(payload(stored([1], [1, 2, 3, 4])))
        wait_until(lambda: len(service.pages("bad")) == 1)
        bad.send(hostile("clears", MAX_ENGINE_EVENTS + 1))
        wait_until(lambda: str(reason(service)).startswith(LOST) and not service.pages("bad"))
        bad.send(hostile("clears", MAX_ENGINE_EVENTS))
        wait_until(lambda: reason(service) == "")
    assert f"{MAX_ENGINE_EVENTS + 1} events, at most {MAX_ENGINE_EVENTS}" in service.log.read_text()


@pytest.mark.parametrize("replay", [False, True])
def test_a_service_that_a_flood_of_large_messages_reaches_keeps_its_memory_and_ends_soon(
    tmp_path: Path, replay: bool
) -> None:
    """replay: the engine keeps the messages and sends them again, which is then the flood."""
    large = hostile("junk, clears and stores", 90_000)
    with ServiceProcess(tmp_path) as service, ZmqEngine(replay=replay) as bad:
        service.wait_until_ready()
        register(service, "bad", bad)
        process = psutil.Process(service.pid)
        before = highest = process.memory_info().rss
        for _ in range(150):
            bad.send(large, "dropped" if replay else "sent")
        bad.send(large)
        until = time.monotonic() + 3
        while time.monotonic() < until:
            highest = max(highest, process.memory_info().rss)
            assert service.get("/health").is_success
        assert highest < before + 300 * 2**20
        with Soon("SIGTERM"):
            service.terminate()
