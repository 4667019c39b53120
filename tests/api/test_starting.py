"""What a service answers until its kernels are compiled."""

import asyncio
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from api.server import listen, load_and_answer, running_server, url_of
from api.settings import ApiSettings
from kv_events.kernels import load
from kvsight.cli.doctor.servers import _remedy_if_not_ready

ROOT = Path(__file__).parents[2]
_STARTING = """
import time
from api.server import listen, load_and_answer
from api.settings import ApiSettings
from kv_events.kernels import load
load.load = lambda: print("compiling", flush=True) or time.sleep(100)
settings = ApiSettings.ignoring_environment(port=0)
load_and_answer(settings, listen(settings))
"""


def ask(url: str, are_compiled: threading.Event) -> None:
    try:
        with httpx.Client(base_url=url, timeout=30) as client:
            assert client.get("/health").json() == {"status": "ok"}
            assert "<title>kvsight" in client.get("/").text
            for method, path in [("GET", "/ready"), ("GET", "/fleet"), ("POST", "/query"), ("DELETE", "/any/thing")]:
                answer = client.request(method, path)
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                assert answer.json()["type"] == "urn:kvsight:problem:kernels-loading"
                assert answer.json()["detail"].startswith("compiling kernels: ")
            assert _remedy_if_not_ready(answer.json()["detail"]).startswith("wait")
    finally:
        are_compiled.set()


def test_until_kernels_are_compiled_the_socket_answers_how_many_are_and_then_what_comes_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    are_compiled = threading.Event()
    monkeypatch.setattr(load, "load", are_compiled.wait)
    settings = ApiSettings.ignoring_environment(port=0)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    service = Starlette(routes=[Route("/ready", lambda _: Response("ready"))])

    async def serve() -> str:
        async with running_server(service, settings, bound) as url, httpx.AsyncClient(base_url=url) as client:
            return (await client.get("/ready")).text

    with listen(settings) as bound, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, url_of(bound, settings), are_compiled)
        load_and_answer(settings, bound)
        asked.result(30)
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
        assert asyncio.run(serve()) == "ready"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_service_that_is_starting(number: signal.Signals) -> None:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", _STARTING], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (128 + number, "")


def test_every_kernel_of_the_project_is_compiled_and_counted() -> None:
    every_file = [path for package in load._PACKAGES for path in (ROOT / package).rglob("*.py")]
    declaring = {path for path in every_file if "\n@kernel\n" in path.read_text()}
    assert declaring == {Path(kernel.py_func.__code__.co_filename) for kernel in load._all_kernels()}
    assert load.is_complete()
