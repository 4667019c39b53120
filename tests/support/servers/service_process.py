"""A real `kvsight serve` process that a test may stop, kill and restart."""

import asyncio
import os
import re
import signal
import ssl
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx

from kv_events.records import LogRecord
from kv_events.runtime.variables import FLAGS, variable
from tests.support.engines.publishing_process import PublishingProcess
from tests.support.http_checks import WITHOUT_TLS
from tests.support.prepared_python import PreparedProcess
from tests.support.servers.child_process import free_port
from tests.support.servers.kafka_broker import produce
from tests.support.waiting import wait_until


def own_topics(kafka: str, **variables: object) -> dict[str, Any]:
    """Return `KVSIGHT_*` settings that name a broker and topics of one test alone, and further ones."""
    name = uuid.uuid4().hex
    if "KVSIGHT_TOPIC_PARTITIONS" in variables:  # the services of other tests expect the usual number
        variables = {"KVSIGHT_DECISIONS_TOPIC": f"decisions-{name}", **variables}
    return {
        "KVSIGHT_KAFKA": kafka,
        "KVSIGHT_EVENTS_TOPIC": f"events-{name}",
        "KVSIGHT_CONTROL_TOPIC": f"control-{name}",
        **variables,
    }


def write_events(topics: Mapping[str, object], *records: LogRecord) -> None:
    """Write records to the topic of events, as a stranger may, and wait until the broker has them."""
    asyncio.run(produce(str(topics["KVSIGHT_KAFKA"]), str(topics["KVSIGHT_EVENTS_TOPIC"]), records))


def as_flags(variables: Mapping[str, object]) -> tuple[list[str], dict[str, str]]:
    """Split settings, named as variables, into flags of `kvsight serve` and what stays in the environment."""
    flags = []
    for name in [name for name in variables if name.lower().removeprefix("kvsight_") in FLAGS]:
        flag, value = variable(name.lower().removeprefix("kvsight_")), str(variables[name])
        flags += {"true": [flag], "false": [f"--no-{flag[2:]}"]}.get(value, [flag, value])
    return flags, {n: str(v) for n, v in variables.items() if n.lower().removeprefix("kvsight_") not in FLAGS}


class ServiceProcess:
    """`with ServiceProcess(folder, KVSIGHT_KAFKA=...) as service:`. It keeps its port over restarts."""

    module = "kvsight"

    def __init__(self, folder: Path, **variables: object) -> None:
        """folder: for its log lines. variables: settings, environment. With `SSL_CERT_FILE`, it is asked over HTTPS."""
        port, ca = free_port(), variables.get("SSL_CERT_FILE")
        self.url = f"{'http' if ca is None else 'https'}://127.0.0.1:{port}"
        self.log = folder / f"service-{port}.log"
        self._port = port
        self._flags, self._variables = as_flags(variables)
        self._process: PreparedProcess | None = None
        self._http = httpx.Client(
            base_url=self.url,
            verify=WITHOUT_TLS if ca is None else ssl.create_default_context(cafile=str(ca)),
            timeout=60,
        )

    def start(self) -> None:
        """Start, and return once the service listens. It may not be ready yet."""
        self.launch()
        self.wait_until_it_listens()

    def launch(self) -> None:
        """Start, without waiting."""
        arguments = ["serve", "--port", self._port, *self._flags]
        with self.log.open("ab") as output, Path(os.devnull).open() as nothing:
            streams = nothing.fileno(), output.fileno(), output.fileno()
            self._process = PreparedProcess(self.module, arguments, os.environ | self._variables, streams)

    def wait_until_it_listens(self) -> None:
        """Return once the service listens."""
        wait_until(self._answers, deadline_s=120, what="kvsight serve to listen")

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL. Idempotent."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Kill it, and close the connections to it."""
        self.kill()
        self._http.close()

    def terminate(self) -> None:
        """Send SIGTERM and wait for the end."""
        assert self._process is not None
        self._process.send(signal.SIGTERM)
        wait_until(lambda: not self._running, deadline_s=60, what="the service to end")

    def wait_until_ready(self) -> None:
        """Return once `GET /ready` succeeds."""
        wait_until(lambda: self.get("/ready").status_code == 200, deadline_s=300, what="the service to be ready")

    def get(self, path: str, **parameters: Any) -> httpx.Response:
        """Send a GET request."""
        return self._http.get(path, params=parameters)

    def post(self, path: str, body: Mapping[str, object] | None = None) -> httpx.Response:
        """Send a POST request, with JSON or without a body."""
        return self._http.post(path, json=body)

    def query(self, model: str, hashes: list[int]) -> httpx.Response:
        """Ask who holds a prompt, by sequence hashes."""
        return self._http.post("/query_by_hash", json={"model_name": model, "seq_hashes": hashes})

    def listener(self, worker: str) -> dict[str, Any]:
        """Return the stream of a worker's rank 0 from `GET /workers`, or {} if it is unknown."""
        workers = [each for each in self.get("/workers").json() if each["instance_id"] == worker]
        return workers[0]["listeners"]["0"] if workers else {}

    def pages(self, worker: str) -> set[int]:
        """Return the sequence hashes of the pages in a worker's view."""
        answer = self.get(f"/workers/{worker}/view")
        return {page["sequence_hash"] for page in answer.json()["pages"]} if answer.is_success else set()

    def metric(self, name: str) -> float:
        """Return the sum of the samples of a metric, whose name may include labels; 0 if there are none."""
        lines = (line.rsplit(" ", 1) for line in self.get("/metrics").text.splitlines())
        return sum(float(value) for sample, value in lines if re.fullmatch(rf"{name}(\{{.*\}})?", sample))

    def wait_for_snapshot(self) -> None:
        """Return when the service has written the next snapshot."""
        before = self.metric("kvsight_snapshots_written_total")
        wait_until(lambda: self.metric("kvsight_snapshots_written_total") > before, 60, "the next snapshot")

    def is_right(self, engine: PublishingProcess) -> bool:
        """Return whether the view of an engine is live and equals what the engine holds."""
        listener, num_held = self.listener(engine.worker), len(engine.held)
        shown = listener.get("state"), listener.get("epoch"), listener.get("pages", {}).get("GPU")
        return shown == ("live", engine.epoch, num_held) and self.pages(engine.worker) <= engine.held

    @property
    def _running(self) -> bool:
        return self._process is not None and self._process.running

    def _answers(self) -> bool:
        assert self._running, self.log.read_text()
        try:
            return self.get("/health").is_success
        except httpx.TransportError:
            return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HastyService(ServiceProcess):
    """A service that gives up silent connections and bodies that stop sooner than usual."""

    module = "tests.support.servers.hasty_service"
