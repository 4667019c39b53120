"""The flags of the connections to Kafka and Redis, the same for every command that opens one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from kv_events.runtime.variables import variable

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
_PANELS = {"Kafka connection and topics": _KAFKA, "Redis connection": _REDIS}


def with_kafka_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags to a command. They arrive in its argument `connection`, as keyword arguments of the settings."""
    return _with_flags(command, _KAFKA)


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
    flag = "--" + field.replace("_", "-")
    option = typer.Option(flag, help=text, envvar=variable(field), show_envvar=False, rich_help_panel=panel)
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
