"""Answers to queries as structs that msgspec encodes: for questions that `api.fast.writer` does not take."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType, structs

from indexer.scores import WorkerScore
from kv_events.http.parsed_query import ParsedQuery, Weights
from kv_events.http.queries import Missing, PeerAnswer, PeerInstance, RankBlocks, RfcInstance

_encoder = msgspec.json.Encoder()


def encode_answer(
    question: ParsedQuery, scores: list[WorkerScore], now: float, missing: list[Missing] | UnsetType = UNSET
) -> bytes:
    """Return the answer as JSON. now: seconds since 1970. missing: what the answer of a group lacks."""
    if question.is_peer:
        answer = peer_answer(scores, question.weights, now)
        return _encoder.encode(answer if missing is UNSET else structs.replace(answer, missing=missing))
    asked = [each for each in scores if question.instance is None or each.worker == question.instance]
    instances = rfc_instances(asked, question.weights, now)
    if question.is_detailed and question.block_size is not None:
        for worker in asked:
            detail = _blocks_dp(worker, question.block_size)
            instances[worker.worker] = structs.replace(instances[worker.worker], dp=detail, matched_dp=UNSET)
    return _encoder.encode({question.tenant: instances})


def age_ms(heard_at: float, now: float) -> int:
    """Return the age of a view in whole milliseconds. It is never negative, even if the clock was set back."""
    return max(0, round((now - heard_at) * 1000))


def _device_tokens(worker: WorkerScore) -> dict[int, int]:
    return {rank: tiers.gpu for rank, tiers in worker.ranks.items()}


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


def _matched_dp(worker: WorkerScore) -> dict[int, int] | UnsetType:
    """Omitted if it equals `dp`, as for most workers."""
    for tiers in worker.ranks.values():
        if tiers.external != tiers.gpu:
            return {rank: tiers.external for rank, tiers in worker.ranks.items()}
    return UNSET


def _weighted(worker: WorkerScore, weights: Weights | None) -> float | UnsetType:
    return UNSET if weights is None else worker.tiers.weighted(weights)


def _weighted_dp(worker: WorkerScore, weights: Weights | None) -> dict[int, float] | UnsetType:
    """Omitted for workers with one rank, where it equals `weighted`."""
    if weights is None or len(worker.ranks) == 1:
        return UNSET
    return {rank: tiers.weighted(weights) for rank, tiers in worker.ranks.items()}


def peer_answer(scores: list[WorkerScore], weights: Weights | None, now: float) -> PeerAnswer:
    """Return the answer in Dynamo's dialect."""
    instances = {
        worker.worker: PeerInstance(
            longest_matched=worker.longest_matched,
            gpu=worker.tiers.gpu,
            dp=_device_tokens(worker),
            cpu=worker.tiers.cpu,
            disk=worker.tiers.external,  # as in Dynamo: disk or external
            external=worker.tiers.external,
            state=worker.state.value,
            age_ms=age_ms(worker.heard_at, now),
            matched_dp=_matched_dp(worker),
            weighted=_weighted(worker, weights),
            weighted_dp=_weighted_dp(worker, weights),
        )
        for worker in scores
    }
    return PeerAnswer(scores=dict(_on_device(scores)), instances=instances)


def _on_device(scores: list[WorkerScore]) -> Iterator[tuple[str, dict[int, int]]]:
    for worker in scores:
        if worker.tiers.gpu:
            yield worker.worker, {rank: tokens for rank, tokens in _device_tokens(worker).items() if tokens}


def rfc_instances(scores: list[WorkerScore], weights: Weights | None, now: float) -> dict[str, RfcInstance]:
    """Return the part of an answer in the RFC's dialect that concerns one tenant."""
    return {
        worker.worker: RfcInstance(
            longest_matched=worker.longest_matched,
            gpu=worker.tiers.gpu,
            cpu=worker.tiers.cpu,
            disk=worker.tiers.external,
            external=worker.tiers.external,
            dp=_device_tokens(worker),
            state=worker.state.value,
            age_ms=age_ms(worker.heard_at, now),
            matched_dp=_matched_dp(worker),
            weighted=_weighted(worker, weights),
            weighted_dp=_weighted_dp(worker, weights),
        )
        for worker in scores
    }
