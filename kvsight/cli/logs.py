"""The log lines of a command: their level, and text or JSON."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from enum import Enum
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer
from pythonjsonlogger.json import JsonFormatter

from kv_events.runtime.variables import PREFIX

_OURS = ("api", "bridge", "engine_cache", "indexer", "kv_events", "kvsight", "publisher", "simulation")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Level(str, Enum):  # noqa: UP042  (typer shows its values)
    """The least severe lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Format(str, Enum):  # noqa: UP042
    """The form of a line."""

    TEXT = "text"
    JSON = "json"


def with_log_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--log-level` and `--log-format` to a service's command, and configure its log lines before it runs."""

    @wraps(command)
    def with_flags(**values: Any) -> None:
        configure_logs(values.pop("log_level"), values.pop("log_format"))
        command(**values)

    hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
    ]
    shared = [
        _parameter("log_level", Level.INFO, "Least severe log lines to write."),
        _parameter("log_format", Format.TEXT, "Form of the log lines on stderr."),
    ]
    signature = inspect.Signature([*own, *shared])
    with_flags.__signature__ = signature  # type: ignore[attr-defined]  # typer reads both
    with_flags.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    del with_flags.__wrapped__
    return with_flags


def configure_logs(level: Level, form: Format = Format.TEXT) -> None:
    """Write log lines to stderr. Lines of other packages are written from WARNING on.

    In JSON, each line is an object with time, level, logger, message, and facts such as worker, state and reason.
    """
    threshold = logging.getLevelNamesMapping()[level.value.upper()]
    handler = logging.StreamHandler()
    if form is Format.JSON:
        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        handler.setFormatter(JsonFormatter(_TEXT, rename_fields=names))
    else:
        handler.setFormatter(logging.Formatter(_TEXT))
    logging.basicConfig(level=max(threshold, logging.WARNING), handlers=[handler], force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(threshold)


def _parameter(field: str, default: Level | Format, text: str) -> inspect.Parameter:
    option = typer.Option(help=text, envvar=f"{PREFIX}{field.upper()}", show_envvar=False, case_sensitive=False)
    annotation = Annotated[type(default), option]  # type: ignore[valid-type]
    return inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
