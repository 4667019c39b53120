"""Limits of one tenant against the same batches without limits: other tenants have equal views, its own never lie."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from indexer.applier import Applier, DeadLetters
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.slices import run_at_once
from indexer.tenants import TenantGate, TenantLimits
from indexer.views import View, ViewState
from kv_events.digest import digest_bytes
from kv_events.records import LogRecord
from kv_events.schema import AllBlocksCleared, WireEvent
from tests.support.log.records import Stream, removed, stored

SETTINGS = IndexerSettings.ignoring_environment(max_pages=1000)
MOST_PAGES, MOST_STREAMS = 12, 2

Step = tuple[str, str, str, list[int]]
"""Tenant, worker, kind of event, pages."""

PAGES = st.lists(st.integers(1, 20), min_size=1, max_size=10, unique=True)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["limited", "free"]),
        st.sampled_from(["w4", "w8", "x4", "x8"]),
        st.sampled_from(["store", "store", "store", "remove", "clear", "heartbeat", "resync", "restart", "lost"]),
        PAGES,
    ),
    max_size=40,
)


def records(steps: list[Step]) -> tuple[list[LogRecord], dict[tuple[str, str], Stream]]:
    """Return what publishers send. A worker's name ends with its block size."""
    streams: dict[tuple[str, str], Stream] = {}
    sent = []
    for number, (tenant, worker, kind, pages) in enumerate(steps):
        stream = streams.setdefault((tenant, worker), Stream(worker, tenant=tenant, block_size=int(worker[1:])))
        held = {page for page, _ in stream.held}
        events: list[WireEvent] = []
        match kind:
            case "store" | "lost":
                events = [stored((0, pages))]
            case "remove":
                events = [removed([page for page in pages if page in held])]
            case "clear":
                events = [AllBlocksCleared()]
            case "restart":
                stream.restart()
        record = stream.resync(now=number) if kind == "resync" else stream.batch(*events, now=number)
        if kind != "lost":
            sent.append(record)
    return sent, streams


def apply(applier: Applier, sent: list[LogRecord]) -> None:
    for record in sent:
        run_at_once(applier.apply(record, record.timestamp_ms / 1000))


def pages_of(view: View) -> set[int]:
    return {page for part in view.index.stream_pages(view.number) for page in part.hashes.tolist()}


def facts(applier: Applier, tenant: str) -> dict[str, object]:
    """Everything that tells the views of a tenant apart."""
    return {
        view.stream.key: (
            *(view.state, view.stale_reason, view.position, view.counters),
            *(sorted(pages_of(view)), digest_bytes(view.index.digest(view.number))),
        )
        for view in applier.namespaces.views
        if view.stream.tenant == tenant
    }


@given(STEPS)
def test_limits_never_disturb_other_tenants_and_refused_views_never_lie(steps: list[Step]) -> None:
    sent, streams = records(steps)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "limits.toml"
        file.write_text(f"[limited]\npages = {MOST_PAGES}\nworker_streams = {MOST_STREAMS}\n")
        limits = TenantLimits(file)
    bounded = Applier(Namespaces(SETTINGS), DeadLetters(), tenants=TenantGate(limits))
    unbounded = Applier(Namespaces(SETTINGS), DeadLetters())
    for record in sent:
        apply(bounded, [record])
        assert bounded.namespaces.num_pages("limited") <= MOST_PAGES
        assert bounded.namespaces.num_streams("limited") <= MOST_STREAMS
    apply(unbounded, sent)
    assert facts(bounded, "free") == facts(unbounded, "free")
    assert not bounded.dead_letters.counts
    for (tenant, _), stream in streams.items():
        view, truth = bounded.namespaces.view(stream.id), {page for page, _ in stream.held}
        if view is None:
            continue
        if view.state is ViewState.LIVE and stream.seq == view.next_seq:
            assert pages_of(view) == truth
        if tenant == "limited" and view.refused_now and view.stale_reason not in ("gap", "restart"):
            assert pages_of(view) <= truth
    limits.use("[limited]\npages = 1000\n")
    apply(bounded, [stream.resync(now=1000) for stream in streams.values()])
    for stream in streams.values():
        view = bounded.namespaces.view(stream.id)
        assert view is not None
        assert view.state is ViewState.LIVE
        assert pages_of(view) == {page for page, _ in stream.held}
    assert not bounded.namespaces.refused
    for namespace in bounded.namespaces:
        namespace.index.check()
