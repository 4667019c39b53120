"""The first hour with one's own engines: named on the command line or in a file, and what is shown of broken ones."""

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from kv_events.remedies import remedy
from tests.support.commands import RunningCommand, kvsight
from tests.support.engines.event_payloads import payload, stored
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import free_port
from tests.support.servers.service_process import ServiceProcess
from tests.support.waiting import wait_until

TOKENS = list(range(1, 17))


def listeners(url: str) -> dict[str, dict[str, Any]]:
    workers = json.loads(kvsight("top", "--ranks", "--once", "--json", "--url", url).stdout)
    return {f"{each['instance_id']}/{rank}": one for each in workers for rank, one in each["listeners"].items()}


def gpu_tokens(url: str, worker: str, model: str = "m") -> int:
    asked = kvsight("query", "--json", "--model", model, "--tokens", ",".join(map(str, TOKENS)), "--url", url)
    return int(json.loads(asked.stdout or "{}").get("instances", {}).get(worker, {}).get("gpu", 0))


class Serving(RunningCommand):
    """`kvsight serve` with engines on its command line."""

    def __init__(self, *words: object) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        super().__init__("serve", "--port", port, *words)

    def __enter__(self) -> Self:
        self.wait_for("listens on")
        return self

    def __exit__(self, *error: object) -> None:
        self.end(signal.SIGTERM)
        super().__exit__(*error)


def test_engines_of_the_command_line_are_read_with_all_ranks_and_without_a_block_size() -> None:
    with ZmqEngine() as first, ZmqEngine(port=first._port + 1, replay=False) as second:
        flag = f"engine-0={first.endpoint},replay={str(first.replay_endpoint).rpartition(':')[2]},ranks=1"
        with Serving("--model", "m", "--engine", flag, "--engine", f"b={second.endpoint},model=n") as serving:
            serving.wait_for("reads 2 engines: engine-0, b")
            for engine, worker, model in ((first, "engine-0", "m"), (second, "b", "n")):
                engine.wait_for_readers()
                engine.send(payload(stored([1, 2, 3, 4], TOKENS)))
                wait_until(lambda w=worker, m=model: gpu_tokens(serving.url, w, m) == 16, 60, "the pages")  # type: ignore[misc]


def test_the_file_of_the_bridge_is_that_of_the_service(tmp_path: Path) -> None:
    config = tmp_path / "engines.toml"
    with ZmqEngine() as engine, ZmqEngine(connect_to="tcp://127.0.0.1:25999", topic="kv@pod@m", replay=False) as pod:
        config.write_text(
            f'[[engines]]\nendpoint = "{engine.endpoint}"\nworker = "a"\nmodel = "m"\ncache_salt = "s"\n'
            'capacity = {gpu = 100, cpu = 400}\n[[engines]]\nendpoint = "tcp://*:25999"\ntopic = "kv@"\n'
        )
        with Serving("--config", config, "--register-allow", "") as serving:
            engine.wait_for_readers()
            pod.wait_for_readers()
            engine.send(payload(stored([1, 2, 3, 4], TOKENS)))
            pod.send(payload(stored([1, 2, 3, 4], TOKENS)))
            wait_until(lambda: gpu_tokens(serving.url, "pod") == 16, 60, "the pages of a pod that names itself")
            assert gpu_tokens(serving.url, "a") == 0  # a salt belongs to its pages
            assert listeners(serving.url).keys() == {"a/0", "pod/0"}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path) as running:
        running.wait_until_ready()
        yield running


def test_engines_are_registered_and_forgotten_by_commands(service: ServiceProcess) -> None:
    with ZmqEngine() as engine:
        done = kvsight("register", "--url", service.url, "--model", "m", f"a={engine.endpoint},ranks=2")
        assert done.stdout.splitlines()[0] == f"a rank 0 of model m is read from {engine.endpoint}"
        engine.wait_for_readers()
        engine.send(payload(stored([1, 2, 3, 4], TOKENS)))
        wait_until(lambda: gpu_tokens(service.url, "a") == 16, 60, "the pages")
        assert listeners(service.url).keys() == {"a/0", "a/1"}
        assert "known: a" in kvsight("unregister", "b", "--url", service.url).stderr
        assert kvsight("unregister", "a", "--url", service.url).stdout == "a of model m is forgotten\n"
        shown = kvsight("top", "--once", "--url", service.url).stdout
        assert "No worker is known: let the service read an engine: `kvsight register" in " ".join(shown.split())


def test_every_broken_engine_is_shown_with_its_cause_and_what_to_do(service: ServiceProcess) -> None:
    with ZmqEngine(replay=False) as lossy, socket.create_server(("127.0.0.1", 0)) as other:
        refused = f"tcp://127.0.0.1:{free_port()}"
        addresses = {
            "lossy": lossy.endpoint,
            "off": refused,
            "web": f"tcp://127.0.0.1:{other.getsockname()[1]}",
        }
        engines = [f"{name}={address},model=m,block_size=4" for name, address in addresses.items()]
        kvsight("register", "--url", service.url, *engines)
        lossy.wait_for_readers()
        for seq in range(20):
            lossy.send(payload(stored([seq + 1], TOKENS[:4])), "lost" if 13 <= seq <= 17 else "sent")
        causes = {
            "lossy": "missed batches 13 to 17",
            "off": f"cannot connect to {refused}: connection refused",
            "web": f"{addresses['web']} accepts connections, but has not answered as a ZMQ publisher",
        }

        def found() -> dict[str, str]:
            return {name.partition("/")[0]: each["cause"] for name, each in listeners(service.url).items()}

        wait_until(lambda: found() == causes, 60, "the causes")
        shown = listeners(service.url)
        assert all(each["remedy"] == remedy(each["cause"]) != "" and each["cause_since"] for each in shown.values())
        doctor = kvsight("doctor", "--wait", "0.1", "--url", service.url)
        assert doctor.returncode == 1
        for command in (doctor, *(kvsight("top", *r, "--once", "--url", service.url) for r in ([], ["--ranks"]))):
            text = " ".join(command.stdout.split())
            for name, cause in causes.items():
                assert cause in text
                assert remedy(cause) in text, (command.args, name)
            assert lossy.endpoint in text


def test_the_demo_takes_a_free_port_if_the_usual_one_is_taken() -> None:
    with socket.socket() as usual:
        usual.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # another program of this machine may have the port
            usual.bind(("127.0.0.1", 8000))
            usual.listen()
        demo = kvsight("demo", "--exit", "--requests", "301")
        assert demo.returncode == 0
        assert "port 8000: the port is in use: the demo takes port" in demo.stderr
        port = usual.getsockname()[1] or 8000
        assert kvsight("demo", "--exit", "--port", str(port)).returncode == 2
