"""Whether the processes without an API say when they do not do their work: an engine, a recording, a bridge."""

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from publisher import metrics
from publisher.metrics import serve_metrics
from tests.support.commands import RunningCommand
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.http_checks import WITHOUT_TLS
from tests.support.servers.child_process import free_port
from tests.support.servers.kafka_broker import KafkaBroker
from tests.support.servers.service_process import own_topics
from tests.support.waiting import wait_until


def ask(port: int, path: str) -> tuple[int, str]:
    answer = httpx.get(f"http://127.0.0.1:{port}{path}", timeout=10, verify=WITHOUT_TLS)
    return answer.status_code, answer.text


def is_ready(port: int) -> bool:
    return ask(port, "/ready") == (200, "ok\n")


def is_without(port: int, words: str) -> bool:
    status, text = ask(port, "/ready")
    return status == 503 and words in text


def is_listening(port: int) -> bool:
    try:
        return ask(port, "/health")[0] > 0
    except httpx.TransportError:
        return False


@contextmanager
def process(*words: object) -> Iterator[int]:
    """A command that serves metrics on the port of the block."""
    port = free_port()
    with RunningCommand(*words, "--metrics-port", port):
        wait_until(lambda: is_listening(port), 100, "the port")
        yield port


@pytest.mark.timeout(300)
def test_engines_and_recordings_are_not_ready_while_the_broker_is_away(
    kafka_broker: KafkaBroker, tmp_path: Path
) -> None:
    topics = own_topics(kafka_broker.bootstrap)
    flags = ["--kafka", kafka_broker.bootstrap, "--events-topic", topics["KVSIGHT_EVENTS_TOPIC"]]
    with process("demo", "--engine", "w", *flags) as engine, process("record", tmp_path / "log", *flags) as recording:
        for port in (engine, recording):
            wait_until(partial(is_ready, port), 60, "the work")
        assert "kvsight_recorded_records_total" in ask(recording, "/metrics")[1]
        kafka_broker.kill()
        wait_until(partial(is_without, engine, "the sink takes no records"), 60, "the engine to notice it")
        wait_until(partial(is_without, recording, "unreadable since"), 60, "the recording to notice it")
        assert [ask(port, "/health") for port in (engine, recording)] == [(200, "ok\n")] * 2
        kafka_broker.restart()
        for port in (engine, recording):
            wait_until(partial(is_ready, port), 120, "the work")


def test_a_bridge_is_ready_while_it_reads_one_of_its_engines(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    engines = [f"--engine=worker=w{port},model=m,endpoint=tcp://127.0.0.1:{port}" for port in ports]
    with process("bridge", "--event-log-dir", tmp_path / "log", *engines) as port:
        wait_until(partial(is_without, port, "connection refused"), 60, "the failure")
        with ZmqEngine(port=ports[1]):
            wait_until(partial(is_ready, port), 60, "the engine")
        wait_until(partial(is_without, port, ""), 60, "the loss of the engine")


async def test_a_process_whose_event_loop_hangs_is_neither_healthy_nor_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_PATIENCE_S", 1.0)
    port = free_port()
    end = serve_metrics(port, CollectorRegistry(), lambda: "")
    try:
        assert await asyncio.to_thread(is_ready, port)
        with ThreadPoolExecutor() as threads:  # the loop hangs until both have their answers
            answers = list(threads.map(partial(ask, port), ("/health", "/ready")))
        assert answers == [(503, "the event loop has not answered for 1 s\n")] * 2
    finally:
        end()


def test_a_port_of_metrics_that_is_taken_is_named() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"metrics port {port}: Address already in use"):
            serve_metrics(port, CollectorRegistry())


async def test_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics._Impatient, "timeout", 1.0)
    port = free_port()
    end = serve_metrics(port, CollectorRegistry(), lambda: "")
    try:
        async with asyncio.timeout(60):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            assert await asyncio.to_thread(ask, port, "/health") == (200, "ok\n")
            assert [await reader.read() for reader, _ in silent] == [b""] * 20
    finally:
        await asyncio.to_thread(end)
    for _, writer in silent:
        writer.close()
