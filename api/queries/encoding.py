"""Answers to queries as structs that msgspec encodes: for queries that `api.fast.writer` does not take."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from indexer.scores import WorkerScore
from kv_events.http.parsed_query import ParsedQuery
from kv_events.http.queries import Missing, PeerAnswer, PeerInstance, RankBlocks, RfcInstance
from kv_events.runtime.words import partial_page

_encoder = msgspec.json.Encoder()


def encode_answer(
    question: ParsedQuery,
    scores: list[WorkerScore],
    now: float,
    hint: str | UnsetType = UNSET,
    missing: list[Missing] | UnsetType = UNSET,
) -> bytes:
    """Return the answer as JSON. now: seconds since 1970. hint: see `hint_of`. missing: what a group's answer lacks."""
    if question.is_peer:
        workers = {each.worker: PeerInstance(**_fields(each, question, now)) for each in scores}
        on_device = {
            each.worker: {rank: tiers.gpu for rank, tiers in each.ranks.items() if tiers.gpu}
            for each in scores
            if each.tiers.gpu
        }
        return _encoder.encode(PeerAnswer(scores=on_device, instances=workers, missing=missing, hint=hint))
    asked = [each for each in scores if question.instance is None or each.worker == question.instance]
    return _encoder.encode(
        {question.tenant: {each.worker: RfcInstance(**_fields(each, question, now)) for each in asked}}
    )


def hint_of(question: ParsedQuery, num_positions: int | None, block_sizes: Iterable[int]) -> str | UnsetType:
    """Return `PeerAnswer.hint`. block_sizes: those of the model's workers."""
    smallest = min(block_sizes, default=0)
    if num_positions is None or num_positions >= smallest:
        return UNSET
    return partial_page(num_positions, "token pair" if question.is_bigram else "token", smallest)


def _fields(worker: WorkerScore, question: ParsedQuery, now: float) -> dict[str, Any]:
    """Return the fields of `PeerInstance` and `RfcInstance`."""
    weights, tiers = question.weights, worker.tiers
    fields: dict[str, Any] = {
        "longest_matched": worker.longest_matched,
        "gpu": tiers.gpu,
        "dp": {rank: each.gpu for rank, each in worker.ranks.items()},
        "cpu": tiers.cpu,
        "disk": tiers.external,  # as in Dynamo: disk or external
        "external": tiers.external,
        "state": worker.state.value,
        "age_ms": age_ms(worker.last_batch_at, now),
    }
    if question.is_detailed and question.block_size is not None:
        fields["dp"] = _blocks_dp(worker, question.block_size)
    elif any(each.external != each.gpu for each in worker.ranks.values()):  # left out if it equals `dp`
        fields["matched_dp"] = {rank: each.external for rank, each in worker.ranks.items()}
    if weights is not None:
        fields["weighted"] = tiers.weighted(weights)
        if len(worker.ranks) > 1:  # otherwise it equals `weighted`
            fields["weighted_dp"] = {rank: each.weighted(weights) for rank, each in worker.ranks.items()}
    return fields


def age_ms(last_batch_at: float, now: float) -> int:
    """Return the age of a view in whole milliseconds. It is never negative, even if the clock was set back."""
    return max(0, round((now - last_batch_at) * 1000))


def _blocks_dp(worker: WorkerScore, block_size: int) -> dict[int, RankBlocks]:
    return {
        rank: RankBlocks(
            matched_tokens=tiers.external,
            npu_blocks=tiers.gpu // block_size,
            cpu_blocks=(tiers.cpu - tiers.gpu) // block_size,
            disk_blocks=(tiers.external - tiers.cpu) // block_size,
        )
        for rank, tiers in worker.ranks.items()
    }
