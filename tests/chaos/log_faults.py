"""Faults of the log: records harmed on their way or written by strangers, and topics that are cut or deleted."""

import time
from collections.abc import Iterator
from random import Random

from kv_events.codec import encode_resync
from kv_events.schema import AllBlocksCleared, ResyncRequest, WireEvent
from tests.chaos.engine import BLOCK_SIZE, Engine
from tests.chaos.faults import Course, fault
from tests.chaos.harmful_sink import HARMS
from tests.chaos.rig import Rig
from tests.support.log.records import Stream, removed, stored
from tests.support.waiting import wait_until

_MOST_RECORDS = 5


def _harmed(harm: str) -> Course:
    def course(rig: Rig, random: Random) -> Iterator[None]:
        engine = random.choice(rig.engines)
        engine.order("harm", harm, random.randint(1, _MOST_RECORDS))
        yield
        wait_until(lambda: engine.order("left to harm") == 0, 60, f"records to be {harm}")

    return course


for _harm in HARMS:
    fault(f"records {_harm}", touches={"engine", "broker"}, hold_s=0)(_harmed(_harm))


@fault("garbage on both topics", touches={"broker"}, hold_s=0)
def garbage(rig: Rig, random: Random) -> Iterator[None]:
    keys = [None, b"", b"\xff", *(engine.stream.key.encode() for engine in rig.engines)]
    for topic in (rig.events_topic, rig.control_topic):
        payloads = [None, b"", b"\xc1garbage", random.randbytes(100), random.randbytes(100_000), b"\x93\x93\x93"]
        # aiokafka writes no record that has neither
        records = [(random.choice(keys if payload is not None else keys[1:]), payload) for payload in payloads]
        rig.produce(topic, records)
    yield


@fault("hostile records in the name of an engine", touches={"broker", "engine"}, hold_s=0)
def hostile(rig: Rig, random: Random) -> Iterator[None]:
    engine = random.choice(rig.engines)
    payloads = [_forged(engine, random) for _ in range(_MOST_RECORDS)]
    rig.produce(rig.events_topic, [(engine.stream.key.encode(), payload) for payload in payloads])
    yield


@fault("hostile requests on the control topic", touches={"broker"}, hold_s=0)
def hostile_requests(rig: Rig, random: Random) -> Iterator[None]:
    engine = random.choice(rig.engines)
    key = engine.stream.key
    requests = [
        *(ResyncRequest(key, engine.epoch, "storm") for _ in range(200)),
        ResyncRequest(key, engine.epoch + 1, "of another epoch"),
        ResyncRequest("nobody", 1, "of a stranger"),
        ResyncRequest("x" * 100_000, 2**63 - 1, "y" * 100_000),
    ]
    rig.produce(rig.control_topic, [(key.encode(), encode_resync(request)) for request in requests])
    yield


@fault("records of foreign workers", touches={"broker"}, hold_s=0)
def foreign(rig: Rig, random: Random) -> Iterator[None]:
    records = []
    for number in range(20):
        tenant = random.choice(["default", "other", f"foreign-{number}"])
        stream = Stream(f"foreign-{number}", tenant=tenant, block_size=random.choice([4, BLOCK_SIZE]))
        pages = [random.randrange(1, 2**64) for _ in range(100)]
        records.append(stream.batch(stored((0, pages))))
    rig.produce(rig.events_topic, [(record.key, record.payload) for record in records])
    yield


def _forged(engine: Engine, random: Random) -> bytes:
    stream = Stream(
        engine.name,
        model=engine.stream.model,
        tenant=engine.stream.tenant,
        block_size=random.choice([BLOCK_SIZE, BLOCK_SIZE, 2 * BLOCK_SIZE]),
    )
    stream.epoch = random.choice([engine.epoch, engine.epoch, engine.epoch - 1, engine.epoch + 1])
    stream.seq = random.choice([0, 1, 10**6, 2**63 - 1])
    page = random.randrange(1, 2**64)
    events: list[WireEvent] = [stored((0, [page])), removed([page]), AllBlocksCleared()]
    record = stream.batch(random.choice(events))
    return record.payload if record.payload is not None else b""


# --- topics ---


@fault("log cut behind the snapshot", touches={"broker", "service", "redis"}, hold_s=3)
def log_cut(rig: Rig, random: Random) -> Iterator[None]:
    service = random.choice(rig.services)
    service.kill()
    yield
    rig.cut_log()
    time.sleep(random.uniform(0, 0.5))  # records after the cut
    service.start()


@fault("log cut under running services", touches={"broker"}, hold_s=0)
def log_cut_while_reading(rig: Rig, random: Random) -> Iterator[None]:
    rig.cut_log()
    yield


@fault("events topic deleted and made anew", touches={"broker"}, hold_s=0)
def events_deleted(rig: Rig, random: Random) -> Iterator[None]:
    rig.delete_topic(rig.events_topic)
    yield


@fault("control topic deleted and made anew", touches={"broker"}, hold_s=0)
def control_deleted(rig: Rig, random: Random) -> Iterator[None]:
    rig.delete_topic(rig.control_topic)
    yield


@fault("events topic deleted while a service is down", touches={"broker", "service", "redis"}, hold_s=3)
def events_deleted_meanwhile(rig: Rig, random: Random) -> Iterator[None]:
    service = random.choice(rig.services)
    service.kill()
    rig.delete_topic(rig.events_topic)
    yield
    service.start()
