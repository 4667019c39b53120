"""What all settings classes share: `KVSIGHT_*` variables, frozen values, errors that name the variable."""

from __future__ import annotations

from typing import Any, Self

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from kv_events.errors import InvalidValueError
from kv_events.hash_seed import process_seed

PREFIX = "KVSIGHT_"


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
    def ignoring_environment(cls, **values: Any) -> Self:
        """Settings from the arguments and the defaults alone."""
        fields = cls.model_fields.items()
        defaults = {name: field.default for name, field in fields if not field.is_required()}
        return cls(**{**defaults, **values})


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
