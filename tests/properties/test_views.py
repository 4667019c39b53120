"""A stream under every fault at once. When the faults end, the view equals the pages of the engine that is left.

Publishers, forgers, lost, doubled and late records, and clocks take random steps. The reference model is the engine's
own set of pages.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.applier import Applier, DeadLetters
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.resync import ResyncPlanner
from indexer.settings import IndexerSettings
from indexer.views import View, ViewState
from kv_events.records import LogRecord
from kv_events.schema import AllBlocksCleared, SnapshotBegin, SnapshotEnd, WireEvent
from tests.support.effort import num_examples
from tests.support.log.records import Stream, removed, stored

TTL_S = 10.0
SETTINGS = IndexerSettings(max_pages=1000, worker_ttl_s=TTL_S)
CALM_BATCHES = 100
"""One a second: enough for a resync that never ended, and for the longest pauses between requests."""

PAGES = st.lists(st.integers(1, 12), min_size=1, max_size=4)
EVENTS = st.lists(
    st.one_of(
        st.builds(lambda pages: stored((0, pages)), PAGES),
        st.builds(removed, PAGES),
        st.just(AllBlocksCleared()),
    ),
    max_size=2,
)
FORGED_EVENTS = st.one_of(
    EVENTS, st.sampled_from([[SnapshotBegin()], [SnapshotEnd()], [SnapshotBegin(), SnapshotEnd()]])
)
EPOCHS = st.integers(0, 6)
PUBLISHER = st.integers(0, 1)
STEPS = st.one_of(
    st.tuples(st.just("send"), PUBLISHER, EVENTS),
    st.tuples(st.sampled_from(["lose", "double", "delay", "resync"]), PUBLISHER, EVENTS),
    st.tuples(st.just("restart"), PUBLISHER, EPOCHS),
    st.tuples(
        st.just("forge"), EPOCHS, st.sampled_from([0, 1, 3, 7, 50, 2**62]), FORGED_EVENTS, st.sampled_from([4, 8])
    ),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 2.0, 11.0, 700.0])),
)


class Router:
    """The applying side with a clock of its own: what the consumer does, without tasks."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.freshness = Freshness(TTL_S, self.now)
        self.applier = Applier(Namespaces(SETTINGS), DeadLetters(), self.freshness)
        self._planner = ResyncPlanner(SETTINGS, self.freshness, seed=0)

    def wait(self, seconds: float) -> None:
        """Let time pass while the log can be read, as the probes show."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            self.freshness.note_log_read(self.now)

    def read(self, record: LogRecord) -> None:
        for _ in self.applier.apply(record, self.now, self.now):
            pass

    def view(self, stream: Stream) -> View | None:
        return self.applier.namespaces.view(stream.id)

    def asks(self, stream: Stream) -> bool:
        """Whether the publisher of a stream is asked for a resync now."""
        requests = self._planner.plan(self.applier.namespaces, self.now)
        return any(request.epoch == stream.epoch for request in requests)


def held(view: View) -> set[tuple[int, int]]:
    return {
        (int(page), tier)
        for part in view.index.stream_pages(view.number)
        for page, mask in zip(part.hashes, part.tiers, strict=True)
        for tier in range(4)
        if mask >> tier & 1
    }


def take_step(router: Router, publishers: list[Stream], late: list[LogRecord], step: tuple[object, ...]) -> None:
    match step:
        case ("wait", float(seconds)):
            router.wait(seconds)
        case ("restart", int(which), int(epoch)):
            publishers[which].restart()
            publishers[which].epoch = epoch
        case ("forge", int(epoch), int(seq), list(events), int(block_size)):
            forger = Stream(block_size=block_size)
            forger.epoch, forger.seq = epoch, seq
            router.read(forger.batch(*events))
        case (str(fate), int(which), list(events)):
            send(router, publishers[which], late, fate, events)


def send(router: Router, publisher: Stream, late: list[LogRecord], fate: str, events: list[WireEvent]) -> None:
    record = publisher.resync() if fate == "resync" else publisher.batch(*events)
    if fate == "delay":
        late.append(record)
        return
    for _ in range({"lose": 0, "double": 2}.get(fate, 1)):
        router.read(record)
    while late:
        router.read(late.pop())


@settings(max_examples=num_examples(200), deadline=None)
@given(st.lists(STEPS, max_size=30), PUBLISHER)
def test_when_all_faults_end_the_view_becomes_the_pages_of_the_engine(
    steps: list[tuple[object, ...]], survivor: int
) -> None:
    router, publishers = Router(), [Stream(), Stream()]
    for publisher in publishers:
        publisher.clock = lambda: router.now
    late: list[LogRecord] = []
    for step in steps:
        take_step(router, publishers, late, step)
    engine = publishers[survivor]
    for _ in range(CALM_BATCHES):
        router.read(engine.batch())
        router.wait(1.0)
        if router.asks(engine):
            router.read(engine.resync())
    view = router.view(engine)
    assert view is not None
    assert (view.epoch, router.freshness.state(view), held(view)) == (engine.epoch, ViewState.LIVE, engine.held)
    view.index.check()
