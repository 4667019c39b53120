"""kvsight's publisher inside engines: created by vLLM's and SGLang's factories, with their events."""

import asyncio
import json
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pydantic
import pytest
from aiokafka import AIOKafkaConsumer

import kvsight.plugins
from bridge.plugins import EnginePublisher
from kv_events.errors import InvalidValueError
from kv_events.streams import StreamId
from kvsight.plugins import SGLANG_MODULE, VLLM_MODULE, EngineFactoryError, publisher_factory, set_publisher
from tests.models.stream_reader import Pages, StreamReader
from tests.rigs.bridge import CPU, GPU, on
from tests.support.engines.event_payloads import names_of
from tests.support.engines.released_modules import (
    RELEASES,
    SGLANG_ARRAYS,
    VLLM,
    Engine,
    engine_folder,
    engine_module,
    forget_engine_modules,
)
from tests.support.http_checks import WITHOUT_TLS
from tests.support.log.records import records_of
from tests.support.servers.child_process import free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
TOKENS = list(range(1, 49))
HASHES = [101, 102, 103]


@pytest.fixture(params=RELEASES, ids="-".join)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, ModuleType]]:
    kind, version = request.param
    yield kind, engine_module(kind, engine_folder(kind, version))
    forget_engine_modules()


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set the variables of an engine's process. Returns the folder of its event log."""
    folder = tmp_path / "log"
    folder.mkdir()
    for name, value in {"MODEL": "m", "WORKER": "w", "EVENT_LOG_DIR": folder, "REPLACE_ZMQ": 1}.items():
        monkeypatch.setenv(f"KVSIGHT_{name}", str(value))
    return folder


def made(kind: Engine, module: ModuleType, rank: int = 0) -> EnginePublisher:
    """Return the publisher that the engine's factory creates. vLLM's factory accepts only the name `zmq`."""
    if kind == "sglang":
        kvsight.plugins.register_with_sglang()
        config = json.dumps({"publisher": "kvsight", "endpoint": "tcp://*:5557"})
        publisher = module.EventPublisherFactory.create(config, attn_dp_rank=rank)
    else:
        kvsight.plugins.register_with_vllm()
        publisher = module.EventPublisherFactory.create(module.KVEventsConfig(enable_kv_cache_events=True), rank)
    assert isinstance(publisher, EnginePublisher)
    return publisher


def batch(module: ModuleType, *events: Any) -> Any:
    return module.KVEventBatch(ts=1.5, events=list(events))


def store(kind: Engine, module: ModuleType, medium: str = "GPU") -> Any:
    fields = {"lora_name": None} if kind == "vllm" else {}
    return module.BlockStored(
        block_hashes=HASHES,
        parent_block_hash=None,
        token_ids=TOKENS,
        block_size=16,
        lora_id=None,
        medium=medium,
        **fields,
    )


def pages_in(folder: Path, rank: int = 0) -> Pages:
    """Return the pages that a reader of the log sees now."""
    view = StreamReader()
    key = StreamId("m", "default", "w", rank).key.encode()
    for record in records_of(folder):
        if record.key == key:
            view.read(record.payload)
    return view.pages


def test_events_of_an_engine_reach_the_log_until_it_ends(engine: tuple[Engine, ModuleType], variables: Path) -> None:
    kind, module = engine
    names = names_of(TOKENS, 16)
    publisher = made(kind, module, rank=1)
    assert isinstance(publisher, EnginePublisher)
    publisher.publish(batch(module, store(kind, module), store(kind, module, "CPU")))
    wait_until(lambda: pages_in(variables, 1) == on(GPU, names) | on(CPU, names))
    publisher.publish(batch(module, module.BlockRemoved(block_hashes=HASHES[1:], medium="GPU")))
    wait_until(lambda: pages_in(variables, 1) == on(GPU, names[:1]) | on(CPU, names))
    publisher.publish(batch(module, module.AllBlocksCleared()))
    wait_until(lambda: pages_in(variables, 1) == set())
    publisher.publish(batch(module, store(kind, module)))
    wait_until(lambda: pages_in(variables, 1) == on(GPU, names))
    publisher.shutdown()
    publisher.shutdown()
    assert pages_in(variables, 1) == set()
    publisher.publish(batch(module, store(kind, module)))
    assert (publisher.counters.batches, publisher.counters.events) == (4, 5)


def test_it_is_found_under_its_name_and_registering_twice_is_harmless(
    engine: tuple[Engine, ModuleType], variables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, module = engine
    monkeypatch.setenv("KVSIGHT_REPLACE_ZMQ", "0")
    factory = module.EventPublisherFactory
    for _ in range(2):
        kvsight.plugins.register(factory)
    assert factory._registry["zmq"] is module.ZmqEventPublisher
    publisher = factory._registry["kvsight"](endpoint="tcp://*:1", replay_endpoint=None, topic="")
    assert isinstance(publisher, EnginePublisher)
    publisher.shutdown()
    # what engines call in addition; a method that a newer version adds is not needed
    for method in vars(module.EventPublisher):
        assert method.startswith("_") or callable(getattr(publisher, method)), f"{kind}: {method}"


def test_vllms_config_takes_no_name_but_its_own() -> None:
    module = engine_module("vllm", engine_folder(*VLLM))
    with pytest.raises(pydantic.ValidationError, match="publisher"):
        module.KVEventsConfig(enable_kv_cache_events=True, publisher="kvsight")
    forget_engine_modules()


def test_a_batch_that_cannot_be_read_costs_all_pages_but_not_the_engine(variables: Path) -> None:
    module = engine_module("sglang", engine_folder(*SGLANG_ARRAYS))
    publisher = EnginePublisher(attn_dp_rank=0)
    publisher.publish(batch(module, store("sglang", module)))
    wait_until(lambda: pages_in(variables) == on(GPU, names_of(TOKENS, 16)))
    for bad in (object(), {"no": "batch"}, [1.0, [["BlockRemoved", ["hex"], "GPU"]], 0]):
        publisher.publish(bad)
        wait_until(lambda: pages_in(variables) == set())
        publisher.publish(batch(module, store("sglang", module)))
        wait_until(lambda: pages_in(variables) == on(GPU, names_of(TOKENS, 16)))
    publisher.shutdown()
    forget_engine_modules()


def test_an_engine_whose_first_store_was_of_another_page_size_is_heard(variables: Path) -> None:
    publisher = EnginePublisher(data_parallel_rank=0)
    publisher.publish([1.0, [["BlockStored", [7], None, TOKENS[:32], 32, None, "CPU"]], 0])
    wait_until(lambda: pages_in(variables) == on(CPU, names_of(TOKENS[:32], 32)))
    publisher.publish([1.0, [["BlockStored", HASHES, None, TOKENS, 16, None, "GPU"]], 0])
    wait_until(lambda: pages_in(variables) == on(GPU, names_of(TOKENS, 16)))
    publisher.shutdown()
    assert pages_in(variables) == set()


def test_each_rank_serves_its_metrics_on_a_port_of_its_own(
    variables: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    monkeypatch.setenv("KVSIGHT_METRICS_PORT", str(port - 1))
    first, second = EnginePublisher(data_parallel_rank=1), EnginePublisher(data_parallel_rank=1)
    assert f"no metrics of default/m/w/1 on port {port}" in caplog.text  # the second one runs without
    first.publish([1.0, [["BlockStored", HASHES, None, TOKENS, 16, None, "GPU"]], 0])
    labels = '{dp_rank="1",model="m",tenant="default",worker="w"}'
    address = f"http://127.0.0.1:{port}/metrics"
    wait_until(lambda: f"kvsight_publisher_held_pages{labels} 3.0" in httpx.get(address, verify=WITHOUT_TLS).text)
    first.shutdown()
    second.shutdown()
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("MODEL", None, "KVSIGHT_MODEL"),
        ("EVENT_LOG_DIR", None, "KVSIGHT_KAFKA / KVSIGHT_EVENT_LOG_DIR"),
        ("WITH_TOKENS", "1", "KVSIGHT_WITH_TOKENS"),
    ],
)
def test_bad_settings_stop_the_engines_start(
    variables: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, named: str
) -> None:
    if value is None:
        monkeypatch.delenv(f"KVSIGHT_{name}")
    else:
        monkeypatch.setenv(f"KVSIGHT_{name}", value)
    with pytest.raises(InvalidValueError, match=named):
        EnginePublisher(data_parallel_rank=0)


_ENGINE_WITHOUT_SHUTDOWN = """
import time
from bridge.plugins import EnginePublisher

publisher = EnginePublisher(attn_dp_rank=0)
publisher.publish([1.5, [["BlockStored", [1], None, [1, 2, 3, 4], 4, None, "GPU"]], 0])
while publisher._stream.translator.publishers[0].stats().next_seq == 0:
    time.sleep(0.01)
"""


async def test_an_engine_that_ends_without_a_word_holds_nothing_according_to_kafka(
    variables: Path, monkeypatch: pytest.MonkeyPatch, kafka_bootstrap: str
) -> None:
    topic = f"events-{uuid.uuid4().hex}"
    monkeypatch.delenv("KVSIGHT_EVENT_LOG_DIR")
    for name, value in {"KAFKA": kafka_bootstrap, "EVENTS_TOPIC": topic, "CONTROL_TOPIC": f"control-{topic}"}.items():
        monkeypatch.setenv(f"KVSIGHT_{name}", value)
    command = [sys.executable, "-c", _ENGINE_WITHOUT_SHUTDOWN]
    await asyncio.to_thread(subprocess.run, command, cwd=ROOT, check=True, timeout=60)
    view = StreamReader()
    lengths: list[int] = []
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=kafka_bootstrap, auto_offset_reset="earliest")
    async with asyncio.timeout(30), consumer as records:
        while lengths[-2:] != [1, 0]:
            view.read((await records.getone()).value)
            lengths.append(len(view.pages))


def test_engines_find_the_entry_points_that_the_package_declares() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert sorted(groups) == ["sglang.srt.plugins", "vllm.general_plugins"]
    for entries in groups.values():
        module, _, function = entries["kvsight"].partition(":")
        assert callable(getattr(import_module(module), function))


def test_an_engine_process_that_makes_no_publisher_does_not_load_it() -> None:
    program = "import sys, kvsight.plugins; print(*sorted(m for m in ('numba', 'aiokafka', 'zmq') if m in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []


def test_a_shadowed_kvsight_package_is_named(variables: Path, tmp_path: Path) -> None:
    (tmp_path / "first" / "bridge").mkdir(parents=True)
    (tmp_path / "first" / "bridge" / "__init__.py").touch()
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'first')!r}); import kvsight.plugins as p; p.make_publisher()"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("kvsight.")]
    assert line.startswith(
        "kvsight.plugins.ShadowedPackageError: kvsight's publisher needs its own package 'bridge' at "
    )
    assert str(tmp_path / "first" / "bridge") in line


def test_the_factories_of_released_engines_are_as_kvsight_knows_them(engine: tuple[Engine, ModuleType]) -> None:
    kind, module = engine
    factory = publisher_factory(VLLM_MODULE if kind == "vllm" else SGLANG_MODULE)
    assert factory is module.EventPublisherFactory
    set_publisher(factory, "tried", print, replace=False)
    assert factory._registry["tried"] is print, "vLLM or SGLang changed EventPublisherFactory: see kvsight.plugins"


def test_a_factory_that_changed_is_named() -> None:
    class EventPublisherFactory:
        publishers: tuple[str, ...] = ("zmq",)

    with pytest.raises(
        EngineFactoryError, match=r"EventPublisherFactory has no dictionary _registry: .* not supported"
    ):
        kvsight.plugins.register(EventPublisherFactory)
