"""Traces by OpenTelemetry: real processes send them to a real receiver of OTLP."""

import secrets
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from tests.support.engines.publishing_process import MODEL, PublishingProcess
from tests.support.http_checks import WITHOUT_TLS
from tests.support.log.records import Stream, stored
from tests.support.programs import run_program
from tests.support.servers.child_process import free_port
from tests.support.servers.otlp_receiver import OtlpReceiver
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import async_wait_until, wait_until

ROUTER, ENGINE = "a-router", "an-engine"


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def topics(kafka_bootstrap: str) -> dict[str, Any]:
    return own_topics(kafka_bootstrap, KVSIGHT_TOPIC_PARTITIONS=1)


@pytest.fixture(scope="module")
def service(
    topics: dict[str, Any], receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    """A service whose log holds a worker already."""
    variables = {**topics, **receiver.variables, "OTEL_SERVICE_NAME": ROUTER}
    with (
        PublishingProcess("first", **topics) as engine,
        ServiceProcess(tmp_path_factory.mktemp("service"), **variables) as service,
    ):
        engine.store(1)
        wait_until(lambda: service.pages("first") == {1}, 60, "the first worker")
        service.wait_until_ready()
        yield service


@pytest.fixture
async def producer(kafka_bootstrap: str) -> AsyncIterator[AIOKafkaProducer]:
    """Writes any records with any headers."""
    producer = AIOKafkaProducer(bootstrap_servers=kafka_bootstrap)
    await producer.start()
    yield producer
    await producer.stop()


def traceparent(trace: str, *, is_sampled: bool = True) -> str:
    return f"00-{trace}-{secrets.token_hex(8)}-{int(is_sampled):02d}"


def ask(service: ServiceProcess, headers: dict[str, str], content: Any = b'{"model_name":"m","seq_hashes":[1]}') -> int:
    headers = {"content-type": "application/json", **headers}
    return httpx.post(
        f"{service.url}/query_by_hash", content=content, headers=headers, timeout=60, verify=WITHOUT_TLS
    ).status_code


def test_the_span_of_a_record_in_the_view_is_a_child_of_its_span_in_the_engine(
    service: ServiceProcess, receiver: OtlpReceiver, topics: dict[str, Any]
) -> None:
    worker = uuid.uuid4().hex
    with PublishingProcess(worker, **topics, **receiver.variables, OTEL_SERVICE_NAME=ENGINE) as engine:
        engine.store(1, 2, 3)
        published = receiver.wait_for("publish", service=ENGINE, kvsight_pages=3, kvsight_epoch=engine.epoch)
        applied = receiver.wait_for("apply", service=ROUTER, trace=published.trace)
    assert service.pages(worker) == {1, 2, 3}
    assert published.parent == ""
    assert applied.parent == published.id
    assert published.attributes["kvsight.stream"] == applied.attributes["kvsight.stream"]
    assert worker in published.attributes["kvsight.stream"]
    assert published.attributes["messaging.message.body.size"] == applied.attributes["messaging.message.body.size"]
    assert published.start_ns <= applied.start_ns <= applied.end_ns


CHUNKED = iter([b'{"model_name":"m",', b'"seq_hashes":[1]}'])


@pytest.mark.parametrize(
    ("content", "status"),
    [
        pytest.param(b'{"model_name":"m","seq_hashes":[1]}', 200, id="fast path"),
        pytest.param(CHUNKED, 200, id="passed to FastAPI"),
        pytest.param(b'{"model_name":"unknown","seq_hashes":[1]}', 404, id="refused"),
    ],
)
def test_a_query_continues_the_trace_of_its_caller(
    service: ServiceProcess, receiver: OtlpReceiver, content: Any, status: int
) -> None:
    header = traceparent(secrets.token_hex(16))
    _, trace, parent, _ = header.split("-")
    assert ask(service, {"traceparent": header}, content) == status
    span = receiver.wait_for("POST /query_by_hash", service=ROUTER, trace=trace)
    assert span.parent == parent
    assert span.attributes["http.response.status_code"] == status
    assert len([each for each in receiver.spans if each.trace == trace]) == 1


def test_every_query_of_one_connection_has_a_span(service: ServiceProcess, receiver: OtlpReceiver) -> None:
    """Connections whose requests are alike are answered by other code if there are no traces."""
    traces = [secrets.token_hex(16) for _ in range(40)]
    parent = secrets.token_hex(8)
    with httpx.Client(base_url=service.url, timeout=60) as client:
        for trace in traces:
            headers = {"traceparent": f"00-{trace}-{parent}-01"}
            body = {"model_name": MODEL, "seq_hashes": [1, 2]}
            assert client.post("/query_by_hash", json=body, headers=headers).status_code == 200
    for trace in traces:
        assert receiver.wait_for("POST /query_by_hash", trace=trace).parent == parent


def test_a_caller_decides_that_its_query_is_not_sampled(service: ServiceProcess, receiver: OtlpReceiver) -> None:
    unsampled, sampled = secrets.token_hex(16), secrets.token_hex(16)
    assert ask(service, {"traceparent": traceparent(unsampled, is_sampled=False)}) == 200
    assert ask(service, {"traceparent": traceparent(sampled)}) == 200
    receiver.wait_for("POST /query_by_hash", trace=sampled)  # sent after the other one
    assert [span for span in receiver.spans if span.trace == unsampled] == []


HOSTILE: dict[str, list[tuple[str, bytes | None]]] = {
    "empty": [("traceparent", b"")],
    "no value": [("traceparent", None)],
    "garbage": [("traceparent", b"\xff\x00garbage")],
    "all zero": [("traceparent", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01")],
    "version ff": [("traceparent", b"ff-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01")],
    "upper case": [("traceparent", b"00-" + b"A" * 32 + b"-" + b"B" * 16 + b"-01")],
    "huge": [("traceparent", b"00-" + b"a" * 100_000)],
    "huge tail": [("traceparent", b"01-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01-" + b"c" * 100_000)],
    "many": [("traceparent", b"x")] * 20_000,
    "huge name": [("traceparent" * 10_000, b"x")],
    "state alone": [("tracestate", b"a=b")],
}


async def test_headers_that_are_no_context_are_ignored(
    service: ServiceProcess, receiver: OtlpReceiver, topics: dict[str, Any], producer: AIOKafkaProducer
) -> None:
    stream, topic = Stream(uuid.uuid4().hex), topics["KVSIGHT_EVENTS_TOPIC"]
    for page, headers in enumerate(HOSTILE.values(), 1):
        record = stream.batch(stored((0, [page])))
        await producer.send_and_wait(topic, record.payload, record.key, headers=headers)
    last, trace = stream.batch(stored((0, [100]))), secrets.token_hex(16)
    state = ("tracestate", b"=,garbage;" * 50)
    await producer.send_and_wait(
        topic, last.payload, last.key, headers=[("traceparent", traceparent(trace).encode()), state]
    )
    receiver.wait_for("apply", trace=trace)
    assert len(service.pages(stream.id.worker)) == len(HOSTILE) + 1
    assert service.listener(stream.id.worker)["state"] == "live"
    spans = [span for span in receiver.spans if stream.id.worker in str(span.attributes.get("kvsight.stream"))]
    assert [span.trace for span in spans] == [trace]


async def test_records_that_are_not_sampled_have_no_headers(kafka_bootstrap: str, receiver: OtlpReceiver) -> None:
    topics = own_topics(kafka_bootstrap, KVSIGHT_TOPIC_PARTITIONS=1)
    sampled = {"always_on": True, "always_off": False}
    for sampler in sampled:
        with PublishingProcess(sampler, **topics, **receiver.variables, OTEL_TRACES_SAMPLER=sampler) as engine:
            engine.store(1)
            engine.close()
    consumer = AIOKafkaConsumer(
        topics["KVSIGHT_EVENTS_TOPIC"], bootstrap_servers=kafka_bootstrap, auto_offset_reset="earliest"
    )
    found: dict[str, set[bool]] = {sampler: set() for sampler in sampled}
    async with consumer:

        async def all_found() -> bool:
            for records in (await consumer.getmany(timeout_ms=100)).values():
                for record in records:
                    (sampler,) = [each for each in sampled if each in record.key.decode()]
                    found[sampler].add(any(name == "traceparent" for name, _ in record.headers))
            return all(found.values())

        await async_wait_until(all_found, 60, "records of both")
    assert found == {sampler: {is_sampled} for sampler, is_sampled in sampled.items()}


@pytest.mark.parametrize(
    "variables",
    [{"OTEL_BSP_SCHEDULE_DELAY": "10"}, {"OTEL_BSP_MAX_QUEUE_SIZE": "100"}],
    ids=["good", "queue smaller than a batch"],
)
def test_without_a_collector_records_are_applied_and_everything_ends(
    topics: dict[str, Any], tmp_path: Path, variables: dict[str, str]
) -> None:
    nowhere: dict[str, Any] = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}", **variables}
    worker = uuid.uuid4().hex
    with (
        PublishingProcess(worker, **topics, **nowhere) as engine,
        ServiceProcess(tmp_path, **topics, **nowhere) as service,
    ):
        engine.store(1)
        wait_until(lambda: service.pages(worker) == {1}, 60, "the page")
        service.wait_until_ready()
        assert ask(service, {"traceparent": traceparent(secrets.token_hex(16))}) == 200
        engine.terminate()
        service.terminate()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "OTEL_TRACES_EXPORTER: got 'jaeger', expected an installed exporter"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"},
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: got 'smoke', expected an installed exporter",
        ),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, ""),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"}, ""),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "pip install 'kvsight[otel]'"),
        ({}, ""),
    ],
)
def test_a_process_that_sends_no_traces_says_why_and_runs(variables: dict[str, str], expected: str) -> None:
    without = "import sys; sys.modules['opentelemetry'] = None; " if "pip" in expected else ""
    program = f"{without}from kv_events.runtime.tracing import open_spans; assert open_spans() is None"
    done = run_program(program, **variables)
    assert done.returncode == 0, done.stderr
    assert expected in done.stderr
    assert bool(done.stderr) == bool(expected)


def test_a_process_that_sends_no_traces_imports_nothing_for_them() -> None:
    program = """
import sys
from api.app import create_app
from api.service import LiveService
from api.settings import ApiSettings
from indexer.assembly import create_consumer
from indexer.settings import IndexerSettings
from publisher import EventPublisher, PublisherSettings
from publisher.sinks.kafka import KafkaSink
publishing = PublisherSettings(model="m", worker="w", block_size=4, kafka="localhost:9")
EventPublisher(publishing, KafkaSink(publishing))
create_app(LiveService(create_consumer(IndexerSettings(kafka="localhost:9")), ApiSettings()))
assert "opentelemetry.sdk" not in sys.modules and "kv_events.runtime.spans" not in sys.modules
"""
    done = run_program(program)
    assert done.returncode == 0, done.stderr
