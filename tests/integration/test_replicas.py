"""`kvsight serve --processes N`: real processes behind one port, with a real broker."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.errors import PortInUseError
from api.server import reserve
from api.settings import ApiSettings
from tests.support.commands import kvsight
from tests.support.engines.publishing_process import MODEL, PublishingProcess
from tests.support.processes import children_of
from tests.support.servers.kafka_broker import KafkaBroker
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

COUNT = 3
HASHES = list(range(1, 20))
HEADER = "x-kvsight-process"


class Replicas(ServiceProcess):
    """A service with several processes."""

    def __init__(self, folder: Path, count: int = COUNT, **variables: object) -> None:
        super().__init__(folder, KVSIGHT_PROCESSES=count, **variables)
        self.count = count

    def from_each(self, path: str, method: str = "GET", **request: Any) -> dict[int, httpx.Response]:
        """Return the answer of each process. Each request uses a connection of its own."""
        found: dict[int, httpx.Response] = {}

        def have_answered() -> bool:
            with suppress(httpx.TransportError):  # of a process that is killed just then
                answer = httpx.request(method, self.url + path, timeout=30, **request)
                found[int(answer.headers[HEADER])] = answer
            return len(found) == self.count

        wait_until(have_answered, 60, f"an answer of each process, not only of {found}\n{self.log.read_text()}")
        return found

    def wait_until_all_are_ready(self) -> None:
        def are_ready() -> bool:
            return all(answer.status_code == 200 for answer in self.from_each("/ready").values())

        wait_until(are_ready, 60, "each process to be ready")

    def pids(self) -> list[int]:
        """Return the process ids, those that started first first."""
        return sorted(children_of(self.pid))

    def __exit__(self, *error: Any) -> None:
        if self._running:  # the end of all processes removes their folder
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            with suppress(AssertionError):
                wait_until(lambda: not self._running, 20, "the end")
        super().__exit__(*error)

    def agrees(self, path: str, expected: Callable[[httpx.Response], bool]) -> None:
        """Return once the answer of each process is as expected."""
        wait_until(lambda: all(map(expected, self.from_each(path).values())), 60, f"{path} of each process")


@pytest.fixture(scope="module")
def topics(kafka_bootstrap: str) -> dict[str, Any]:
    topics = own_topics(kafka_bootstrap)
    return {**topics, "KVSIGHT_DECISIONS_TOPIC": topics["KVSIGHT_EVENTS_TOPIC"].replace("events", "decisions")}


@pytest.fixture(scope="module")
def engine(topics: dict[str, Any]) -> Iterator[PublishingProcess]:
    with PublishingProcess("w0", **topics) as engine:
        engine.store(*HASHES)
        yield engine


@pytest.fixture(scope="module")
def service(
    topics: dict[str, Any], engine: PublishingProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replicas]:
    assert engine.held
    with Replicas(tmp_path_factory.mktemp("service"), **topics) as service:
        service.wait_until_all_are_ready()
        yield service


def holds_all(answer: httpx.Response) -> bool:
    return answer.is_success and answer.json()["instances"].get("w0", {}).get("gpu") == 4 * len(HASHES)


def value(metrics: str, series: str) -> float:
    """Return the value of a series."""
    found = [line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith(f"{series} ")]
    assert len(found) == 1, (series, metrics)
    return float(found[0])


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_each_process_answers_the_same(service: Replicas) -> None:
    question = {"model_name": MODEL, "seq_hashes": HASHES}

    def answers() -> dict[int, httpx.Response]:
        return service.from_each("/query_by_hash", method="POST", json=question)

    wait_until(lambda: all(map(holds_all, answers().values())), 60, "each process to know all pages")
    views = service.from_each("/workers/w0/view")
    assert {len(answer.json()["pages"]) for answer in views.values()} == {len(HASHES)}


def test_counts_add_up_over_all_processes_whichever_answers(service: Replicas) -> None:
    def queries() -> list[float]:
        answers = service.from_each("/metrics").values()
        return [value(answer.text, 'kvsight_queries_total{route="/query_by_hash"}') for answer in answers]

    def ask(count: int) -> None:
        for _ in range(count):
            httpx.post(service.url + "/query_by_hash", json={"model_name": MODEL, "seq_hashes": HASHES}, timeout=30)

    (before,) = set(queries())
    ask(12)
    assert queries() == [before + 12] * COUNT
    text = service.get("/metrics").text
    assert value(text, f'kvsight_pages{{block_size="4",medium="GPU",model="{MODEL}",tenant="default"}}') == len(HASHES)
    assert value(text, "kvsight_pages_stored_total") == len(HASHES)
    for number in range(COUNT):
        assert value(text, f'kvsight_ready{{process="{number}"}}') == 1.0
        assert value(text, f'kvsight_process_up{{process="{number}"}}') == 1.0

    killed = service.pids()[0]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: len({*service.pids()} - {killed}) == COUNT, 60, "its replacement")
    assert queries() == [before + 12] * COUNT  # what an ended process has counted stays


def test_events_are_complete_whichever_process_sends_them(service: Replicas, engine: PublishingProcess) -> None:
    with ExitStack() as streams:
        lines: dict[int, Iterator[str]] = {}

        def are_all_connected() -> bool:
            client = streams.enter_context(httpx.Client(timeout=60))
            answer = streams.enter_context(client.stream("GET", service.url + "/events", params={"kind": "batch"}))
            lines.setdefault(int(answer.headers[HEADER]), answer.iter_lines())
            return len(lines) == COUNT

        wait_until(are_all_connected, 60, "a stream from each process")
        for each in lines.values():
            assert next(each) == ": kvsight"
        new = [1000, 1001, 1002]
        for page in new:
            engine.store(page)
        for each in lines.values():
            stored, seqs = 0, []
            while stored < len(new):
                line = next(each)
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    stored += event["stored"].get("GPU", 0)
                    seqs.append(event["seq"])
            assert stored == len(new)
            assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
        engine.remove(*new)


def test_decisions_reported_to_any_process_are_shown_by_all(service: Replicas) -> None:
    def report(**fields: Any) -> httpx.Response:
        return httpx.post(service.url + "/decisions", json=fields, timeout=30)

    reported = 8
    for number in range(reported):
        request_id = f"request-{number}"
        decision = {"model_name": MODEL, "seq_hashes": HASHES, "worker": "w0", "predicted_tokens": 4}
        assert report(request_id=request_id, **decision).status_code == 202
        assert report(request_id=request_id, cached_tokens=8).status_code == 202

    def shows_all(answer: httpx.Response) -> bool:
        funnel = answer.json()
        found = funnel["finished"]["cached_tokens"], funnel["all"]["requests"]
        return found == (8 * reported, reported)

    service.agrees("/funnel", shows_all)
    fleets = {answer.content for answer in service.from_each("/fleet").values()}
    assert {json.loads(fleet)["workers"][0]["worker"] for fleet in fleets} == {"w0"}


def test_a_resync_asked_of_any_process_reaches_the_engine(service: Replicas, engine: PublishingProcess) -> None:
    def resyncs() -> set[int]:
        return {
            answer.json()[0]["listeners"]["0"]["counters"]["resyncs"]
            for answer in service.from_each("/workers").values()
        }

    before = max(resyncs())
    answers = service.from_each("/workers/w0/resync", method="POST")
    assert {answer.status_code for answer in answers.values()} == {202}
    wait_until(lambda: min(resyncs()) > before, 60, "a resync in each view")
    service.agrees("/workers/w0/view", lambda answer: len(answer.json()["pages"]) == len(engine.held))


def test_engines_are_registered_with_no_process(service: Replicas) -> None:
    body = {"instance_id": 1, "model_name": MODEL, "endpoint": "tcp://127.0.0.1:1", "block_size": 4}
    answers = service.from_each("/register", method="POST", json=body)
    assert {(answer.status_code, answer.json()["type"]) for answer in answers.values()} == {
        (404, "urn:kvsight:problem:not-embedded")
    }


def test_a_killed_process_is_replaced_and_the_port_never_refuses(service: Replicas) -> None:
    killed = service.pids()[1]
    os.kill(killed, signal.SIGKILL)

    def is_replaced() -> bool:
        # a connection that waits in the queue of the killed process is reset; each one after that succeeds
        with suppress(httpx.ReadError, httpx.RemoteProtocolError):
            assert httpx.get(service.url + "/health", timeout=30).status_code == 200
        return len({*service.pids()} - {killed}) == COUNT

    wait_until(is_replaced, 60, "the replacement")
    service.agrees("/ready", lambda answer: answer.status_code == 200)
    service.agrees("/workers/w0/view", lambda answer: answer.is_success and len(answer.json()["pages"]) == len(HASHES))
    assert f"(pid {killed}) ended by signal 9" in service.log.read_text()


def test_one_process_writes_the_snapshots_and_all_load_them(
    topics: dict[str, Any], engine: PublishingProcess, tmp_path: Path
) -> None:
    snapshots = {**topics, "KVSIGHT_SNAPSHOT_DIR": tmp_path / "snapshots", "KVSIGHT_SNAPSHOT_INTERVAL_S": 0.2}
    with Replicas(tmp_path, 2, **snapshots) as service:
        service.wait_until_all_are_ready()
        wait_until(lambda: "kvsight_snapshots_written_total 0.0" not in service.get("/metrics").text, 60, "a snapshot")
        service.terminate()
        assert "[0] indexer.worker_log" in service.log.read_text()
        assert "[1] indexer.worker_log" not in service.log.read_text()
        service.start()
        service.wait_until_all_are_ready()
        wait_until(lambda: len(service.pages("w0")) == len(engine.held), 60, "the pages")
        log = service.log.read_text()
        assert "[0] indexer.consumer: snapshot of 1 views loaded" in log
        assert "[1] indexer.consumer: snapshot of 1 views loaded" in log


def test_one_signal_ends_all_processes(topics: dict[str, Any], tmp_path: Path) -> None:
    with Replicas(tmp_path, 2, **topics) as service:
        service.wait_until_all_are_ready()
        pids = service.pids()
        os.kill(service.pid, signal.SIGTERM)
        wait_until(lambda: all(map(is_gone, pids)), 60, "the end")
        log = service.log.read_text()
    assert "starts again" not in log, log
    assert "Traceback" not in log, log


def test_a_second_signal_ends_processes_that_hang(topics: dict[str, Any], tmp_path: Path) -> None:
    with Replicas(tmp_path, 2, **topics) as service:
        service.wait_until_all_are_ready()
        pids = service.pids()
        os.kill(pids[0], signal.SIGSTOP)
        os.kill(service.pid, signal.SIGTERM)
        wait_until(lambda: is_gone(pids[1]), 60, "the end of the one that runs")
        assert not is_gone(pids[0])
        os.kill(service.pid, signal.SIGTERM)
        wait_until(lambda: is_gone(pids[0]), 60, "the end of the one that hangs")


@pytest.mark.soak
def test_a_process_that_hangs_is_replaced(topics: dict[str, Any], tmp_path: Path) -> None:
    with Replicas(tmp_path, 2, **topics) as service:
        service.wait_until_all_are_ready()
        hung = service.pids()[1]
        os.kill(hung, signal.SIGSTOP)
        wait_until(lambda: len({*service.pids()} - {hung}) == 2, 90, "the replacement")
        assert "process 1 hangs for" in service.log.read_text()
        service.wait_until_all_are_ready()


def test_a_signal_at_any_moment_of_the_start_ends_the_service(topics: dict[str, Any], tmp_path: Path) -> None:
    for moment in ("kvsight listens on", "[1]"):
        service = Replicas(tmp_path / moment[1:2], 2, **topics)
        service.log.parent.mkdir()
        with service:
            wait_until(lambda service=service, moment=moment: moment in service.log.read_text(), 60, moment)  # type: ignore[misc]
            pids = service.pids()
            service.terminate()
            assert all(map(is_gone, pids)), service.log.read_text()
            assert "Traceback" not in service.log.read_text()


@pytest.mark.soak
def test_a_replacement_stays_away_while_it_knows_less_than_the_others(
    kafka_broker: KafkaBroker, tmp_path: Path
) -> None:
    topics = own_topics(kafka_broker.bootstrap)
    question = {"model_name": MODEL, "seq_hashes": HASHES}
    with PublishingProcess("w0", **topics) as engine, Replicas(tmp_path, 2, **topics) as service:
        engine.store(*HASHES)
        service.wait_until_all_are_ready()

        def answers() -> dict[int, httpx.Response]:
            return service.from_each("/query_by_hash", method="POST", json=question)

        wait_until(lambda: all(map(holds_all, answers().values())), 60, "each process to know all pages")
        kafka_broker.kill()
        killed = service.pids()[1]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: len({*service.pids()} - {killed}) == 2, 60, "the replacement")
        for _ in range(20):
            assert httpx.post(service.url + "/query_by_hash", json=question, timeout=30).is_success
        kafka_broker.restart()
        wait_until(lambda: all(map(holds_all, answers().values())), 60, "the replacement to answer")


def test_processes_do_not_outlive_a_killed_parent(topics: dict[str, Any], tmp_path: Path) -> None:
    with Replicas(tmp_path, 2, **topics) as service:
        service.wait_until_all_are_ready()
        pids = service.pids()
        os.kill(service.pid, signal.SIGKILL)
        wait_until(lambda: all(map(is_gone, pids)), 60, "the end")


def test_a_tokens_limit_holds_over_all_processes(topics: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text('[router]\ntoken = "b1946ac92492d2347c6235b4d2611184"\nscopes = ["read"]\nrequests_per_s = 0.01\n')
    headers = {"Authorization": "Bearer b1946ac92492d2347c6235b4d2611184"}
    with Replicas(tmp_path, 2, **topics, KVSIGHT_API_TOKENS_FILE=file) as service:
        service.wait_until_all_are_ready()
        assert httpx.get(service.url + "/workers", headers=headers, timeout=30).status_code == 200
        answers = service.from_each("/workers", headers=headers)
        assert {answer.status_code for answer in answers.values()} == {429}


def test_two_services_that_start_at_once_do_not_share_a_port() -> None:
    with reserve(ApiSettings(port=0)) as first:
        settings = ApiSettings(port=first.getsockname()[1])
        with pytest.raises(PortInUseError), reserve(settings):
            pass
    with reserve(settings):
        pass


def test_a_port_in_use_is_not_shared_with_another_service(service: Replicas, topics: dict[str, Any]) -> None:
    port = service.url.rpartition(":")[2]
    refused = kvsight("serve", "--processes", 2, "--port", port, environment=topics)
    assert (refused.returncode, "in use" in refused.stderr) == (2, True), refused.stderr


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--processes", "0"], "--processes: got 0, expected an integer in 1 .. 256"),
        (["--processes", "10000"], "--processes: got 10000, expected an integer in 1 .. 256"),
        (["--processes", "2"], "--processes: got 2, expected 1 without Kafka"),
        (["--processes", "2", "--event-log-dir", "/tmp"], "--processes: got 2, expected 1 without Kafka"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], part: str) -> None:
    refused = kvsight("serve", *words)
    assert refused.returncode == 2, refused.stderr
    assert part in refused.stderr
