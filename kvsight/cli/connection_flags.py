"""Flags that several commands share, or that are many: of the connections to Kafka and Redis, and of a service."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from kv_events.runtime.variables import SETTINGS, variable

_KAFKA: dict[str, tuple[type, str]] = {
    "kafka_client_id": (str, "Name of this client for the broker."),
    "kafka_tls": (bool, "Use TLS."),
    "kafka_ca_file": (Path, "CAs trusted for the broker's certificate."),
    "kafka_cert_file": (Path, "Client certificate."),
    "kafka_key_file": (Path, "Its key, if that is in another file."),
    "kafka_key_password_file": (Path, "File with the password of that key."),
    "kafka_sasl_mechanism": (str, "PLAIN, SCRAM-SHA-256/-512 or OAUTHBEARER."),
    "kafka_username": (str, "User of PLAIN and SCRAM."),
    "kafka_password_file": (Path, "File with the password of that user."),
    "kafka_token_file": (Path, "File with the token of OAUTHBEARER."),
    "kafka_token_command": (str, "Command that prints such a token."),
    "events_topic": (str, "Topic of the events."),
    "control_topic": (str, "Topic of the resync requests."),
    "decisions_topic": (str, "Topic of the routers' decisions."),
}
"""Field of `KafkaSettings` -> type and help. A password has no flag, because other users see command lines."""
_REDIS: dict[str, tuple[type, str]] = {
    "redis_password_file": (Path, "File with the password of the URL's user."),
    "redis_ca_file": (Path, "CAs trusted for the server's certificate."),
    "redis_cert_file": (Path, "Client certificate."),
    "redis_key_file": (Path, "Its private key, if it is in another file."),
    "redis_key_password_file": (Path, "File with the password of that key."),
}
"""Field of `RedisSettings` -> type and help."""
_HTTP: dict[str, tuple[type, str]] = {
    "api_tokens_file": (Path, "TOML file of tokens with scopes."),
    "tls_cert_file": (Path, "Serve HTTPS with this certificate."),
    "tls_key_file": (Path, "Its key, if that is in another file."),
    "tls_key_password_file": (Path, "File with the password of that key."),
    "allowed_hosts": (str, "Names under which callers may reach the service."),
    "max_connections": (int, "Open connections at most."),
    "metrics_max_workers": (int, "Workers with series of their own in /metrics."),
    "explain_timeout_s": (float, "Seconds after which POST /explain gives up."),
}
"""Field of `ApiSettings` -> type and help."""
_SERVICE: dict[str, tuple[type, str]] = {
    "snapshot_dir": (Path, "Save snapshots in a folder."),
    "record": (Path, "Record into an event log in this folder."),
    "record_keep": (str, "Age of records that are deleted: 24h, 7d."),
    "record_max_bytes": (str, "Bound on the size of the log: 20GiB."),
    "dead_letter_dir": (Path, "Keep records that cannot be decoded in this folder."),
    "tenant_limits_file": (Path, "TOML file of limits by tenant."),
    "register_allow": (str, "Where registered engines may be: 10.0.0.0/16:5557,..."),
    "max_registrations": (int, "Registered engine ranks at most."),
    "bridge_away_s": (float, "Seconds after which the pages of an unreachable engine are dropped."),
    "reuse_port": (bool, "Share the port with other services of this machine."),
    "answer_before_ready": (bool, "Answer queries before the log is applied."),
    "tokenize_url": (str, "Engine that tokenizes text for the page: http://HOST:PORT"),
    "group_deadline_s": (float, "Seconds after which a member that does not answer is given up."),
    "group_session_s": (float, "Seconds of silence after which a member leaves the group."),
    "group_token_file": (Path, "File with the token for the other members."),
    "group_ca_file": (Path, "CAs trusted for the certificates of the other members."),
}
"""Field of one of the settings of `kvsight serve` -> type and help."""
_PANELS = {"Kafka connection and topics": _KAFKA, "Redis connection": _REDIS, "HTTP": _HTTP, "Service": _SERVICE}


_SHORTER = {"tls_cert_file": ("--tls-cert",), "tls_key_file": ("--tls-key",)}


def with_kafka_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags to a command. They arrive in its argument `connection`, as keyword arguments of the settings."""
    return _with_flags(command, _KAFKA)


def with_kafka_and_http_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`with_kafka_flags`, and the flags of the HTTP side in the same argument."""
    return _with_flags(command, _KAFKA | _HTTP)


def with_service_flags(command: Callable[..., None]) -> Callable[..., None]:
    """All of these flags. Each settings class ignores those of the others."""
    return _with_flags(command, _KAFKA | _REDIS | _HTTP | _SERVICE)


def with_kafka_and_redis_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`with_kafka_flags`, and the flags of Redis in the same argument."""
    return _with_flags(command, _KAFKA | _REDIS)


def _with_flags(command: Callable[..., None], flags: dict[str, tuple[type, str]]) -> Callable[..., None]:
    @wraps(command)
    def with_flags(**values: Any) -> None:
        connection = {field: values.pop(field) for field in flags}
        command(**values, connection=connection)

    hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "connection"
    ]
    shared = [
        _parameter(panel, field, kind, text)
        for panel, of_panel in _PANELS.items()
        for field, (kind, text) in of_panel.items()
        if field in flags
    ]
    signature = inspect.Signature([*own, *shared])
    with_flags.__signature__ = signature  # type: ignore[attr-defined]  # typer reads both
    with_flags.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    del with_flags.__wrapped__
    return with_flags


def _parameter(panel: str, field: str, kind: type, text: str) -> inspect.Parameter:
    name = field.replace("_", "-")
    flag = f"--{name}/--no-{name}" if kind is bool else f"--{name}"
    envvar = variable(field) if field in SETTINGS else None
    option = typer.Option(
        flag, *_SHORTER.get(field, ()), help=text, envvar=envvar, show_envvar=False, rich_help_panel=panel
    )
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
