"""The endpoint picker, asked by a real Envoy, with a real service that reads the events of three engines."""

import json
import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
        addresses, picker_port = [each.address for each in engines], free_port()
        envoy = Envoy(folder, addresses, picker_port)
        service = stack.enter_context(ServiceProcess(folder))
        for number, each in enumerate(engines[:2]):
            record = {"worker_id": f"engine-{number}", "model_name": "m", "endpoint": f"http://{each.address}"}
            events = {"kv_events_endpoints": {"0": each.events.endpoint}, "block_size": BLOCK_SIZE}
            assert service.post("/workers", record | events).is_success
        last = {"instance_id": addresses[2], "endpoint": engines[2].events.endpoint, "model_name": "m"}
        assert service.post("/register", last | {"block_size": BLOCK_SIZE}).is_success
        for each in engines:
            each.events.wait_for_readers()
        flags = ("--url", service.url, "--port", picker_port, "--deadline-ms", 5000)  # the machine may be slow
        picker = stack.enter_context(RunningCommand("endpoint-picker", *flags))
        picker.wait_for("picks endpoints")
        stack.enter_context(envoy)
        http = stack.enter_context(httpx.Client(base_url=envoy.url, verify=WITHOUT_TLS, timeout=60))
        whole = Site(engines, service, picker_port, envoy, http)
        for number in range(3):
            tokens = whole.prompt(number)
            wait_until(lambda: _goes_to(whole, tokens, number), what="the picker to know the engine")  # noqa: B023
        wait_until(lambda: whole.booked() == 0, what="no bookings")
        yield whole


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
    answer = site.send({"model": "m", "prompt": prompt}, x_subset=site.addresses(1, 0))
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
        flags = ("--url", site.service.url, "--port", (port := free_port()), "--deadline-ms", 5000)
        body = {"instance_id": gone, "endpoint": events.endpoint, "model_name": "m", "block_size": BLOCK_SIZE}
        assert site.service.post("/register", body).is_success
        events.wait_for_readers()
        tokens = [secrets.randbelow(100_000) for _ in range(PAGES * BLOCK_SIZE)]
        EchoingEngine(events).hold(tokens)
        wait_until(lambda: site.service.post("/query", {"model_name": "m", "token_ids": tokens}).json().get("scores"))
        folder = site.service.log.parent
        with RunningCommand("endpoint-picker", *flags) as picker, Envoy(folder, [gone, *_all(site)], port) as envoy:
            picker.wait_for("picks endpoints")

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
        for each in site.engines:
            each.let_go.clear()
        assert site.service.post("/unregister", {"instance_id": gone, "model_name": "m"}).is_success
    wait_until(lambda: site.booked() == 0, what="the release")


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


def test_no_request_fails_when_the_service_is_killed_stopped_and_restarted(site: Site) -> None:
    prompt, subset = site.prompt(0), site.addresses(1, 2)
    stop, seen, failed = threading.Event(), list[str](), list[object]()

    def ask(headers: dict[str, str]) -> None:
        while not stop.is_set():
            try:
                answer = site.send({"model": "m", "prompt": prompt}, **headers)
                seen.append(answer.headers["x-engine"]) if answer.is_success else failed.append(answer)
            except httpx.HTTPError as error:
                failed.append(error)

    def more(number: int) -> None:
        target = len(seen) + number
        wait_until(lambda: len(seen) >= target or failed, 60, "answers")

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask, each) for each in ({}, {"x_subset": subset})]
        more(10)
        site.service.kill()
        more(60)
        used = {len(each.received) > 0 for each in site.engines}
        site.service.start()
        more(20)
        stop.set()
        for each in asking:
            each.result(60)
    assert not failed
    assert used == {True}
