"""Base of all settings classes: values from `KVSIGHT_*` variables, frozen, with errors that name the variable."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, JsonValue, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from kv_events.errors import InvalidValueError
from kv_events.hash_seed import process_seed
from kv_events.streams import CONTROL_TOPIC, EVENTS_TOPIC
from kv_events.variables import PREFIX, report_unknown_variables, variable

_ARGUMENT_ONLY: dict[str, JsonValue] = {"environment": False}
_TOPIC_NAME = r"^[a-zA-Z0-9._-]{1,249}$"
"""Names that Kafka accepts."""


def argument(default: Any, **constraints: Any) -> Any:
    """A field without an environment variable: only the constructor sets it. constraints: as of pydantic's `Field`."""
    return Field(default, json_schema_extra=_ARGUMENT_ONLY, **constraints)


class KvsightSettings(BaseSettings):
    """Settings from keyword arguments, else from `KVSIGHT_*` variables. Raises InvalidValueError for a bad value.

    An unknown `KVSIGHT_*` variable is logged when the first settings of a process are read.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    def __init__(self, **values: Any) -> None:
        report_unknown_variables()
        process_seed()  # not a field of any class, but a bad value must stop the start, too
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise self._first_error(error) from None

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

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments first, then variables. A hook of pydantic-settings."""
        return init_settings, _Variables(settings_cls)

    @classmethod
    def variables(cls) -> dict[str, FieldInfo]:
        """Environment variable -> field."""
        return {variable(name): field for name, field in cls.model_fields.items() if not _is_argument(field)}

    @classmethod
    def _first_error(cls, error: ValidationError) -> InvalidValueError:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, InvalidValueError):
            return cause
        is_missing = first["type"] == "missing"
        value = None if is_missing else first["input"]
        expected = "a value" if is_missing else first["msg"].removeprefix("Input should be ").partition(", unable")[0]
        name = str(first["loc"][0])
        return InvalidValueError(name if _is_argument(cls.model_fields[name]) else variable(name), value, expected)


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


class _Variables(EnvSettingsSource):
    """Environment variables, for the fields that have one."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return (None, field_name, False) if _is_argument(field) else super().get_field_value(field, field_name)


def _is_argument(field: FieldInfo) -> bool:
    return field.json_schema_extra == _ARGUMENT_ONLY
