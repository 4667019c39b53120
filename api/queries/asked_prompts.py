"""The prompt of a query, as `analysis` asks about it."""

from __future__ import annotations

from analysis.explain.asked_prompt import AskedPrompt
from kv_events.hashing import rolling_hashes
from kv_events.http.parsed_query import ParsedQuery, PromptArray


def asked_prompt(question: ParsedQuery, numbers: PromptArray, worker: str | None = None) -> AskedPrompt:
    """Return the prompt of a query. numbers: see `question_of`. worker: the only one to explain, if given."""
    tokens = numbers if question.field == "token_ids" else None
    hashes = rolling_hashes(numbers) if question.field == "block_hashes" else numbers
    return AskedPrompt(
        model=question.model,
        tenant=question.tenant,
        tokens=tokens,
        hashes=hashes if tokens is None else None,
        lora_name=question.lora_name,
        cache_salt=question.cache_salt,
        is_bigram=question.is_bigram,
        block_size=question.block_size,
        worker=question.instance if worker is None else worker,
    )
