"""The flags that several commands have: of settings, of log lines, of the API and of JSON."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import typer
from pythonjsonlogger.json import JsonFormatter

from kv_events.runtime.variables import PREFIX, SETTINGS
from kvsight.extras import require

_OURS = (
    "analysis",
    "api",
    "bridge",
    "engine_cache",
    "indexer",
    "kv_events",
    "kvsight",
    "publisher",
    "selection",
    "simulation",
)
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

Url: TypeAlias = Annotated[str, typer.Option(help="Address of the API, if it runs elsewhere.", envvar="KVSIGHT_URL")]
ApiToken: TypeAlias = Annotated[
    str | None, typer.Option(help="Bearer token, if the API requires one.", envvar="KVSIGHT_API_TOKEN")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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


class Flag(NamedTuple):
    """A flag of a field of some settings, which has the field's name and variable."""

    kind: type
    help: str
    is_common: bool = False
    """Whether the help shows the variable, too."""
    default: Any = None
    """None: the settings have it."""
    bounds: tuple[float, float] | tuple[None, None] = (None, None)
    shorter: tuple[str, ...] = ()


BROKER = Flag(str, "Bootstrap servers, if events go through Kafka: HOST:PORT,...", is_common=True)
METRICS_PORT = {"metrics_port": Flag(int, "Port for Prometheus, if metrics are collected.", True, bounds=(1, 65_535))}
KAFKA = {
    "kafka_client_id": Flag(str, "Client name, if the broker's quotas or metrics need one."),
    "kafka_tls": Flag(bool, "Use TLS, if the listener does."),
    "kafka_ca_file": Flag(Path, "CAs of the broker's certificate, if the system lacks them."),
    "kafka_cert_file": Flag(Path, "Client certificate, if the broker asks for one."),
    "kafka_key_file": Flag(Path, "Its key, if that is in another file."),
    "kafka_key_password_file": Flag(Path, "File with the key's password, if it has one."),
    "kafka_sasl_mechanism": Flag(str, "PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER, if a login is required."),
    "kafka_username": Flag(str, "User, with PLAIN and SCRAM."),
    "kafka_password_file": Flag(Path, "File with the user's password, with PLAIN and SCRAM."),
    "kafka_token_file": Flag(Path, "File with the token, with OAUTHBEARER."),
    "kafka_token_command": Flag(str, "Command that prints the token, if no file has it."),
    "events_topic": Flag(str, "Topic of the events, if deployments share a broker."),
    "control_topic": Flag(str, "Topic of the resync requests, if deployments share a broker."),
    "decisions_topic": Flag(str, "Topic of the routers' decisions, if deployments share a broker."),
    "reservations_topic": Flag(str, "Topic of the reservations, if deployments share a broker."),
}
"""Of `KafkaSettings`. A password has no flag, because other users see command lines."""
REDIS = {
    "redis_password_file": Flag(Path, "File with the password, if the URL's user has one."),
    "redis_ca_file": Flag(Path, "CAs of the server's certificate, if the system lacks them."),
    "redis_cert_file": Flag(Path, "Client certificate, if the server asks for one."),
    "redis_key_file": Flag(Path, "Its key, if that is in another file."),
    "redis_key_password_file": Flag(Path, "File with the key's password, if it has one."),
}
"""Of `RedisSettings`."""
AWAY = {"bridge_away_s": Flag(float, "Seconds until an unreachable engine's pages are dropped, for more than 30.")}
BOOK = {"reservation_ttl_s": Flag(float, "Seconds after which reservations of the service expired. Default: 600.")}
"""Of `SelectionSettings`, for commands that read a log."""
HTTP = {
    "api_tokens_file": Flag(Path, "TOML file of tokens with scopes, if callers have different rights."),
    "tls_cert_file": Flag(Path, "Certificate, to serve HTTPS only.", shorter=("--tls-cert",)),
    "tls_key_file": Flag(Path, "Its key, if that is in another file.", shorter=("--tls-key",)),
    "tls_key_password_file": Flag(Path, "File with the key's password, if it has one."),
    "allowed_hosts": Flag(str, "Names of this service for callers, if browsers reach it."),
    "max_connections": Flag(int, "Bound on open connections, for more than 1024."),
    "metrics_max_workers": Flag(int, "Workers with series of their own, for more than 200."),
    "explain_timeout_s": Flag(float, "Seconds until POST /explain gives up, for logs that take longer than 60."),
}
"""Of `ApiSettings`."""
LOG_LINES = {
    "log_level": Flag(Level, "Least severe log lines to write: debug to see more.", default=Level.INFO),
    "log_format": Flag(Format, "Form of the log lines: json if a log collector reads them.", default=Format.TEXT),
}
"""Of a service. They are applied before its command runs."""


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


def with_flags(*groups: Mapping[str, Flag]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add flags to a command, which arrive in its argument `flags`: field -> value, None if it is not given."""
    flags = {field: flag for group in groups for field, flag in group.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_flags(**values: Any) -> None:
            given = {field: values.pop(field) for field in flags}
            if "log_level" in given:
                configure_logs(given.pop("log_level"), given.pop("log_format"))
            if given.get("metrics_port") is not None:
                require("serve", f"kvsight {command.__name__} --metrics-port")
            command(**values, flags=given)

        own = [parameter for parameter in parameters_of(command) if parameter.name != "flags"]
        return set_parameters(with_flags, [*own, *(_parameter(*each) for each in flags.items())])

    return decorate


def parameters_of(command: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a command, as keywords."""
    found = inspect.signature(command, eval_str=True).parameters.values()
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in found]


def set_parameters(command: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> Callable[..., Any]:
    """Let Typer see these parameters of a command. Returns the command."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # Typer reads both
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(field: str, flag: Flag) -> inspect.Parameter:
    name = field.replace("_", "-")
    spelled = f"--{name}/--no-{name}" if flag.kind is bool else f"--{name}"
    has_variable = field in SETTINGS or field in LOG_LINES
    option = typer.Option(
        spelled,
        *flag.shorter,
        help=flag.help,
        envvar=f"{PREFIX}{field.upper()}" if has_variable else None,
        show_envvar=flag.is_common,
        case_sensitive=False,
        min=flag.bounds[0],
        max=flag.bounds[1],
    )
    kind = flag.kind | None if flag.default is None else flag.kind
    annotation = Annotated[kind, option]  # type: ignore[valid-type]
    return inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=flag.default, annotation=annotation)
