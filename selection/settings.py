"""Settings of the selection service."""

from pydantic import Field, field_validator

from kv_events.errors import InvalidValueError
from kv_events.runtime.settings import KvsightSettings
from kv_events.runtime.variables import variable
from selection.book import Book
from selection.policies import DEFAULT_POLICY, create_policy


class SelectionSettings(KvsightSettings):
    """How workers are chosen."""

    policy: str = DEFAULT_POLICY
    """How POST /select chooses: overlap-load, lmetric or priority, perhaps after session, session-hard, warm-up or
    prefill-decode, joined with commas.
    """
    reservation_ttl_s: float = Field(600.0, gt=0, le=3600)
    """Seconds after which a reservation expires of which nothing was heard. Longer than the longest request."""
    predict_s: float = Field(2.0, ge=0)
    """Seconds for which the pages of a placed request count as held before its engine says so. 0: not at all."""

    def book(self) -> Book:
        """Return an empty book."""
        return Book(self.reservation_ttl_s, self.predict_s)

    @field_validator("policy")
    @classmethod
    def _policy_exists(cls, policy: str) -> str:
        try:
            create_policy(policy)
        except InvalidValueError as error:
            raise InvalidValueError(variable("policy"), error.value, error.expected) from None
        return policy
