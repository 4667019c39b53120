"""Records of a small fleet in which a lot goes wrong: lost, doubled and swapped batches, restarts, resyncs cut off."""

from collections.abc import Iterator
from random import Random

from kv_events.records import Channel, LogRecord
from kv_events.schema import CLOSED, ENGINE_UNHEARD, AllBlocksCleared, SnapshotBegin, SnapshotEnd, WireEvent
from tests.support.log.records import Stream, removed, stored

_PAGES = range(1, 60)
_START_S = 1_700_000_000.0


def faulty_run(random: Random, num_records: int) -> list[LogRecord]:
    """Return about this many records of three workers in two partitions, with times that are not quite in order."""
    streams = [Stream("w-0"), Stream("w-1", model="n"), Stream("w-2", dp_rank=1)]
    sent: list[tuple[int, LogRecord]] = []
    now = _START_S
    while len(sent) < num_records:
        now += random.choice((0.0, 0.001, 0.5, 3.0, 15.0 if random.random() < 0.1 else 0.1))
        number = random.randrange(len(streams))
        for record in _records(random, streams[number], now - random.choice((0.0, 0.0, 0.2))):
            fate = random.random()
            if fate < 0.05:
                continue  # lost
            sent.append((number, record))
            if fate > 0.95:
                sent.append((number, record))
            if fate > 0.9 and len(sent) > 1:
                sent[-1], sent[-2] = sent[-2], sent[-1]
    return list(_numbered(random, sent))


def _records(random: Random, stream: Stream, now: float) -> Iterator[LogRecord]:
    """Yield the batches of one step of a worker."""
    step = random.random()
    if step < 0.05:
        stream.restart()
    if step > 0.97:
        stream.block_size = 4 + 4 * (stream.block_size == 4)  # a restart with another configuration
        stream.restart()
    if 0.1 < step < 0.2:
        yield stream.resync(now=now)
    elif step < 0.25:  # over several records; any of them may be lost
        held = sorted(stream.held)
        yield stream.batch(SnapshotBegin("test"), now=now)
        for page, tier in held:
            yield stream.batch(stored((0, [page]), tier=tier), now=now)
        if random.random() < 0.8:
            yield stream.batch(SnapshotEnd(), now=now)
    else:
        reason = random.choice(("", "", "", ENGINE_UNHEARD, CLOSED)) if random.random() < 0.1 else ""
        yield stream.batch(*_events(random, stream), now=now, degraded_reason=reason)


def _events(random: Random, stream: Stream) -> Iterator[WireEvent]:
    for _ in range(random.randrange(3)):
        kind, tier = random.random(), random.choice((0, 0, 1, 2))
        held = sorted(page for page, where in stream.held if where == tier)
        if kind < 0.02:
            yield AllBlocksCleared()
        elif kind < 0.6 or not held:
            begin = random.choice(_PAGES)
            yield stored((begin - 1, list(range(begin, begin + random.randrange(1, 8)))), tier=tier)
        else:
            yield removed(random.sample(held, min(len(held), random.randrange(1, 4))), tier=tier)


def _numbered(random: Random, sent: list[tuple[int, LogRecord]]) -> Iterator[LogRecord]:
    """Yield the records as a recording of two partitions has them, with other channels and one broken record."""
    offsets = [random.randrange(100), random.randrange(100)]
    for number, record in sent:
        partition = number % 2
        if random.random() < 0.05:
            yield LogRecord(0, number, record.timestamp_ms, b"router", b"anything", Channel.DECISIONS)
        if random.random() < 0.02:
            record = record._replace(payload=b"\xc1")
        yield record._replace(partition=partition, offset=offsets[partition])
        offsets[partition] += random.choice((1, 1, 1, 2))
