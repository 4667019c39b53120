"""Answers of the selection service."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from api.selection.kernels.select import COST_SCALE, MOST_EXPLAINED
from indexer.namespaces import Namespace
from kv_events.http.selection import (
    Load,
    Overlap,
    OverlapScores,
    PrefillWorker,
    RankOverlap,
    Selection,
    SelectRequest,
    Source,
    WeighedCandidate,
    WorkerName,
)
from kv_events.reservations import Reserved
from kv_events.schema import MEDIA
from kv_events.streams import StreamId
from selection.book import Booked
from selection.candidates import Candidates
from selection.roster import Report, Roster, Weighed
from selection.selector import Chosen

_MOST_DIGITS = 19


def worker_name(worker: str) -> WorkerName:
    """Return a worker's name in answers: a number if it is one, as Dynamo's workers are."""
    is_number = worker.isascii() and worker.isdecimal() and len(worker) <= _MOST_DIGITS and str(int(worker)) == worker
    return int(worker) if is_number else worker


def selection_of(request: SelectRequest, chosen: Chosen, namespace: Namespace, record: Reserved | None) -> Selection:
    """Return the answer to a request. record: its reservation, if it is booked."""
    (roster, _, candidates), choice = chosen.weighed, chosen.choice
    row, model, block_size = choice.row, namespace.key, namespace.key.block_size
    extra: dict[str, object] = {}
    if record is not None:
        hashes = chosen.found.hashes.view(np.int64).tolist()
        extra = {"sequence_hashes": hashes, "isl_tokens": chosen.found.tokens, "track_prefill_tokens": True}
    if request.explain:
        extra |= {"reason": choice.reason, "candidates": _shown(candidates, choice.costs)}
    if request.sources:
        extra["sources"] = sources_of(chosen, block_size)
    if choice.prefill is not None:
        first = chosen.weighed.rows[choice.prefill]
        rank, endpoint = roster.ranks[first], roster.endpoints[first]
        extra["prefill"] = PrefillWorker(worker_id=worker_name(rank.worker), dp_rank=rank.dp_rank, endpoint=endpoint)
    if chosen.found.degraded:
        extra["degraded"] = chosen.found.degraded
    selection_id = record.decision.request_id if record is not None else request.selection_id
    return Selection(
        selection_id=UNSET if selection_id is None else selection_id,
        model_name=model.model,
        routing_group=model.tenant,
        worker_id=worker_name(candidates.workers[row]),
        dp_rank=candidates.dp_ranks[row],
        endpoint=roster.endpoints[chosen.weighed.rows[row]],
        block_size=block_size,
        overlap=_overlap(chosen.weighed, row),
        effective_prefill_tokens=chosen.prefill_tokens,
        potential_decode_blocks=candidates.decode_blocks.item(row),
        **extra,  # type: ignore[arg-type]
    )


def _overlap(weighed: Weighed, row: int) -> Overlap:
    """Return what the worker of a candidate holds: on each tier that of its best rank."""
    roster, rows, candidates = weighed
    of_worker = roster.rows[candidates.workers[row]]
    if len(of_worker) == 1:
        gpu, cpu, _, external = candidates.held[row].tolist()
        ranks = {candidates.dp_ranks[row]: gpu}
    else:
        members = [i for i, each in enumerate(rows) if each in of_worker]
        gpu, cpu, _, external = candidates.held[members].max(axis=0).tolist()
        ranks = {candidates.dp_ranks[i]: int(candidates.held[i, 0]) for i in members}
    predicted = candidates.predicted.item(row)
    more = predicted if predicted > candidates.held.item(row, 0) else UNSET
    return Overlap(longest_matched=external, gpu=gpu, dp=ranks, cpu=cpu, disk=external, predicted=more)


def _shown(candidates: Candidates, costs: npt.NDArray[np.float64]) -> list[WeighedCandidate]:
    return [
        WeighedCandidate(
            worker_id=worker_name(candidates.workers[row]),
            dp_rank=candidates.dp_ranks[row],
            cost=float(np.rint(costs[row] * COST_SCALE) / COST_SCALE),
            tokens=int(candidates.predicted[row]),
            prefill_tokens=int(candidates.prefill_tokens[row]),
            requests=int(candidates.requests[row]),
        )
        for row in np.argsort(costs, kind="stable")[:MOST_EXPLAINED].tolist()
        if np.isfinite(costs[row])
    ]


def sources_of(chosen: Chosen, block_size: int) -> list[Source]:
    """Return from where the chosen rank can fetch pages that it lacks: for each range, the fastest tier of a peer.

    What a rank holds is a prefix, so the longest one of each tier, fastest first, covers all that anyone holds.
    """
    roster, rows, candidates = chosen.everyone
    start, found = int(chosen.weighed.candidates.held[chosen.choice.row, -1]), list[Source]()
    for tier, medium in enumerate(MEDIA):
        peer = int(candidates.held[:, tier].argmax())
        if (end := int(candidates.held[peer, tier])) > start:
            found.append(
                Source(
                    start=start // block_size,
                    end=end // block_size,
                    worker_id=worker_name(candidates.workers[peer]),
                    dp_rank=candidates.dp_ranks[peer],
                    medium=medium.value,
                    endpoint=roster.endpoints[rows[peer]],
                )
            )
            start = end
    return found


def overlaps_of(weighed: Weighed, num_blocks: int, block_size: int) -> OverlapScores:
    """Return the pages that each candidate holds."""
    candidates = weighed.candidates
    workers = []
    for row, (gpu, cpu, _, external) in enumerate((candidates.held // block_size).tolist()):
        workers.append(
            RankOverlap(
                worker_id=worker_name(candidates.workers[row]),
                dp_rank=candidates.dp_ranks[row],
                device_blocks=gpu,
                host_pinned_blocks=cpu,
                disk_blocks=external,
                host_pinned_extension_blocks=cpu - gpu,
                disk_extension_blocks=external - cpu,
            )
        )
    return OverlapScores(block_size=block_size, num_blocks=num_blocks, workers=workers)


def load_of(rank: StreamId, booked: Booked, report: Report | None = None) -> Load:
    """Return the load of a rank, with what its engine reports."""
    return Load(
        worker_id=worker_name(rank.worker),
        dp_rank=rank.dp_rank,
        potential_prefill_tokens=booked.prefill_tokens,
        potential_decode_blocks=booked.decode_pages,
        active_requests=booked.requests,
        reported_requests=UNSET if report is None else report.requests,
        reported_blocks=UNSET if report is None or report.used_pages is None else report.used_pages,
    )


def loads_of(roster: Roster, rows: Sequence[int], *columns: npt.NDArray[Any]) -> list[Load]:
    """Return the load of some rows of a roster, with what their engines report.

    columns: prefill tokens, decode blocks, requests, with one item for each row.
    """
    numbers = zip(*(np.floor(column + 0.5).astype(int).tolist() for column in columns), strict=True)
    return [
        load_of(roster.ranks[row], Booked(requests, tokens, blocks), roster.reports[row])
        for row, (tokens, blocks, requests) in zip(rows, numbers, strict=True)
    ]
