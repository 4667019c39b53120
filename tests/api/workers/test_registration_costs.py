"""What registered engines cost a service: memory, also after they have left."""

import re
from pathlib import Path

import pytest

from tests.support.servers.service_process import ServiceProcess

pytestmark = pytest.mark.timing("registrations must not hold the event loop")

NUM_ENGINES = 60
MOST_KIB = 500
"""For each engine. It is 100 to 150 on a quiet machine."""


def test_engines_that_come_and_go_leave_no_memory_behind(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service:
        service.wait_until_ready()
        _register_and_unregister(service, 1)  # what the first registration of a process needs
        before = _memory_kib(service)
        for _ in range(3):
            _register_and_unregister(service, NUM_ENGINES)
        assert _memory_kib(service) - before < NUM_ENGINES * MOST_KIB


def _register_and_unregister(service: ServiceProcess, num_engines: int) -> None:
    workers = [{"instance_id": number, "model_name": "m"} for number in range(num_engines)]
    for worker in workers:
        body = {**worker, "endpoint": "tcp://127.0.0.1:1", "block_size": 16}
        assert service.post("/register", body).status_code == 201
    for worker in workers:
        assert service.post("/unregister", worker).status_code == 200


def _memory_kib(service: ServiceProcess) -> int:
    found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{service.pid}/status").read_text())
    assert found is not None
    return int(found[1])
