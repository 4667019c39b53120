"""Answers from the views of this service: from a query through scores to JSON in the caller's dialect."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from api.fast.kernels.query import IN_JSON
from api.fast.writer import UNITS, AnswerWriter, DirectQueries, GivenPrompt, prompt_of
from api.problems import ProblemError
from api.queries.answers import Answered, general_answer, namespaces_of
from api.view_source import ViewSource
from indexer.namespaces import Namespace
from indexer.slices import Slices
from kv_events.http.parsed_query import ParsedQuery, PromptArray

_MANY_TOKENS = 2**17  # hashed in a third of a millisecond


class LocalAnswers:
    """An `Answerer` that reads views. One thread calls it."""

    def __init__(self, served: ViewSource) -> None:
        self._served = served
        self._writer = AnswerWriter()

    def knows(self, question: ParsedQuery) -> bool:
        """Return whether the model has workers."""
        return bool(self._served.namespaces.find(question.model, question.tenant))

    async def answer(self, questions: Sequence[tuple[ParsedQuery, PromptArray]]) -> Answered:
        """See `Answerer`."""
        answers: list[bytes | ProblemError] = []
        slices = Slices()
        for question, numbers in questions:
            if len(numbers) > _MANY_TOKENS:
                question, numbers = await self._hashed(question, numbers)
            try:
                answers.append(self.answer_one(question, numbers))
            except ProblemError as problem:
                answers.append(problem)
            await slices.yield_if_due()
        return answers, []

    def answer_one(self, question: ParsedQuery, numbers: PromptArray) -> bytes:
        """Return the answer as JSON. numbers: those of the prompt. Raises ProblemError."""
        asked, freshness, now = self._namespaces_of(question), self._served.freshness, self._served.now()
        if len(asked) == 1 and question.is_usual:
            written = self._writer.write(question, prompt_of(question, numbers), asked[0], freshness, now)
            if written is not None:
                return written
        return general_answer(question, numbers, asked, freshness, now)

    def answer_text(self, question: ParsedQuery, text: bytes, start: int, end: int) -> bytes | None:
        """See `TemplateRoute`."""
        asked = self._namespaces_of(question)
        if len(asked) > 1 or not question.is_usual:
            return None
        prompt = GivenPrompt((UNITS[question.field], IN_JSON), text, start, end)
        return self._writer.write(question, prompt, asked[0], self._served.freshness, self._served.now())

    def direct_plan(self, form: int, question: ParsedQuery) -> DirectQueries | None:
        """See `TemplateRoute`. form: where the numbers are, see `api.fast.kernels.query`."""
        asked = self._namespaces_of(question)
        if len(asked) > 1 or not question.is_usual:
            return None
        return DirectQueries(self._writer.plan(question, asked[0]), (UNITS[question.field], form))

    def _namespaces_of(self, question: ParsedQuery) -> Sequence[Namespace]:
        return namespaces_of(question, self._served.namespaces, self._served.why_not_ready)

    async def _hashed(self, question: ParsedQuery, tokens: PromptArray) -> tuple[ParsedQuery, PromptArray]:
        """Hash a long prompt in another thread, if all workers of the model use one block size."""
        namespaces = self._served.namespaces.find(question.model, question.tenant)
        if question.field != "token_ids" or len(namespaces) != 1:
            return question, tokens
        (namespace,) = namespaces
        hashes = await asyncio.to_thread(question.hashes, tokens, namespace.key.block_size)
        if list(self._served.namespaces.find(question.model, question.tenant)) != [namespace]:
            return question, tokens  # workers with another block size have come
        return replace(question, field="seq_hashes"), hashes
