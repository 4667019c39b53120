"""Bodies of POST /decisions. Unknown fields are ignored.

A decision also has the fields of a query, in either dialect: model, tenant, prompt, adapter and salt.
"""

from typing import Annotated

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kv_events.limits import MAX_CANDIDATES

MAX_DECISIONS_PER_BATCH = 1024


class CandidateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that the router could have chosen, as the router saw it."""

    worker: str
    dp_rank: int | None = None
    tokens: int = 0
    """Tokens of the prompt that the worker held."""
    score: float = 0.0
    """The number by which the router compared the candidates. The highest one wins."""


class DecisionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a router chose, without the fields of a query."""

    request_id: str
    worker: str
    """The worker that was chosen."""
    dp_rank: int | None = None
    """The rank that was chosen. None: any."""
    predicted_tokens: int | None = None
    """Tokens that the router expected the worker to reuse. None: the router did not ask an index."""
    prompt_tokens: int | None = None
    """Default: the number of `token_ids`, or the tokens of the pages."""
    candidates: Annotated[list[CandidateRequest], msgspec.Meta(max_length=MAX_CANDIDATES)] = []
    timestamp: float | None = None
    """Time of the choice in seconds since 1970, at most a day from now. Default: now."""


class OutcomeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine reused for a request."""

    request_id: str
    cached_tokens: int
    """`usage.prompt_tokens_details.cached_tokens` of the engine's answer."""
    timestamp: float | None = None
    """Time of the answer's first token in seconds since 1970, at most a day from now. Default: now."""


class DecisionProbe(msgspec.Struct, frozen=True):
    """The part of a request that shows what it is."""

    cached_tokens: Raw | UnsetType = UNSET
    decisions: Annotated[list[Raw], msgspec.Meta(max_length=MAX_DECISIONS_PER_BATCH)] | UnsetType = UNSET


class DecisionsAccepted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of the decisions and outcomes of a request."""

    accepted: int
    """Records that were queued to be written."""
    dropped: int
    """Records that were dropped."""
    reason: str = ""
    """Why some were dropped, and what helps. Left out if none was."""
