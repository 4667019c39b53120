"""The extras of the package: which modules a command needs beyond the base install."""

from __future__ import annotations

from importlib.util import find_spec

from kv_events.errors import KvsightError

SERVE = ("aiohttp", "fastapi", "fastapi_offline", "httptools", "prometheus_client", "redis", "uvicorn", "yarl")
"""Modules that the extra `serve` brings."""

ANALYSIS = ("bokeh", "jinja2", "pyarrow")
"""Modules that the extra `analysis` brings."""


class MissingExtraError(KvsightError):
    """A command needs an extra that is not installed. The text says how to install it."""

    def __init__(self, needed_by: str, missing: list[str], extra: str) -> None:
        super().__init__(f"{needed_by} needs {', '.join(missing)}: pip install 'kvsight[{extra}]'")
        self.missing = missing
        self.extra = extra


def has_serve() -> bool:
    """Whether the extra `serve` is installed."""
    return not _missing()


def require_serve(needed_by: str) -> None:
    """Check that the extra `serve` is installed. needed_by: for the message. Raises MissingExtraError."""
    missing = _missing()
    if missing:
        raise MissingExtraError(needed_by, missing, "serve")


def require_analysis(needed_by: str) -> None:
    """Check that the extra `analysis` is installed. needed_by: for the message. Raises MissingExtraError."""
    missing = _missing(ANALYSIS)
    if missing:
        raise MissingExtraError(needed_by, missing, "analysis")


def _missing(modules: tuple[str, ...] = SERVE) -> list[str]:
    return [module for module in modules if find_spec(module) is None]
