"""The log lines of a command: their level, and text or JSON."""

from __future__ import annotations

import logging
from enum import Enum

from pythonjsonlogger.json import JsonFormatter

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
