"""Answers to queries: from a question through scores to JSON in the caller's dialect."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType

from api.problems import ProblemError
from api.questions import Question, Weights
from indexer.freshness import Freshness
from indexer.namespaces import Namespace, Namespaces
from indexer.questions import score_all
from indexer.scores import WorkerScore
from kv_events.errors import InvalidValueError
from kvsight.schemas.queries import PeerAnswer, PeerInstance, RfcAnswer, RfcInstance

_MAX_NAMES = 20

_encoder = msgspec.json.Encoder()


def answer(question: Question, namespaces: Namespaces, freshness: Freshness, now: float) -> bytes:
    """Return the answer as JSON. now: seconds since 1970. Raises ProblemError."""
    found = _namespaces_of(question, namespaces)
    scores = score_all(found, question.hashes, freshness)
    if question.is_peer:
        return _encoder.encode(_peer_answer(scores, question.weights, now))
    return _encoder.encode(_rfc_answer(scores, question, now))


def _namespaces_of(question: Question, namespaces: Namespaces) -> list[Namespace]:
    """Return the namespaces of the question. Dynamo's dialect names no block size, so there may be several."""
    found = namespaces.find(question.model, question.tenant)
    if not found:
        raise _unknown_model(question, namespaces)
    if question.block_size is None:
        return found
    sizes = sorted(namespace.key.block_size for namespace in found)
    if question.block_size not in sizes:
        expected = f"{' or '.join(map(str, sizes))}, which the workers of {question.model} use"
        raise ProblemError.of_value(InvalidValueError("block_size", question.block_size, expected), 400, "block-size")
    return [namespace for namespace in found if namespace.key.block_size == question.block_size]


def _unknown_model(question: Question, namespaces: Namespaces) -> ProblemError:
    group, model = ("routing_group", "model_name") if question.is_peer else ("tenant_id", "model")
    requested = (n for n in namespaces if not namespaces.is_group(n))
    known = sorted({f"{n.key.model} ({group}={n.key.tenant})" for n in requested})
    names = ", ".join(known[:_MAX_NAMES]) + (f" and {len(known) - _MAX_NAMES} more" if known[_MAX_NAMES:] else "")
    detail = f"no indexer for model={question.model[:80]} {group}={question.tenant[:80]}; known: {names or 'none'}"
    return ProblemError(404, "unknown-model", detail, model, question.model)


def age_ms(heard_at: float, now: float) -> int:
    """Return the age of a view in whole milliseconds. It is never negative, even if the clock was set back."""
    return max(0, round((now - heard_at) * 1000))


def _device_tokens(worker: WorkerScore) -> dict[int, int]:
    return {rank: tiers.gpu for rank, tiers in worker.ranks.items()}


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


def _reusable_dp(worker: WorkerScore) -> dict[int, int] | UnsetType:
    return UNSET if worker.reusable_by_rank is None else worker.reusable_by_rank


def _peer_answer(scores: list[WorkerScore], weights: Weights | None, now: float) -> PeerAnswer:
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
            reusable=worker.reusable if worker.has_groups else UNSET,
            reusable_dp=_reusable_dp(worker),
        )
        for worker in scores
    }
    return PeerAnswer(scores=dict(_on_device(scores)), instances=instances)


def _on_device(scores: list[WorkerScore]) -> Iterator[tuple[str, dict[int, int]]]:
    for worker in scores:
        if worker.tiers.gpu:
            yield worker.worker, {rank: tokens for rank, tokens in _device_tokens(worker).items() if tokens}


def _rfc_answer(scores: list[WorkerScore], question: Question, now: float) -> RfcAnswer:
    instances = {
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
            weighted=_weighted(worker, question.weights),
            weighted_dp=_weighted_dp(worker, question.weights),
            reusable=worker.reusable if worker.has_groups else UNSET,
            reusable_dp=_reusable_dp(worker),
        )
        for worker in scores
        if question.instance is None or worker.worker == question.instance
    }
    return {question.tenant: instances}
