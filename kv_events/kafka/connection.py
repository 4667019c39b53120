"""Opens and closes clients of Kafka, and says in one line why a broker cannot be used.

`KafkaConnection` is the only place that creates aiokafka's clients: with TLS, login and client id of the settings. None
of them creates a topic by asking about it, as a client would by default: `kv_events.kafka.topics` creates topics.
"""

import asyncio
import logging
import shlex
import ssl
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, errors
from aiokafka.abc import AbstractTokenProvider
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.conn import collect_hosts, create_conn
from aiokafka.protocol.metadata import MetadataRequest

from kv_events.errors import InvalidValueError, KvsightError, shorten
from kv_events.kafka.private_parts import adapt
from kv_events.kafka.settings import KafkaSettings
from kv_events.runtime.settings import read_secret
from kv_events.runtime.tls import TlsFiles, connection_reason
from kv_events.runtime.variables import variable

_CLOSE_S = 1.0
"""Time for a broker to confirm the end of a connection."""
_CHECK_S = 5.0
"""Time for one connection of a check."""
_TOKEN_COMMAND_S = 4.0
_MAX_TOKEN_BYTES = 64 * 2**10
_LOG_PERIOD_S = 600.0
_MAX_TEMPLATE, _MAX_TEMPLATES = 200, 500
_ORDINARY = (
    "Group Coordinator Request failed",
    "Topic %s not found in cluster metadata",
    "Marking the coordinator dead",
    "Heartbeat failed for group %s because it is rebalancing",
)
"""Beginnings of lines about what happens whenever a topic or a group begins or its members change."""
_ORDINARY_S = 10.0
"""Time for which they may be repeated: no other line says that a broker never gets ready for groups."""
_REFUSED_LOGIN = "it refuses the token"


class KafkaUnreachableError(KvsightError):
    """No broker can be used now. The message names the addresses and the reason."""

    retriable: ClassVar[bool] = True


class KafkaConnection:
    """The way to one Kafka cluster, for every client of a process. Holds no open connection.

    Files of certificates and passwords are read for each client and when it connects again, and tokens for each
    connection. Rotated secrets therefore need no restart.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        """Raises InvalidValueError for settings without a broker, or for a file that cannot be used."""
        if settings.kafka is None:
            raise InvalidValueError(variable("kafka"), None, "host:port of a broker")
        self.bootstrap = settings.kafka
        self._settings = settings
        self._options()
        _limit_log_lines()
        if settings.kafka_sasl_mechanism is not None:
            logging.getLogger("aiokafka.conn").addFilter(_is_without_secrets)

    def consumer(self, **options: Any) -> Any:
        """Create an AIOKafkaConsumer that is not started. Raises KafkaUnreachableError, as `producer` and `admin`."""
        return self._adapted(AIOKafkaConsumer, options)

    def producer(self, **options: Any) -> Any:
        return self._adapted(AIOKafkaProducer, options)

    def admin(self, **options: Any) -> Any:
        return self._adapted(AIOKafkaAdminClient, options)

    def _adapted(self, kind: Any, options: dict[str, Any]) -> Any:
        client = kind(bootstrap_servers=self.bootstrap, **self._current_options(), **options)
        adapt(client, self._fresh_options)
        return client

    async def check(self) -> None:
        """Return if a broker lets this client in. Raises KafkaUnreachableError with the reason, within seconds.

        aiokafka's clients only log the reason. Their own error does not contain it.
        """
        hosts = collect_hosts(self.bootstrap)
        await _first_success([partial(self._bootstrap_from, host, port) for host, port, _ in hosts])

    def failure(self, error: Exception, operation: str) -> str:
        """Say in one line why an operation failed after the login. operation: a right, such as `read` or `write`."""
        reason = f"{error}" or repr(error)
        if isinstance(error, errors.TopicAuthorizationFailedError):
            reason = f"{self.user} may not {operation} topic {' '.join(map(str, error.args))}: an ACL must allow it"
        elif isinstance(error, TimeoutError):
            reason = "no answer in time"
        elif isinstance(error, errors.NodeNotReadyError | errors.KafkaConnectionError):
            reason = "the connection is lost"
        return f"Kafka at {self.bootstrap}: {reason}"

    @contextmanager
    def guarded(self, operation: str, failed: type[KvsightError]) -> Iterator[None]:
        """Raise `failed` for an error of Kafka in the block. operation: see `failure`."""
        try:
            yield
        except KafkaUnreachableError as error:
            raise failed(str(error)) from error
        except (errors.KafkaError, OSError) as error:  # TimeoutError is an OSError
            raise failed(self.failure(error, operation)) from error

    @property
    def user(self) -> str:
        if self._settings.kafka_username is not None:
            return f"user {shorten(self._settings.kafka_username)}"
        return "this client"

    async def _bootstrap_from(self, host: str, port: int) -> None:
        """Log in to one broker, and to one of the addresses that it gives to clients."""
        brokers = await self._login(host, port)
        if brokers and (host, port) not in brokers:
            try:
                await _first_success([partial(self._login, *broker) for broker in brokers])
            except KafkaUnreachableError as error:
                raise KafkaUnreachableError(f"Kafka at {host}:{port} advertises other addresses. {error}") from None

    async def _login(self, host: str, port: int) -> list[tuple[str, int]]:
        """Return the addresses of all brokers, as one broker gives them. Raises KafkaUnreachableError."""
        options = self._current_options()
        connection = None
        try:
            async with asyncio.timeout(_CHECK_S):
                connection = await create_conn(host, port, **options)
                metadata = await connection.send(MetadataRequest([]))
        except (errors.KafkaError, OSError, EOFError) as error:
            reason = self._reason(error, is_connected=connection is not None)
            raise KafkaUnreachableError(f"Kafka at {host}:{port}: {reason}") from error
        finally:
            if connection is not None:
                await asyncio.wait({connection.close()}, timeout=_CLOSE_S)
        if not metadata.brokers and self._settings.kafka_sasl_mechanism == "OAUTHBEARER":
            raise KafkaUnreachableError(f"Kafka at {host}:{port}: {_REFUSED_LOGIN}")  # aiokafka does not notice
        return [(broker_host, broker_port) for _, broker_host, broker_port, *_ in metadata.brokers]

    def _reason(self, error: BaseException, *, is_connected: bool) -> str:
        """Return in words why a broker cannot be used. is_connected: whether the login was complete before."""
        mechanism = self._settings.kafka_sasl_mechanism
        cause = error.__cause__ if isinstance(error.__cause__, ssl.SSLError) else error
        reason = connection_reason(cause)
        if reason is not None:
            return reason
        match cause:
            case TimeoutError():
                return f"no answer within {_CHECK_S:.0f} s"
            case errors.SaslAuthenticationFailed() if self._settings.is_kafka_password_used:
                return f"wrong user or password (user {shorten(self._settings.kafka_username)}, {mechanism})"
            case errors.SaslAuthenticationFailed():
                return _REFUSED_LOGIN
            case errors.UnsupportedSaslMechanismError():
                return f"it does not offer the SASL mechanism {mechanism}"
            case errors.IllegalSaslStateError():
                return f"this port has no login; unset {variable('kafka_sasl_mechanism')}"
            case EOFError() | ConnectionError() if self._settings.kafka_tls and not is_connected:
                return f"it closed the connection; the port may not use TLS: unset {variable('kafka_tls')}"
            case errors.KafkaError() | EOFError() | ConnectionError():
                return self._reason_of_a_closed_connection(is_connected)
            case OSError(strerror=str(text)):
                return text
            case _:
                return str(cause)

    def _reason_of_a_closed_connection(self, is_connected: bool) -> str:
        closed = "it closed the connection"
        if not self._settings.kafka_tls and not is_connected:
            return f"{closed}; the port may require TLS: set {variable('kafka_tls')}"
        if self._settings.kafka_sasl_mechanism is None:
            return f"{closed}; the port may require a login: set {variable('kafka_sasl_mechanism')}"
        return closed

    def _fresh_options(self) -> dict[str, Any]:
        """Options with the present certificates and password; {} while a file is being replaced."""
        with suppress(InvalidValueError):
            return self._options()
        return {}

    def _current_options(self) -> dict[str, Any]:
        """Options of any client. Raises KafkaUnreachableError: a file that was right at the start is not now."""
        try:
            return self._options()
        except InvalidValueError as error:
            raise KafkaUnreachableError(f"Kafka at {self.bootstrap}: {error}") from error

    def _options(self) -> dict[str, Any]:
        settings = self._settings
        has_login = settings.kafka_sasl_mechanism is not None
        options: dict[str, Any] = {
            "client_id": settings.kafka_client_id,
            "security_protocol": ("SASL_" if has_login else "") + ("SSL" if settings.kafka_tls else "PLAINTEXT"),
        }
        if settings.kafka_tls:
            files = (settings.kafka_ca_file, settings.kafka_cert_file, settings.kafka_key_file)
            options["ssl_context"] = TlsFiles("kafka", *files, settings.kafka_key_password_file).context()
        if has_login:
            options["sasl_mechanism"] = settings.kafka_sasl_mechanism
        if settings.is_kafka_password_used:
            options["sasl_plain_username"] = settings.kafka_username
            options["sasl_plain_password"] = settings.secret("kafka_password")
        elif has_login:
            options["sasl_oauth_token_provider"] = _TokenProvider(settings)
        return options


async def _first_success(attempts: Sequence[Callable[[], Awaitable[Any]]]) -> None:
    """Try one after the other until one succeeds. Raises KafkaUnreachableError with all reasons."""
    reasons = []
    for attempt in attempts:
        try:
            await attempt()
        except KafkaUnreachableError as error:
            reasons.append(str(error))
        else:
            return
    raise KafkaUnreachableError("; ".join(reasons))


class _OncePerPeriod(logging.Filter):
    """Passes each kind of warning once in ten minutes: while a broker is away, aiokafka logs 40 lines a second.

    Lines that belong to an ordinary start pass only if they are repeated for long. kvsight's own lines tell when an
    outage begins and ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next_at: dict[tuple[str, str], float] = {}  # by logger and template, of which there are few
        self._repeated: dict[str, tuple[float, float]] = {}  # template -> first and newest time, of ordinary lines

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged. A hook of `logging`."""
        kind, now = (record.name, str(record.msg)[:_MAX_TEMPLATE]), time.monotonic()
        if record.levelno < logging.WARNING:
            return True
        if kind[1].startswith(_ORDINARY) and not self._lasts(kind[1], now):
            return False
        if now < self._next_at.get(kind, 0.0) or len(self._next_at) >= _MAX_TEMPLATES:
            return False
        self._next_at[kind] = now + _LOG_PERIOD_S
        return True

    def _lasts(self, template: str, now: float) -> bool:
        """Note an ordinary line, and return whether it has been repeated for longer than is ordinary."""
        first, newest = self._repeated.get(template, (now, now))
        self._repeated[template] = (now if now - newest > _ORDINARY_S else first), now
        return now - self._repeated[template][0] > _ORDINARY_S


_once_per_period = _OncePerPeriod()


def _limit_log_lines() -> None:
    """Limit the warnings of aiokafka's loggers. A filter applies to one logger only, not to those below it."""
    for name in list(logging.root.manager.loggerDict):
        if name == "aiokafka" or name.startswith("aiokafka."):
            logging.getLogger(name).addFilter(_once_per_period)  # a second time has no effect


def _is_without_secrets(line: logging.LogRecord) -> bool:
    """Whether a log line of aiokafka's connections may be shown: its DEBUG lines contain passwords and tokens."""
    return line.levelno > logging.DEBUG


class _TokenProvider(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka has no types
    """Gets a token of OAUTHBEARER for each connection. Errors are OSError, which aiokafka expects there."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._file = settings.kafka_token_file
        self._command = settings.kafka_token_command

    async def token(self) -> str:
        """Return a token. A hook of aiokafka."""
        return (await asyncio.to_thread(self._read if self._file is not None else self._run)).strip()

    def _read(self) -> str:
        assert self._file is not None
        try:
            return read_secret("kafka_token_file", self._file)
        except InvalidValueError as error:
            raise OSError(str(error)) from None

    def _run(self) -> str:
        name = variable("kafka_token_command")
        try:
            done = subprocess.run(  # noqa: S603  (the operator's own command)
                shlex.split(self._command or ""),
                stdout=subprocess.PIPE,
                timeout=_TOKEN_COMMAND_S,
                check=True,
                text=True,
            )
        except subprocess.CalledProcessError as error:
            raise OSError(f"{name} ended with exit code {error.returncode}") from None
        except subprocess.TimeoutExpired:
            raise OSError(f"{name} did not end within {_TOKEN_COMMAND_S:.0f} s") from None
        except (OSError, ValueError) as error:
            raise OSError(f"{name} cannot be run: {error}") from None
        if not done.stdout.strip() or len(done.stdout) > _MAX_TOKEN_BYTES:
            raise OSError(f"{name} printed {len(done.stdout)} characters, expected a token")
        return done.stdout
