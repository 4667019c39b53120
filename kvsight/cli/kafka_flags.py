"""The flags of a connection to Kafka, the same for every command that opens one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from kv_events.variables import variable

_PANEL = "Kafka connection and topics"
_FLAGS: dict[str, tuple[type, str]] = {
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
}
"""Field of `KafkaSettings` -> type and help. A password has no flag, because other users see command lines."""


def with_kafka_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags to a command. They arrive in its argument `connection`, as keyword arguments of the settings."""

    @wraps(command)
    def with_flags(**values: Any) -> None:
        connection = {field: values.pop(field) for field in _FLAGS}
        command(**values, connection=connection)

    hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "connection"
    ]
    shared = [_parameter(field, kind, text) for field, (kind, text) in _FLAGS.items()]
    signature = inspect.Signature([*own, *shared])
    with_flags.__signature__ = signature  # type: ignore[attr-defined]  # typer reads both
    with_flags.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    del with_flags.__wrapped__
    return with_flags


def _parameter(field: str, kind: type, text: str) -> inspect.Parameter:
    flag = "--" + field.replace("_", "-")
    option = typer.Option(flag, help=text, envvar=variable(field), show_envvar=False, rich_help_panel=_PANEL)
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
