"""What a service answers while its kernels are compiled."""

import threading
from pathlib import Path

import httpx
import pytest

from api.server import listen, url_of
from api.settings import ApiSettings
from api.starting import compile_and_answer
from kv_events.kernels import load
from kvsight.cli.doctor.servers import _remedy_if_not_ready
from tests.support.waiting import wait_until

ROOMS = Path(__file__).parents[2]


def test_until_kernels_are_compiled_the_service_says_how_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    are_compiled = threading.Event()
    monkeypatch.setattr(load, "compile_missing", are_compiled.wait)
    settings = ApiSettings.ignoring_environment(port=0)
    with listen(settings) as bound, httpx.Client(base_url=url_of(bound, settings)) as client:
        starting = threading.Thread(target=compile_and_answer, args=(settings, bound))
        starting.start()
        assert client.get("/health", timeout=30).json() == {"status": "ok"}
        assert "<title>kvsight" in client.get("/").text
        for method, path in [("GET", "/ready"), ("GET", "/fleet"), ("POST", "/query"), ("DELETE", "/any/thing")]:
            answer = client.request(method, path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["type"] == "urn:kvsight:problem:kernels-loading"
            assert answer.json()["detail"].startswith("compiling kernels: ")
        assert _remedy_if_not_ready(answer.json()["detail"]).startswith("wait")
        are_compiled.set()
        starting.join(30)
        assert not starting.is_alive()
        assert bound.fileno() >= 0  # the service goes on with it


def test_every_kernel_of_the_project_is_compiled_and_counted() -> None:
    declared = [path for path in load._sources() if "\n@kernel\n" in path.read_text()]
    every_file = [path for package in load._PACKAGES for path in (ROOMS / package).rglob("*.py")]
    assert declared == [path for path in declared if path.parent.name == "kernels"]
    assert {*declared} == {path for path in every_file if "\n@kernel\n" in path.read_text()}
    total = len({kernel.py_func.__code__.co_filename for kernel in load._all_kernels()})
    assert total == len(declared)
    wait_until(load.is_complete, 1)
