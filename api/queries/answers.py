"""Who answers queries: this service from its own views, or all members of its group."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from api.problems import ProblemError, ProblemKind
from api.queries.encoding import encode_answer, hint_of
from indexer.freshness import Freshness
from indexer.namespaces import Namespace, Namespaces
from indexer.scores import score_all
from kv_events.errors import InvalidValueError
from kv_events.http.parsed_query import ParsedQuery, PromptArray
from kv_events.http.queries import Missing
from kv_events.runtime.words import names

MISSING_HEADER = "Kvsight-Missing"
"""Header of an answer that lacks partitions, which it names."""
_MAX_NAMES = 20


class Answered(NamedTuple):
    """Answers to several queries."""

    answers: list[bytes | ProblemError]
    """JSON, or the problem of a query."""
    missing: list[Missing]
    """What all of them lack."""


class Answerer(Protocol):
    """Answers queries. Belongs to the event loop of the consumer."""

    def check_ready(self) -> None:
        """Raise ProblemError (503) if nothing can be answered yet."""

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
