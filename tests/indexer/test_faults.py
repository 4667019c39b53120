"""A stream under every fault at once. When the faults end, the view equals the pages of the engine that is left.

Publishers, forgers, lost, doubled and late records, and clocks take random steps. The reference model is the engine's
own set of pages.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.views import ViewState
from kv_events.records import LogRecord
from kv_events.schema import AllBlocksCleared, SnapshotBegin, SnapshotEnd, WireEvent
from tests.rigs.views import Views, held
from tests.support.effort import num_examples
from tests.support.log.records import Stream, removed, stored

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


def asks(views: Views, stream: Stream) -> bool:
    """Whether the publisher of a stream is asked for a resync now."""
    return any(request.epoch == stream.epoch for request in views.planned())


def take_step(views: Views, publishers: list[Stream], late: list[LogRecord], step: tuple[object, ...]) -> None:
    match step:
        case ("wait", float(seconds)):
            views.wait(seconds)
        case ("restart", int(which), int(epoch)):
            publishers[which].restart()
            publishers[which].epoch = epoch
        case ("forge", int(epoch), int(seq), list(events), int(block_size)):
            forger = Stream(block_size=block_size)
            forger.epoch, forger.seq = epoch, seq
            views.read_now(forger.batch(*events))
        case (str(fate), int(which), list(events)):
            send(views, publishers[which], late, fate, events)


def send(views: Views, publisher: Stream, late: list[LogRecord], fate: str, events: list[WireEvent]) -> None:
    record = publisher.resync() if fate == "resync" else publisher.batch(*events)
    if fate == "delay":
        late.append(record)
        return
    for _ in range({"lose": 0, "double": 2}.get(fate, 1)):
        views.read_now(record)
    while late:
        views.read_now(late.pop())


@settings(max_examples=num_examples(200), deadline=None)
@given(st.lists(STEPS, max_size=30), PUBLISHER)
def test_when_all_faults_end_the_view_becomes_the_pages_of_the_engine(
    steps: list[tuple[object, ...]], survivor: int
) -> None:
    views, publishers = Views(1000.0, follows_silence=True, max_pages=1000), [Stream(), Stream()]
    for publisher in publishers:
        publisher.clock = lambda: views.now
    late: list[LogRecord] = []
    for step in steps:
        take_step(views, publishers, late, step)
    engine = publishers[survivor]
    for _ in range(CALM_BATCHES):
        views.read_now(engine.batch())
        views.wait(1.0)
        if asks(views, engine):
            views.read_now(engine.resync())
    view = views.view(engine)
    assert (view.epoch, views.freshness.state(view), held(view)) == (engine.epoch, ViewState.LIVE, engine.held)
    view.index.check()
