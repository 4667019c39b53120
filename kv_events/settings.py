"""What all settings classes share: `KVSIGHT_*` variables, frozen values, errors that name the variable."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kv_events.errors import InvalidValueError
from kv_events.hash_seed import process_seed
from kv_events.streams import CONTROL_TOPIC, EVENTS_TOPIC

PREFIX = "KVSIGHT_"
_TOPIC_NAME = r"^[a-zA-Z0-9._-]{1,249}$"
"""Names that Kafka accepts."""


class KvsightSettings(BaseSettings):
    """Settings from keyword arguments, else from `KVSIGHT_*` variables. Raises InvalidValueError for a bad value."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    def __init__(self, **values: Any) -> None:
        process_seed()  # no field of any class, but a bad one has to stop the start, too
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _first_error(error) from None

    @classmethod
    def from_flags(cls, **flags: Any) -> Self:
        """Settings from the flags that were given; for a flag that is None the variable or the default counts."""
        return cls(**{name: value for name, value in flags.items() if value is not None})

    @classmethod
    def ignoring_environment(cls, **values: Any) -> Self:
        """Settings from the arguments and the defaults alone."""
        fields = cls.model_fields.items()
        defaults = {name: field.default for name, field in fields if not field.is_required()}
        return cls(**{**defaults, **values})


class KafkaSettings(KvsightSettings):
    """The broker and the topics that writers and readers share. All processes of a deployment name the same ones."""

    kafka: str | None = None
    """Bootstrap servers, `host:port[,host:port]`. None: no Kafka."""
    events_topic: str = Field(EVENTS_TOPIC, pattern=_TOPIC_NAME)
    """Topic of the event batches."""
    control_topic: str = Field(CONTROL_TOPIC, pattern=_TOPIC_NAME)
    """Topic of the resync requests."""

    @model_validator(mode="after")
    def _topics_differ(self) -> Self:
        if self.events_topic == self.control_topic:
            raise InvalidValueError(variable("control_topic"), self.control_topic, "another topic than the events'")
        return self


def variable(field: str) -> str:
    """Environment variable of a field."""
    return f"{PREFIX}{field.upper()}"


def _first_error(error: ValidationError) -> InvalidValueError:
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidValueError):
        return cause
    value = None if first["type"] == "missing" else first["input"]
    return InvalidValueError(variable(str(first["loc"][0])), value, first["msg"])
