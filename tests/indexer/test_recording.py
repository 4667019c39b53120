"""Recordings: `kvsight record` and `kvsight serve --record` with a real broker and a disk that really fills up."""

import json
import resource
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from kv_events.codec import StoredPages, decode_batch
from kv_events.log.event_log import EventLogReader
from kv_events.log.format import size_of
from kv_events.records import Channel, LogRecord
from tests.support.commands import kvsight
from tests.support.engines.publishing_process import PublishingProcess
from tests.support.engines.simulated_engine import SimulatedEngine
from tests.support.log.records import records_of
from tests.support.servers.child_process import free_port
from tests.support.servers.service_process import ServiceProcess, own_topics, write_events
from tests.support.waiting import wait_until

GARBAGE = b"garbage"


def of(folder: Path, channel: Channel) -> list[LogRecord]:
    return [record for record in records_of(folder) if record.channel == channel]


def pages(number: int, first: int = 1) -> range:
    return range(first, first + number)


def offsets(folder: Path) -> dict[tuple[int, int], list[int]]:
    """Channel and partition -> the offsets of the recording, in its order."""
    found = defaultdict(list)
    for record in records_of(folder):
        found[record.channel, record.partition].append(record.offset)
    return dict(found)


def recorded_pages(folder: Path) -> set[int]:
    """The pages whose stores are in the recording."""
    batches = [decode_batch(record.payload) for record in of(folder, Channel.EVENTS) if record.payload != GARBAGE]
    steps = [step for batch in batches for step in batch.steps if isinstance(step, StoredPages)]
    return {page for step in steps for page in step.hashes.tolist()}


def assert_without_holes_and_doubles(folder: Path) -> None:
    for key, found in offsets(folder).items():
        assert found == list(range(len(found))), key


@pytest.fixture
def topics(kafka_bootstrap: str) -> dict[str, Any]:
    found = own_topics(kafka_bootstrap)
    found["KVSIGHT_DECISIONS_TOPIC"] = found["KVSIGHT_EVENTS_TOPIC"].replace("events", "decisions")
    return found


def decide(service: ServiceProcess, request: str, worker: str) -> None:
    body = {"request_id": request, "model_name": "m", "seq_hashes": [1, 2], "worker": worker}
    httpx.post(f"{service.url}/decisions", json=body).raise_for_status()


def test_a_service_records_everything_over_restarts_without_holes_and_doubles(
    topics: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "recording"
    with (
        ServiceProcess(tmp_path, **topics, KVSIGHT_RECORD=folder) as service,
        PublishingProcess("w", **topics) as engine,
    ):
        engine.store(*pages(10))
        wait_until(lambda: service.listener("w").get("state") == "live", what="the worker in the index")
        decide(service, "r1", "w")
        assert service._http.post("/workers/w/resync").is_success
        write_events(topics, LogRecord(0, 0, 0, b"key", GARBAGE))
        kinds = {Channel.EVENTS, Channel.CONTROL, Channel.DECISIONS, Channel.DEAD_LETTERS}
        wait_until(lambda: {channel for channel, _ in offsets(folder)} == kinds, what="all kinds of records")
        service.kill()
        engine.store(*pages(10, 100))
        service.start()
        engine.store(*pages(10, 200))
        wait_until(lambda: service.pages("w") == engine.held, what="the pages after the restart")
        wait_until(lambda: recorded_pages(folder) == engine.held, what="the recording to catch up")
        service.terminate()
    found = offsets(folder)
    dead = {key: at for key, at in found.items() if key[0] == Channel.DEAD_LETTERS}
    assert [len(at) for at in dead.values()] == [1]
    for key, at in found.items():
        if key not in dead:
            assert at == list(range(len(at))), key
    replayed = json.loads(kvsight("replay", folder, "--json").stdout)
    assert [(view["worker"], view["GPU"]) for view in replayed] == [("w", 30)]


def test_a_full_disk_holds_up_nothing_and_loses_nothing(topics: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    with (
        ServiceProcess(tmp_path, **topics, KVSIGHT_RECORD=folder) as service,
        PublishingProcess("w", **topics) as engine,
    ):
        engine.store(*pages(10))
        wait_until(lambda: folder.exists() and records_of(folder), what="the first record")
        unlimited = resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (64 * 2**10, resource.RLIM_INFINITY))
        for number in range(1, 4):
            engine.store(*pages(4000, 10_000 * number))
        wait_until(lambda: service.listener("w").get("pages", {}).get("GPU") == 12_010, what="the pages in the index")
        wait_until(lambda: service.get("/health").json().get("recording"), what="the degraded recording")
        health = service.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        assert "recording degraded since" in health.json()["recording"]
        assert "File too large" in health.json()["recording"]
        assert service.get("/ready").is_success
        assert service.query("m", [1, 2, 3]).json()["scores"] == {"w": {"0": 12}}
        assert service.metric("kvsight_recording_degraded_seconds") > 0
        resource.prlimit(service.pid, resource.RLIMIT_FSIZE, unlimited)
        wait_until(lambda: "recording" not in service.get("/health").json(), what="the recording to go on")
        wait_until(lambda: recorded_pages(folder) == engine.held, what="the recording to catch up")
        service.terminate()
        said = service.log.read_text()
    assert (said.count("recording degraded"), said.count("recording goes on again")) == (1, 1)
    assert_without_holes_and_doubles(folder)
    replayed = json.loads(kvsight("replay", folder, "--json").stdout)
    assert [(view["worker"], view["GPU"]) for view in replayed] == [("w", 12_010)]


def lacks_key_frames(folder: Path) -> list[int]:
    """The first records of files, but the first one, that have no key frame."""
    _, *later = sorted(folder.glob("*.kvlog"))
    return [int(path.stem) for path in later if not path.with_suffix(".kvframe").exists()]


def has_applied(service: ServiceProcess, engine: PublishingProcess, after: int) -> bool:
    return service.listener("w").get("seq", -1) > after and service.pages("w") == engine.held


@pytest.mark.timeout(400)
def test_a_recording_beside_a_service_keeps_its_bound_and_opens_at_its_first_record(
    topics: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "recording"
    with (
        ServiceProcess(tmp_path, **topics, KVSIGHT_RECORD=folder, KVSIGHT_RECORD_MAX_BYTES="16MiB") as service,
        PublishingProcess("w", **topics) as engine,
    ):
        engine.store(*pages(100))
        wait_until(lambda: any(folder.glob("*.kvlog")), what="the recording")
        for number in range(1, 1000):
            seq = service.listener("w").get("seq", -1)
            engine.store(*pages(20_000, 100_000 * number))
            engine.remove(*pages(20_000, 100_000 * number))
            wait_until(partial(has_applied, service, engine, seq), 120, "the removal")
            wait_until(lambda: not lacks_key_frames(folder), 120, "the key frames")
            if EventLogReader(folder).first_index:
                break
        wait_until(lambda: service.pages("w") == engine.held, what="the pages in the index")
        first, log = EventLogReader(folder).first_index, service.log.read_text()
        assert first > 0, log
        assert (folder / f"{first:020d}.kvframe").exists(), log
        assert sum(map(size_of, folder.iterdir())) < 17 * 2**20
        service.terminate()
    replayed = json.loads(kvsight("replay", folder, "--json").stdout)
    assert [(view["worker"], view["state"], view["GPU"]) for view in replayed] == [("w", "live", 100)]


def has_decisions(folder: Path, number: int) -> bool:
    return len(of(folder, Channel.DECISIONS)) == number


def test_a_service_that_reads_engines_itself_records_them_with_decisions(tmp_path: Path) -> None:
    folder, port = tmp_path / "recording", free_port()
    for run in (1, 2):
        with (
            ServiceProcess(tmp_path, KVSIGHT_RECORD=folder) as service,
            SimulatedEngine({"zmq_port": port}) as engine,
        ):
            service.wait_until_ready()
            body = {"instance_id": "e", "endpoint": f"tcp://127.0.0.1:{port}", "model_name": "m", "block_size": 16}
            httpx.post(f"{service.url}/register", json=body).raise_for_status()
            wait_until(lambda: service.listener("e")["status"] == "active", what="the engine")
            engine.complete(list(range(33)))
            wait_until(lambda: service.listener("e")["pages"]["GPU"] == 2, what="the pages")
            decide(service, f"r{run}", "e")
            wait_until(partial(has_decisions, folder, run), what="the decision in the recording")
            service.terminate()
    num_begins = sum(record.offset == 0 for record in of(folder, Channel.EVENTS))
    assert num_begins == 2
    assert [record.key for record in of(folder, Channel.DECISIONS)] == [b"r1", b"r2"]


def test_a_range_of_one_worker_is_copied_with_its_control_messages(topics: dict[str, Any], tmp_path: Path) -> None:
    with PublishingProcess("one", **topics) as one, PublishingProcess("two", **topics) as two:
        one.store(1)
        two.store(1)
        assert kvsight("record", tmp_path / "all", "--once", environment=topics).returncode == 0
        wait_until(lambda: recorded_again(topics, tmp_path / "all", {b"one", b"two"}), what="both workers")
        middle = max(record.timestamp_ms for record in records_of(tmp_path / "all"))
        one.store(2)
        one.close()
        two.close()
    assert kvsight("record", tmp_path / "small", "--once", "--segment-bytes", 100, environment=topics).returncode == 0
    assert len(list((tmp_path / "small").glob("*.kvframe"))) >= 2
    assert lacks_key_frames(tmp_path / "small") == []
    flags = ["--from", f"@{middle / 1000 + 0.001}", "--worker", "one"]
    done = kvsight("record", tmp_path / "part", "--once", *flags, environment=topics)
    assert done.returncode == 0, done.stderr
    found = records_of(tmp_path / "part")
    assert found
    assert {record.key.split(b"/")[2] for record in found} == {b"one"}
    assert min(record.timestamp_ms for record in found) > middle
    first = found[0]
    flags = ["--from", f"{first.partition}:{first.offset}", "--to", f"{first.partition}:{first.offset + 1}"]
    assert kvsight("record", tmp_path / "single", *flags, "--model", "m", environment=topics).returncode == 0
    assert [r.payload for r in records_of(tmp_path / "single") if r.partition == first.partition] == [first.payload]


def recorded_again(topics: dict[str, Any], folder: Path, workers: set[bytes]) -> bool:
    assert kvsight("record", folder, "--once", environment=topics).returncode == 0
    return {record.key.split(b"/")[2] for record in records_of(folder)} == workers
