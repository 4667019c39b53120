"""Everything that is known about the views of a replay, in a form that can be compared."""

from dataclasses import asdict
from typing import Any

from indexer.replay import Replay
from indexer.views import View


def held_pages(view: View) -> dict[int, tuple[int, int]]:
    """Return sequence hash -> (parent, bitmask of tiers) of all pages of a view."""
    return {
        page: (parent, tiers)
        for part in view.index.stream_pages(view.number)
        for page, parent, tiers in zip(part.hashes.tolist(), part.parents.tolist(), part.tiers.tolist(), strict=True)
    }


def facts(replay: Replay) -> dict[str, Any]:
    """Return the views of a replay with all that decides how they go on."""
    return {
        "now": replay.now,
        "records": (replay.applier.records, dict(replay.applier.dead_letters.counts)),
        "clock": (replay.freshness.log_read_at, replay.freshness.resumed_at, replay.freshness.unbroken_since),
        "views": {view.stream: _view_facts(replay, view) for view in replay.namespaces.views},
    }


def _view_facts(replay: Replay, view: View) -> dict[str, Any]:
    return {
        "block_size": view.block_size,
        "state": (view.state, replay.freshness.state(view), view.reason, replay.freshness.reason(view)),
        "position": view.position,
        "heard": (view.last_batch_at, view.last_batch_tick, view.silent_from),
        "agreed": (view.agreed_at, view.missing_batches),
        "counters": asdict(view.counters),
        "pages": held_pages(view),
        "digest": view.index.digest(view.number).tolist(),
        "resync": None if view.marks is None else view.resync_began,
        "refused": view.refused_now,
    }
