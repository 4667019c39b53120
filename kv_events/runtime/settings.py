"""Base of all settings classes: values from `KVSIGHT_*` variables, frozen, with errors that name the variable."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from kv_events.errors import InvalidValueError, check_utf8
from kv_events.hash_seed import process_seed
from kv_events.runtime.variables import check_variables, variable, variables_of
from kv_events.runtime.words import count

_MAX_SECRET_BYTES = 64 * 2**10
_WITH_SECRETS = ("redis", "kafka_token_command")
"""Fields whose text may have a password in it, beside those of type SecretStr."""
_BOUNDS = {"ge": "of at least", "gt": "greater than", "le": "of at most", "lt": "less than"}


class KvsightSettings(BaseSettings):
    """Settings from keyword arguments, else from `KVSIGHT_*` variables. Raises InvalidValueError for a bad value.

    A field that `kv_events.runtime.variables` does not list is set by the constructor alone. Raises
    UnknownVariableError if a `KVSIGHT_*` variable is set that does not exist.
    """

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    def __init__(self, **values: Any) -> None:
        check_variables()
        process_seed()  # not a field of any class, but a bad value must stop the start, too
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise self._first_error(error) from None
        for field, value in self:
            text = value.get_secret_value() if isinstance(value, SecretStr) else value
            if isinstance(text, str):
                is_hidden = text is not value or field in _WITH_SECRETS
                check_utf8(variable(field), text, count(len(text), "character") if is_hidden else None)

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

    def secret(self, field: str) -> str | None:
        """Return a secret: the value of a field, or the content of the file that `<field>_file` names, else None.

        The file is read at each call, so that a rotated secret counts. Raises InvalidValueError, without the secret.
        """
        value: SecretStr | None = getattr(self, field, None)
        if value is not None:
            return value.get_secret_value()
        path: Path | None = getattr(self, f"{field}_file")
        return None if path is None else read_secret(f"{field}_file", path)

    def refuse(self, fields: Sequence[str], expected: str) -> None:
        """Raise InvalidValueError if one of the fields is set."""
        for field in fields:
            if (value := getattr(self, field)) is not None:
                raise InvalidValueError(variable(field), str(value) if isinstance(value, Path) else value, expected)

    @classmethod
    def _first_error(cls, error: ValidationError) -> InvalidValueError:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, InvalidValueError):
            return cause
        is_missing = first["type"] == "missing"
        value = None if is_missing else first["input"]
        name = str(first["loc"][0])
        field = cls.model_fields[name]
        said = first["msg"].removeprefix("Input should be ").partition(", unable")[0]
        expected = "a value" if is_missing else _expected(name, field) or said
        return InvalidValueError(variable(name), value, expected)


def read_secret(field: str, path: Path) -> str:
    """Return the content of a file, without the line break at its end. Raises InvalidValueError naming the field."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_SECRET_BYTES + 1)
        secret = content.decode().rstrip("\r\n")
    except OSError as error:
        raise InvalidValueError(variable(field), path, f"a file that can be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InvalidValueError(variable(field), path, "a text file in UTF-8") from None
    if not secret or len(content) > _MAX_SECRET_BYTES:
        raise InvalidValueError(variable(field), path, f"a file with 1 .. {_MAX_SECRET_BYTES} bytes")
    return secret


class _Variables(EnvSettingsSource):
    """Environment variables, for the fields that have one."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        found = (self.env_vars.get(name.lower()) for name in variables_of(field_name))
        return next((value for value in found if value is not None), None), field_name, False


def _expected(name: str, field: FieldInfo) -> str:
    """The numbers that a field accepts, in words; empty if it is no number with bounds."""
    kind = "an integer" if field.annotation is int else "a number" if field.annotation is float else None
    bounds = {
        bound: value
        for each in field.metadata
        for bound in _BOUNDS
        if (value := getattr(each, bound, None)) is not None
    }
    if kind is None or not bounds:
        return ""
    if name == "port":
        return f"a port in 1 .. {bounds['le']}, or 0 for any free port"
    if "ge" in bounds and "le" in bounds:
        return f"{kind} in {bounds['ge']} .. {bounds['le']}"
    return f"{kind} " + " and ".join(f"{_BOUNDS[bound]} {value:g}" for bound, value in bounds.items())
