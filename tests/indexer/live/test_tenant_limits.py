"""Limits of one tenant against the same batches without limits: other tenants have equal views, its own never lie."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from indexer.tenants import TenantGate, TenantLimits
from indexer.views import ViewState
from kv_events.digest import digest_bytes
from kv_events.records import LogRecord
from kv_events.schema import AllBlocksCleared, WireEvent
from tests.rigs.views import Views, held
from tests.support.log.records import Stream, removed, stored

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


def facts(views: Views, tenant: str) -> dict[str, object]:
    """Everything that tells the views of a tenant apart."""
    return {
        view.stream.key: (
            *(view.state, view.stale_reason, view.position, view.counters),
            *(held(view), digest_bytes(view.index.digest(view.number))),
        )
        for view in views.applier.namespaces.views
        if view.stream.tenant == tenant
    }


@given(STEPS)
def test_limits_never_disturb_other_tenants_and_refused_views_never_lie(steps: list[Step]) -> None:
    sent, streams = records(steps)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "limits.toml"
        file.write_text(f"[limited]\npages = {MOST_PAGES}\nworker_streams = {MOST_STREAMS}\n")
        limits = TenantLimits(file)
    bounded, unbounded = Views(max_pages=1000, tenants=TenantGate(limits)), Views(max_pages=1000)
    namespaces = bounded.applier.namespaces
    for record in sent:
        bounded.read(record)
        assert namespaces.num_pages("limited") <= MOST_PAGES
        assert namespaces.num_streams("limited") <= MOST_STREAMS
    unbounded.read(*sent)
    assert facts(bounded, "free") == facts(unbounded, "free")
    assert not bounded.applier.dead_letters.counts
    for (tenant, _), stream in streams.items():
        view = namespaces.view(stream.id)
        if view is None:
            continue
        if view.state is ViewState.LIVE and stream.seq == view.next_seq:
            assert held(view) == stream.held
        if tenant == "limited" and view.refused_now and view.stale_reason not in ("gap", "restart"):
            assert held(view) <= stream.held
    limits.use("[limited]\npages = 1000\n")
    bounded.read(*(stream.resync(now=1000) for stream in streams.values()))
    for stream in streams.values():
        view = bounded.view(stream)
        assert (view.state, held(view)) == (ViewState.LIVE, stream.held)
    assert not namespaces.refused
    for namespace in namespaces:
        namespace.index.check()
