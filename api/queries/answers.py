"""Answers to queries: from a question through scores to JSON in the caller's dialect."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from api.access.tenants import TenantQueries
from api.fast.writer import AnswerWriter, Plan
from api.problems import ProblemError, ProblemKind
from api.queries.encoding import encoded_answer
from api.queries.questions import Numbers, Question
from indexer.freshness import Freshness
from indexer.namespaces import Namespace, Namespaces
from indexer.scores import score_all
from kv_events.errors import InvalidValueError

_MAX_NAMES = 20


class Answers:
    """Answers questions. One thread calls it."""

    def __init__(self, tenants: TenantQueries | None = None) -> None:
        """tenants: bounds on the queries of tenants. None: there are none."""
        self._tenants = tenants
        self._writer = AnswerWriter()

    def answer(
        self, question: Question, numbers: Numbers, namespaces: Namespaces, freshness: Freshness, now: float
    ) -> bytes:
        """Return the answer as JSON. numbers: those of the prompt. now: seconds since 1970. Raises ProblemError."""
        asked = _namespaces_of(question, namespaces)
        rate = None if self._tenants is None else self._tenants.rate(question.tenant)
        if rate is not None and self._tenants is not None:
            if rate.wait_s():
                raise self._tenants.too_many(question, rate)
            rate.note()
        if len(asked) == 1 and question.is_usual:
            written = self._writer.write(question, numbers, asked[0], freshness, now)
            if written is not None:
                return written
        hashes = partial(question.hashes, numbers)
        scores = score_all(asked, hashes, freshness, question.num_positions(numbers))
        return encoded_answer(question, scores, now)

    def answer_text(
        self, question: Question, text: bytes, start: int, namespaces: Namespaces, freshness: Freshness, now: float
    ) -> tuple[bytes, int] | None:
        """Answer a question whose numbers are in a JSON text. start: index after the "[".

        Returns the answer and the index of the "]", or None if another decoder or encoder is needed. Raises
        ProblemError.
        """
        asked = _namespaces_of(question, namespaces)
        if len(asked) > 1 or not question.is_usual:
            return None
        rate = None if self._tenants is None else self._tenants.rate(question.tenant)
        if rate is not None and rate.wait_s():
            return None
        answered = self._writer.write_text(question, text, start, asked[0], freshness, now)
        if rate is not None and answered is not None:
            rate.note()
        return answered

    def direct_plan(self, question: Question, namespaces: Namespaces) -> Plan | None:
        """Return how `serve_ready` answers a question about tokens, or None if it cannot. Raises ProblemError."""
        asked = _namespaces_of(question, namespaces)
        if len(asked) > 1 or asked[0].groups or not question.is_usual:
            return None
        if self._tenants is not None and self._tenants.rate(question.tenant) is not None:
            return None
        return self._writer.plan(question, asked[0])


def _namespaces_of(question: Question, namespaces: Namespaces) -> Sequence[Namespace]:
    """Return the namespaces of the question. Dynamo's dialect names no block size, so there may be several."""
    found = namespaces.find(question.model, question.tenant)
    if not found:
        requested = (n for n in namespaces if not namespaces.is_group(n))
        raise unknown_model(question, {n.key[:2] for n in requested})
    if question.block_size is None:
        return found
    check_block_size(question, {namespace.key.block_size for namespace in found})
    return [namespace for namespace in found if namespace.key.block_size == question.block_size]


def check_block_size(question: Question, sizes: Collection[int]) -> None:
    """Check that workers of the model use the block size of a question. Raises ProblemError."""
    if question.block_size is not None and question.block_size not in sizes:
        expected = f"{' or '.join(map(str, sorted(sizes)))}, which the workers of {question.model} use"
        raise ProblemError.of_value(
            InvalidValueError("block_size", question.block_size, expected), 400, ProblemKind.BLOCK_SIZE
        )


def unknown_model(question: Question, models: Collection[tuple[str, str]]) -> ProblemError:
    """Return the problem of a question about an unknown model. models: known ones with their tenants."""
    group, model = ("routing_group", "model_name") if question.is_peer else ("tenant_id", "model")
    known = sorted(f"{name} ({group}={tenant})" for name, tenant in models)
    names = ", ".join(known[:_MAX_NAMES]) + (f" and {len(known) - _MAX_NAMES} more" if known[_MAX_NAMES:] else "")
    detail = f"no indexer for model={question.model[:80]} {group}={question.tenant[:80]}; known: {names or 'none'}"
    return ProblemError(404, ProblemKind.UNKNOWN_MODEL, detail, model, question.model)
