"""`kvsight route` with real processes: where requests go, and what callers see of failures."""

import asyncio
import json
import signal
import socket
import time
from typing import Self

import httpx

from tests.rigs.routed_fleet import IN_TIME, RoutedFleet, conversations, run
from tests.support.commands import RunningCommand, kvsight
from tests.support.http_checks import WITHOUT_TLS
from tests.support.servers.child_process import free_port

CHAT = {"model": "m", "messages": [{"role": "user", "content": "which city is it? " * 8}]}
DEAD_URL = "http://127.0.0.1:9"
pytestmark = IN_TIME


class Route(RunningCommand):
    """The command beside a test."""

    def __init__(self, *words: object) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        super().__init__("route", "--port", port, *words)
        self._http = httpx.Client(base_url=self.url, verify=WITHOUT_TLS, timeout=30)

    def chat(self, **fields: object) -> httpx.Response:
        return self._http.post("/v1/chat/completions", json=CHAT | fields)

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def counted(self, chosen_by: str) -> float:
        lines = [line for line in self.get("/metrics").text.splitlines() if f'chosen_by="{chosen_by}"' in line]
        return sum(float(line.split()[-1]) for line in lines if "_total" in line)

    def __enter__(self) -> Self:
        self.wait_for("routes on")
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()
        super().__exit__(*error)


def test_requests_go_where_their_prompt_is_and_are_released(fleet: RoutedFleet) -> None:
    with Route("--url", fleet.url) as route:
        assert route.get("/health").json()["workers"] == ["e0", "e1", "e2"]
        outcome = asyncio.run(run(route.url, conversations(12, 5), model="m"))
        assert outcome.failures == 0
        assert outcome.share > 0.8  # in turn: about a half
        assert route.counted("kvsight") == 60
        fleet.wait_for_release()


def test_a_stream_is_passed_on_as_it_is_and_other_paths_reach_an_engine(fleet: RoutedFleet) -> None:
    with Route("--url", fleet.url) as route:
        answer = route.chat(stream=True)
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert answer.headers["content-type"] == "text/event-stream"
        assert events.pop() == "[DONE]"
        parts = [json.loads(event)["choices"] for event in events]
        assert "".join(part[0]["delta"]["content"] for part in parts if part) == "yes"
        assert route.get("/v1/models").json()["data"][0]["id"] == "m"
        assert route.get("/unknown").status_code == 404
        with httpx.Client(proxy=route.url, verify=WITHOUT_TLS) as absolute:
            assert absolute.get("http://elsewhere/v1/models").json()["data"][0]["id"] == "m"
        fleet.wait_for_release()


def test_no_request_fails_when_kvsight_or_an_engine_is_killed(fleet: RoutedFleet) -> None:
    first, second = conversations(12, 4)[:2], conversations(12, 4)[2:]
    with Route("--url", fleet.url) as route:
        assert asyncio.run(run(route.url, first, model="m")).failures == 0
        late = route.counted("turn")  # for which kvsight took too long
        fleet.kill_kvsight()
        assert asyncio.run(run(route.url, second, model="m")).failures == 0
        assert route.counted("turn") == late + 24
        fleet.engines[1].kill()
        assert asyncio.run(run(route.url, second, model="m")).failures == 0
        for engine in fleet.engines:
            engine.kill()
        assert route.chat().status_code == 502


def test_without_kvsight_the_workers_of_the_flags_take_turns(fleet: RoutedFleet) -> None:
    flags = [word for number, each in enumerate(fleet.engines) for word in ("--worker", f"w{number}={each.url}/v1/")]
    with Route("--url", DEAD_URL, *flags) as route:
        assert [route.chat().headers["x-kvsight-worker"] for _ in range(6)] == ["w0", "w1", "w2"] * 2


def test_without_any_worker_it_says_so() -> None:
    with Route("--url", DEAD_URL) as route:
        assert (route.chat().status_code, route.get("/health").status_code) == (503, 503)
        assert "no worker is known" in route.chat().json()["error"]["message"]
    refusal = kvsight("route", "--host", "no.invalid", "--port", 0).stderr
    assert "cannot listen on no.invalid port 0: " in refusal
    for worker in ("e0", "e0=http://", "e0=http://user:secret@127.0.0.1:9"):
        refusal = kvsight("route", "--worker", worker).stderr
        assert "--worker" in refusal
        assert "secret" not in refusal
    twice = kvsight("route", "--worker", "e0=http://127.0.0.1:9", "--worker", "e0=http://127.0.0.1:10")
    assert twice.returncode == 2
    assert "--worker: e0 is given twice" in twice.stderr


def test_it_ends_in_seconds_though_an_engine_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as engine:
        engine.settimeout(30)
        address = f"http://127.0.0.1:{engine.getsockname()[1]}"
        with Route("--url", DEAD_URL, "--worker", f"e0={address}") as route, socket.socket() as caller:
            caller.connect(("127.0.0.1", int(route.url.rpartition(":")[2])))
            caller.sendall(b"GET /v1/models HTTP/1.1\r\nHost: route\r\n\r\n")
            with engine.accept()[0] as asked:
                assert asked.recv(4096).startswith(b"GET /v1/models")
                began = time.monotonic()
                route.end(signal.SIGTERM)
                assert time.monotonic() - began < 8  # five seconds for the request, and the end of a process
