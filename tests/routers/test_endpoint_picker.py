"""The endpoint picker, asked by a real Envoy, with a real service that reads the events of three engines."""

import json
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.rigs.endpoints import BLOCK_SIZE, EchoingEngine
from tests.support.commands import RunningCommand
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.http_checks import WITHOUT_TLS
from tests.support.servers.child_process import free_port
from tests.support.servers.envoy import Envoy
from tests.support.servers.service_process import ServiceProcess
from tests.support.waiting import wait_until

grpc = pytest.importorskip("grpc", reason="the extra `envoy` is not installed")

PAGES = 8
ENDPOINT = "x-gateway-destination-endpoint"


class Site(NamedTuple):
    """Three engines behind Envoy. The service knows the last one by its address, the others by names and records."""

    engines: list[EchoingEngine]
    service: ServiceProcess
    picker_port: int
    envoy: Envoy
    http: httpx.Client

    def prompt(self, holder: int) -> list[int]:
        """Tokens of a new prompt, whose pages one engine holds, as the service knows."""
        tokens = [secrets.randbelow(100_000) for _ in range(PAGES * BLOCK_SIZE)]
        self.engines[holder].hold(tokens)
        question = {"model_name": "m", "token_ids": tokens}
        wait_until(lambda: self.service.post("/query", question).json().get("scores"), what="the pages")
        return tokens

    def send(self, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.post("/v1/completions", content=content, headers=named)

    def addresses(self, *numbers: int) -> str:
        return ",".join(self.engines[number].address for number in numbers)

    def booked(self, field: str = "active_requests") -> int:
        return sum(rank[field] for each in self.service.get("/loads").json() for rank in each["loads"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("envoy")
    with ExitStack() as stack:
        engines = [EchoingEngine(stack.enter_context(ZmqEngine())) for _ in range(3)]
        service = stack.enter_context(ServiceProcess(folder))
        for number, each in enumerate(engines[:2]):
            record = {"worker_id": f"engine-{number}", "model_name": "m", "endpoint": f"http://{each.address}"}
            events = {"kv_events_endpoints": {"0": each.events.endpoint}, "block_size": BLOCK_SIZE}
            assert service.post("/workers", record | events).is_success
        last = {"instance_id": engines[2].address, "endpoint": engines[2].events.endpoint, "model_name": "m"}
        assert service.post("/register", last | {"block_size": BLOCK_SIZE}).is_success
        for each in engines:
            each.events.wait_for_readers()
        picker_port, envoy = stack.enter_context(asking(service, [each.address for each in engines]))
        http = stack.enter_context(httpx.Client(base_url=envoy.url, verify=WITHOUT_TLS, timeout=60))
        whole = Site(engines, service, picker_port, envoy, http)
        for number in range(3):
            tokens = whole.prompt(number)
            wait_until(lambda: _goes_to(whole, tokens, number), what="the picker to know the engine")  # noqa: B023
        wait_until(lambda: whole.booked() == 0, what="no bookings")
        yield whole


@contextmanager
def asking(service: ServiceProcess, engines: list[str], deadline_ms: int = 5000) -> Iterator[tuple[int, Envoy]]:
    """Yield the port of a picker and an Envoy that asks it. deadline_ms: the machine may be slow."""
    flags = ("--url", service.url, "--port", (port := free_port()), "--deadline-ms", deadline_ms)
    envoy = Envoy(service.log.parent, engines, port)
    with RunningCommand("endpoint-picker", *flags) as picker:
        picker.wait_for("picks endpoints")
        with envoy:
            yield port, envoy


def _goes_to(site: Site, tokens: list[int], number: int) -> bool:
    return site.send({"model": "m", "prompt": tokens}).headers["x-engine"] == site.engines[number].address


@pytest.mark.parametrize("holder", range(3))
def test_a_request_goes_to_the_worker_that_holds_its_prompt(site: Site, holder: int) -> None:
    body = {"model": "m", "prompt": site.prompt(holder), "max_tokens": 3}
    answer = site.send(body, x_gateway_destination_endpoint="10.9.9.9:1")
    assert (answer.status_code, answer.json()) == (200, body)
    received = site.engines[holder].received[-1]
    assert json.loads(received.body) == body
    chosen, *others = received.headers[ENDPOINT].split(",")
    assert chosen == site.engines[holder].address
    assert sorted(others) == sorted({each.address for each in site.engines} - {chosen})  # fallbacks


def test_only_the_candidates_of_the_gateway_are_chosen(site: Site) -> None:
    prompt = site.prompt(0)
    for _ in range(3):
        answer = site.send({"model": "m", "prompt": prompt}, x_subset=site.addresses(1, 2))
        assert answer.headers["x-engine"] in site.addresses(1, 2).split(",")
    answer = site.send({"model": "m", "prompt": site.prompt(0)}, x_subset=site.addresses(1, 0))
    assert answer.headers["x-engine"] == site.engines[0].address
    forced = {"model": "m", "prompt": prompt, "allowed_worker_ids": ["engine-0"], "pinned_worker": "engine-0"}
    assert site.send(forced, x_subset=site.addresses(1)).headers["x-engine"] == site.engines[1].address


def test_without_candidates_the_answer_is_503(site: Site) -> None:
    before = [len(each.received) for each in site.engines]
    assert site.send({"model": "m", "prompt": [1]}, x_subset=",").status_code == 503
    assert [len(each.received) for each in site.engines] == before


def test_the_next_endpoint_is_tried_if_the_first_one_is_away_and_the_booking_moves(site: Site) -> None:
    with ZmqEngine() as events, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # does not listen
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
        body = {"instance_id": gone, "endpoint": events.endpoint, "model_name": "m", "block_size": BLOCK_SIZE}
        assert site.service.post("/register", body).is_success
        events.wait_for_readers()
        tokens = [secrets.randbelow(100_000) for _ in range(PAGES * BLOCK_SIZE)]
        EchoingEngine(events).hold(tokens)
        wait_until(lambda: site.service.post("/query", {"model_name": "m", "token_ids": tokens}).json().get("scores"))
        with asking(site.service, [gone, *_all(site)]) as (_, envoy):

            def sent(hold: dict[str, str]) -> httpx.Response:
                content = json.dumps({"model": "m", "prompt": tokens}).encode()
                return httpx.post(f"{envoy.url}/v1/completions", content=content, headers=hold, timeout=60)

            def tried_first() -> bool:
                used = sent({}).headers["x-engine"]
                received = next(each for each in site.engines if each.address == used).received[-1]
                return received.headers.get(ENDPOINT, "").startswith(f"{gone},")

            wait_until(tried_first, what="the picker to know the engine")
            wait_until(lambda: site.booked() == 0, what="no bookings")
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(sent, {"x-hold": "1"})
                wait_until(lambda: _requests(site).get(gone) == 0 and sum(_requests(site).values()) == 1, what="moved")
                for each in site.engines:
                    each.let_go.set()
                served = answer.result(60).headers["x-engine"]
            assert served in _all(site)
            wait_until(lambda: site.booked() == 0, what="the release")
        for each in site.engines:
            each.let_go.clear()
        assert site.service.post("/unregister", {"instance_id": gone, "model_name": "m"}).is_success


def _all(site: Site) -> list[str]:
    return [each.address for each in site.engines]


def _requests(site: Site) -> dict[str, int]:
    ranks = [rank for each in site.service.get("/loads").json() for rank in each["loads"]]
    return {str(rank["worker_id"]): rank["active_requests"] for rank in ranks}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00\xff" * 50_000,
        b"[1, 2",
        b'{"model": 7, "prompt": "x"}',
        b'{"model": "m", "prompt": "' + b"x" * 9_000_000 + b'"}',
    ],
    ids=["empty", "binary", "cut", "wrong", "larger than what is kept"],
)
def test_any_body_passes_unchanged_both_ways(site: Site, body: bytes) -> None:
    answer = site.send(body)
    assert (answer.status_code, answer.content) == (200, body)
    used = next(each for each in site.engines if each.address == answer.headers["x-engine"])
    assert used.received[-1].body == body


def test_a_streamed_body_and_a_request_without_a_body_pass(site: Site) -> None:
    parts = [secrets.token_bytes(10_000) for _ in range(30)]
    assert site.http.post("/v1/files", content=iter(parts)).content == b"".join(parts)
    assert site.http.get("/v1/models").status_code == 200


def test_a_booking_lasts_until_the_response_ends_and_its_prefill_until_the_first_bytes(site: Site) -> None:
    prompt = [secrets.randbelow(100_000) for _ in range(PAGES * BLOCK_SIZE)]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(site.send, {"model": "m", "prompt": prompt}, x_hold="1")
        wait_until(lambda: site.booked() == 1, what="the booking")
        wait_until(lambda: site.booked("potential_prefill_tokens") == 0, what="the end of the prefill")
        assert site.booked() == 1
        for each in site.engines:
            each.let_go.set()
        assert answer.result(60).status_code == 200
    wait_until(lambda: site.booked() == 0, what="the release")
    for each in site.engines:
        each.let_go.clear()


def test_a_client_that_disconnects_ends_its_booking(site: Site) -> None:
    prompt = [secrets.randbelow(100_000) for _ in range(PAGES * BLOCK_SIZE)]
    content = json.dumps({"model": "m", "prompt": prompt}).encode()
    with httpx.stream("POST", f"{site.envoy.url}/v1/completions", content=content, headers={"x-hold": "1"}):
        wait_until(lambda: site.booked() == 1, what="the booking")
    wait_until(lambda: site.booked() == 0, what="the release")
    for each in site.engines:
        each.let_go.set()
        each.let_go = threading.Event()


def test_the_health_service_says_serving(site: Site) -> None:
    health = pytest.importorskip("grpc_health.v1.health_pb2")
    stub = pytest.importorskip("grpc_health.v1.health_pb2_grpc")
    with grpc.insecure_channel(f"127.0.0.1:{site.picker_port}") as channel:
        for service in ("", "envoy.service.ext_proc.v3.ExternalProcessor"):
            answer = stub.HealthStub(channel).Check(health.HealthCheckRequest(service=service), timeout=30)
            assert answer.status == health.HealthCheckResponse.SERVING


def test_no_request_fails_or_waits_while_the_service_hangs(site: Site) -> None:
    body = json.dumps({"model": "m", "prompt": site.prompt(0)}).encode()
    with asking(site.service, _all(site), 100) as (_, envoy):

        def used() -> str:
            answer = httpx.post(f"{envoy.url}/v1/completions", content=body, timeout=60)
            return str(answer.raise_for_status().headers["x-engine"])

        wait_until(lambda: [used() for _ in range(3)] == [site.engines[0].address] * 3, what="the picker to choose")
        os.kill(site.service.pid, signal.SIGSTOP)
        try:
            assert {used() for _ in range(20)} == set(_all(site))
        finally:
            os.kill(site.service.pid, signal.SIGCONT)
        wait_until(lambda: [used() for _ in range(3)] == [site.engines[0].address] * 3, what="the picker to choose")
        wait_until(lambda: site.booked() == 0, what="the release of what was booked too late")


def test_a_request_above_the_limit_of_its_tenant_gets_429(site: Site, tmp_path: Path) -> None:
    (tmp_path / "limits.toml").write_text("[default]\nqueries_per_s = 1\n")
    engine = site.engines[2]
    with ServiceProcess(tmp_path, KVSIGHT_TENANT_LIMITS_FILE=tmp_path / "limits.toml") as service:
        body = {"instance_id": engine.address, "endpoint": engine.events.endpoint, "model_name": "m"}
        assert service.post("/register", body | {"block_size": BLOCK_SIZE}).is_success
        engine.events.wait_for_readers()
        engine.hold([secrets.randbelow(100_000) for _ in range(BLOCK_SIZE)])
        content = json.dumps({"model": "m", "prompt": [1] * BLOCK_SIZE}).encode()
        with asking(service, _all(site)) as (_, envoy):

            def is_limited() -> bool:
                return httpx.post(f"{envoy.url}/v1/completions", content=content, timeout=60).status_code == 429

            wait_until(is_limited, what="a 429")


def test_no_request_fails_when_the_service_is_killed_and_restarted(site: Site) -> None:
    prompt, subset = site.prompt(0), site.addresses(1, 2)
    body = {"model": "m", "prompt": prompt}
    stop, failed, seen, of_subset = threading.Event(), list[object](), list[str](), list[str]()

    def ask(used: list[str], headers: dict[str, str]) -> None:
        while not stop.is_set():
            try:
                used.append(site.send(body, **headers).raise_for_status().headers["x-engine"])
            except httpx.HTTPError as error:
                failed.append(error)

    def more(number: int) -> None:
        target = len(seen) + number, len(of_subset) + number
        wait_until(lambda: (len(seen) > target[0] and len(of_subset) > target[1]) or failed, 60, "answers")

    with ThreadPoolExecutor(2) as pool:
        askers = [pool.submit(ask, seen, {}), pool.submit(ask, of_subset, {"x_subset": subset})]
        more(5)
        site.service.kill()
        more(5)  # one may still have been chosen
        killed_at = len(seen)
        more(20)
        assert {*seen[killed_at:]} == {*_all(site)}
        site.service.start()
        more(5)
        stop.set()
        for each in askers:
            each.result(60)
    assert not failed
    assert {*of_subset} == {*subset.split(",")}
