"""Who answers queries: this service from its own views, or all members of its group.

Answers are structs that msgspec encodes, for queries that `api.fast.writer` does not take.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from api.problems import ProblemError, ProblemKind
from indexer.freshness import Freshness
from indexer.namespaces import Namespace, Namespaces
from indexer.scores import WorkerScore, score_all
from kv_events.errors import InvalidValueError
from kv_events.http.parsed_query import ParsedQuery, PromptArray
from kv_events.http.queries import Missing, PeerAnswer, PeerInstance, RankBlocks, RfcInstance
from kv_events.runtime.words import names, partial_page

MISSING_HEADER = "Kvsight-Missing"
"""Header of an answer that lacks partitions, which it names."""
_MAX_NAMES = 20


Answered: TypeAlias = tuple[list[bytes | ProblemError], list[Missing]]
"""Answers to several queries: the JSON or the problem of each, and what all of them lack."""


class Answerer(Protocol):
    """Answers queries. Belongs to the event loop of the consumer."""

    def knows(self, question: ParsedQuery) -> bool:
        """Return whether the model has workers."""

    async def answer(self, questions: Sequence[tuple[ParsedQuery, PromptArray]]) -> Answered:
        """Return the answers. Other tasks run about once a millisecond."""


def general_answer(
    question: ParsedQuery, numbers: PromptArray, asked: Sequence[Namespace], freshness: Freshness, now: float
) -> bytes:
    """Return the answer to any query as JSON. asked: see `namespaces_of`. now: seconds since 1970."""
    num_positions = question.num_positions(numbers)
    scores = score_all(asked, partial(question.hashes, numbers), freshness, num_positions)
    return encode_answer(
        question, scores, now, hint_of(question, num_positions, [each.key.block_size for each in asked])
    )


def namespaces_of(
    question: ParsedQuery, namespaces: Namespaces, why_not_ready: Callable[[], str] = str
) -> Sequence[Namespace]:
    """Return the namespaces of a query. Dynamo's dialect names no block size, so there may be several.

    why_not_ready: returns why views may lack what is in the log, or "". Raises ProblemError.
    """
    found = namespaces.find(question.model, question.tenant)
    if not found:
        known = {each.key[:2] for each in namespaces if not namespaces.is_group(each)}
        raise unknown_model(question, known, why_not_ready())
    if question.block_size is None:
        return found
    check_block_size(question, {namespace.key.block_size for namespace in found})
    return [namespace for namespace in found if namespace.key.block_size == question.block_size]


def check_block_size(question: ParsedQuery, sizes: Collection[int]) -> None:
    """Check that workers of the model use the block size of a query. Raises ProblemError."""
    if question.block_size is not None and question.block_size not in sizes:
        expected = f"{' or '.join(map(str, sorted(sizes)))}, which the workers of {question.model} use"
        raise ProblemError.of_value(
            InvalidValueError("block_size", question.block_size, expected), 400, ProblemKind.BLOCK_SIZE
        )


def unknown_model(question: ParsedQuery, models: Collection[tuple[str, str]], why_not_ready: str = "") -> ProblemError:
    """Return the problem of a query about an unknown model.

    models: known ones with their tenants. why_not_ready: why the model may be in what is not applied yet, or "".
    """
    group, model = ("routing_group", "model_name") if question.is_peer else ("tenant_id", "model")
    known = sorted(f"{name} ({group}={tenant})" for name, tenant in models)
    detail = f"no indexer for model={question.model[:80]} {group}={question.tenant[:80]}"
    detail += f"; known: {names(known, _MAX_NAMES) or 'none'}"
    if why_not_ready:
        detail = f"{detail}; {why_not_ready}"
        return ProblemError(503, ProblemKind.UNAVAILABLE, detail, model, question.model, retry_after_s=1)
    return ProblemError(404, ProblemKind.UNKNOWN_MODEL, detail, model, question.model)


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
