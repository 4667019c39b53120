"""A real topic is explained as a recording of it is: by `kvsight explain --kafka`, and by a service that records it."""

import asyncio
import json
from functools import partial
from pathlib import Path

import msgspec
import pytest

from kv_events.http.explanations import Explanation
from kv_events.records import Channel, LogRecord
from kvsight.client import Client
from kvsight.prompts import Prompt
from tests.support.commands import invoke
from tests.support.log.late_log import write_log
from tests.support.log.planted_causes import check_truth, planted
from tests.support.log.planted_scene import MODEL, VICTIM
from tests.support.log.records import records_of
from tests.support.servers.kafka_broker import produce, recorded_topic
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

explained = partial(invoke, "explain")


@pytest.mark.parametrize("cause", ["evicted", "not_known_yet"])
def test_a_topic_is_explained_as_its_recording_is(cause: str, kafka_bootstrap: str, tmp_path: Path) -> None:
    scene, truth = planted(cause, 400)
    settings = recorded_topic(kafka_bootstrap, scene.records)
    write_log(tmp_path / "run.log", scene.records)
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(scene.body))
    query = ["--prompt", prompt, "--json", *(["--at", f"@{scene.until.time_s}"] if scene.until else [])]
    of_topic = explained("--kafka", kafka_bootstrap, "--events-topic", settings.events_topic, *query)
    assert of_topic.exit_code == 0, of_topic.stderr
    workers = {each.instance_id: each for each in msgspec.json.decode(of_topic.stdout, type=Explanation).workers}
    of_log = msgspec.json.decode(explained(tmp_path / "run.log", *query).stdout, type=Explanation)
    causes = {each.instance_id: [finding.cause for finding in each.findings] for each in of_log.workers}
    assert {worker: [finding.cause for finding in each.findings] for worker, each in workers.items()} == causes
    assert (workers[VICTIM].cause, workers[VICTIM].findings[0].page) == (truth.cause, truth.page)
    evidence = workers[VICTIM].findings[0].evidence
    assert evidence[-1].batch.index is None
    assert f"offset {evidence[-1].batch.partition}:{evidence[-1].batch.offset}" in workers[VICTIM].findings[0].text


def recorded(folder: Path) -> list[LogRecord]:
    """The records of events in an event log that is being written."""
    return [record for record in records_of(folder) if record.channel == Channel.EVENTS]


def test_a_service_explains_from_its_recording(kafka_bootstrap: str, tmp_path: Path) -> None:
    topics = own_topics(kafka_bootstrap)
    scene, truth = planted("cleared", 401)
    asyncio.run(produce(kafka_bootstrap, topics["KVSIGHT_EVENTS_TOPIC"], scene.records, keeps_times=True))
    folder = tmp_path / "recording"
    with ServiceProcess(tmp_path, **topics, KVSIGHT_RECORD=str(folder)) as service:
        service.wait_until_ready()
        wait_until(lambda: len(recorded(folder)) == len(scene.records), deadline_s=60, what="the recording")
        with Client(service.url, timeout_s=60) as client:
            (worker,) = client.explain(Prompt(MODEL, scene.tokens), worker=VICTIM).workers
    assert (worker.cause, worker.findings[0].page) == (truth.cause, truth.page)


def test_a_service_explains_from_the_log_that_it_follows(tmp_path: Path) -> None:
    scene, truth = planted("moved", 402)
    write_log(tmp_path / "run.log", scene.records)
    with ServiceProcess(tmp_path, KVSIGHT_EVENT_LOG_DIR=str(tmp_path / "run.log")) as service:
        service.wait_until_ready()
        with Client(service.url, timeout_s=60) as client:
            (worker,) = client.explain(Prompt(MODEL, scene.tokens), worker=VICTIM).workers
    check_truth(worker, truth)
