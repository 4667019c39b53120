"""The extras of the package: which modules a command needs beyond the base install."""

from importlib.util import find_spec

from kv_events.errors import KvsightError

SERVE = ("aiohttp", "fastapi", "fastapi_offline", "httptools", "prometheus_client", "redis", "uvicorn", "yarl")
"""Modules that the extra `serve` brings."""

_EXTRAS = {
    "serve": SERVE,
    "analysis": ("bokeh", "jinja2", "pyarrow"),
    "envoy": ("aiohttp", "envoy", "grpc", "grpc_health", "yarl"),
}


class MissingExtraError(KvsightError):
    """A command needs an extra that is not installed. The text says how to install it."""


def require(extra: str, needed_by: str) -> None:
    """Check that `serve`, `analysis` or `envoy` is installed. needed_by: for the message. Raises MissingExtraError."""
    if lacking := [module for module in _EXTRAS[extra] if find_spec(module) is None]:
        raise MissingExtraError(f"{needed_by} needs {', '.join(lacking)}: pip install 'kvsight[{extra}]'")
