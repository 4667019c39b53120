"""Opens and closes clients of Kafka, and says in one line why a broker cannot be used.

`KafkaConnection` is the only place that creates aiokafka's clients: with TLS, login and client id of the settings. None
of them creates a topic by asking about it, as a client would by default: `kv_events.kafka.topics` creates topics.

aiokafka's own `stop` waits for the broker to accept pending records, and a consumer's `stop` can end half-way, in the
cancellation of its own fetch. Only this module uses private parts of aiokafka. The tests in
`tests/unit/kv_events/test_kafka_clients.py` fail when these parts change. The module imports aiokafka when a connection
is used, so that the contract loads without it.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import ssl
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar

from kv_events.errors import InvalidValueError, KvsightError, shorten
from kv_events.kafka.settings import KafkaSettings
from kv_events.runtime.settings import read_secret
from kv_events.runtime.tls import TlsFiles, connection_reason
from kv_events.runtime.variables import variable

_STOP_S = 1.0
"""Time for a client to stop by itself."""
_CHECK_S = 5.0
"""Time for one connection of a check."""
_TOKEN_COMMAND_S = 4.0
_MAX_TOKEN_BYTES = 64 * 2**10
_METADATA_PAUSE_S = 0.1
"""Least time between two requests of a client for metadata."""
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
"""Time for which they may be repeated: a broker that never gets ready for groups is told by nothing else."""
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
        from aiokafka import AIOKafkaConsumer

        consumer = AIOKafkaConsumer(bootstrap_servers=self.bootstrap, **self._current_options(), **options)
        self._adapt(consumer._client)
        return consumer

    def producer(self, **options: Any) -> Any:
        """Create an AIOKafkaProducer that is not started."""
        from aiokafka import AIOKafkaProducer

        producer = AIOKafkaProducer(bootstrap_servers=self.bootstrap, **self._current_options(), **options)
        self._adapt(producer.client)
        return producer

    def admin(self, **options: Any) -> Any:
        """Create an AIOKafkaAdminClient that is not started."""
        from aiokafka.admin import AIOKafkaAdminClient

        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap, **self._current_options(), **options)
        self._adapt(admin._client)
        return admin

    async def check(self) -> None:
        """Return if a broker lets this client in. Raises KafkaUnreachableError with the reason, within seconds.

        aiokafka's clients only log the reason. Their own error does not contain it.
        """
        from aiokafka.conn import collect_hosts

        hosts = collect_hosts(self.bootstrap)
        await _first_success([partial(self._bootstrap_from, host, port) for host, port, _ in hosts])

    def failure(self, error: Exception, operation: str) -> str:
        """Say in one line why an operation failed after the login. operation: a right, such as `read` or `write`."""
        from aiokafka.errors import TopicAuthorizationFailedError

        reason = f"{error}" or repr(error)
        if isinstance(error, TopicAuthorizationFailedError):
            reason = f"{self.user} may not {operation} topic {' '.join(map(str, error.args))}: an ACL must allow it"
        elif isinstance(error, TimeoutError):
            reason = "no answer in time"
        return f"Kafka at {self.bootstrap}: {reason}"

    @contextmanager
    def guarded(self, operation: str, failed: type[KvsightError]) -> Iterator[None]:
        """Raise `failed` for an error of Kafka in the block. operation: see `failure`."""
        from aiokafka.errors import KafkaError

        try:
            yield
        except KafkaUnreachableError as error:
            raise failed(str(error)) from error
        except (KafkaError, OSError) as error:  # TimeoutError is an OSError
            raise failed(self.failure(error, operation)) from error

    @property
    def user(self) -> str:
        """The user of this login, for messages."""
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
        from aiokafka.conn import create_conn
        from aiokafka.errors import KafkaError
        from aiokafka.protocol.metadata import MetadataRequest

        options = self._current_options()
        connection = None
        try:
            async with asyncio.timeout(_CHECK_S):
                connection = await create_conn(host, port, **options)
                metadata = await connection.send(MetadataRequest([]))
        except (KafkaError, OSError, EOFError) as error:
            reason = self._reason(error, is_connected=connection is not None)
            raise KafkaUnreachableError(f"Kafka at {host}:{port}: {reason}") from error
        finally:
            if connection is not None:
                await asyncio.wait({connection.close()}, timeout=_STOP_S)
        if not metadata.brokers and self._settings.kafka_sasl_mechanism == "OAUTHBEARER":
            raise KafkaUnreachableError(f"Kafka at {host}:{port}: {_REFUSED_LOGIN}")  # aiokafka does not notice
        return [(broker_host, broker_port) for _, broker_host, broker_port, *_ in metadata.brokers]

    def _reason(self, error: BaseException, *, is_connected: bool) -> str:
        """Return in words why a broker cannot be used. is_connected: whether the login was complete before."""
        from aiokafka.errors import (
            IllegalSaslStateError,
            KafkaError,
            SaslAuthenticationFailed,
            UnsupportedSaslMechanismError,
        )

        mechanism = self._settings.kafka_sasl_mechanism
        cause = error.__cause__ if isinstance(error.__cause__, ssl.SSLError) else error
        reason = connection_reason(cause)
        if reason is not None:
            return reason
        match cause:
            case TimeoutError():
                return f"no answer within {_CHECK_S:.0f} s"
            case SaslAuthenticationFailed() if self._settings.is_kafka_password_used:
                return f"wrong user or password (user {shorten(self._settings.kafka_username)}, {mechanism})"
            case SaslAuthenticationFailed():
                return _REFUSED_LOGIN
            case UnsupportedSaslMechanismError():
                return f"it does not offer the SASL mechanism {mechanism}"
            case IllegalSaslStateError():
                return f"this port has no login; unset {variable('kafka_sasl_mechanism')}"
            case EOFError() | ConnectionError() if self._settings.kafka_tls and not is_connected:
                return f"it closed the connection; the port may not use TLS: unset {variable('kafka_tls')}"
            case KafkaError() | EOFError() | ConnectionError():
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

    def _adapt(self, client: Any) -> None:
        """Change one AIOKafkaClient in four ways.

        It does not create topics: a broker creates each one that it is asked about, unless the request forbids it. It
        asks for metadata only so often: aiokafka asks without a pause while a topic that it reads does not exist.
        aiokafka sends its requests for metadata, and only these, to what `_get_conn` returns. And it connects with the
        present content of the files, where aiokafka keeps that of its start. A connection that has just been lost is an
        error of Kafka, see `_report_loss`.
        """
        get_connection, pace = client._get_conn, _Pace(_METADATA_PAUSE_S)

        async def get_metadata_connection(node: Any, **options: Any) -> _MetadataConnection | None:
            if not any(kept.connected() for (kept_node, _), kept in client._conns.items() if kept_node == node):
                self._refresh(client)
            connection = await get_connection(node, **options)
            if connection is None:
                return None
            _report_loss(connection)
            return _MetadataConnection(connection, pace)

        client._get_conn = get_metadata_connection

    def _refresh(self, client: Any) -> None:
        """Give a client the present certificates and password."""
        with suppress(InvalidValueError):  # a file that is being replaced; the next attempt reads it
            options = self._options()
            client._ssl_context = options.get("ssl_context")
            client._sasl_plain_password = options.get("sasl_plain_password")

    def _current_options(self) -> dict[str, Any]:
        """Options of any client. Raises KafkaUnreachableError: a file that was right at the start is not now."""
        try:
            return self._options()
        except InvalidValueError as error:
            raise KafkaUnreachableError(f"Kafka at {self.bootstrap}: {error}") from error

    def _options(self) -> dict[str, Any]:
        settings = self._settings
        names = {
            (False, False): "PLAINTEXT",
            (True, False): "SSL",
            (False, True): "SASL_PLAINTEXT",
            (True, True): "SASL_SSL",
        }
        options: dict[str, Any] = {
            "client_id": settings.kafka_client_id,
            "security_protocol": names[settings.kafka_tls, settings.kafka_sasl_mechanism is not None],
        }
        if settings.kafka_tls:
            files = (settings.kafka_ca_file, settings.kafka_cert_file, settings.kafka_key_file)
            options["ssl_context"] = TlsFiles("kafka", *files, settings.kafka_key_password_file).context()
        if settings.kafka_sasl_mechanism is not None:
            options["sasl_mechanism"] = settings.kafka_sasl_mechanism
        if settings.is_kafka_password_used:
            options["sasl_plain_username"] = settings.kafka_username
            options["sasl_plain_password"] = settings.secret("kafka_password")
        elif settings.kafka_sasl_mechanism is not None:
            options["sasl_oauth_token_provider"] = _token_provider(settings)
        return options


async def describe_topics(client: Any, topics: Iterable[str]) -> dict[str, list[list[int]]]:
    """Topic -> the replicas of each of its partitions, in order. Topics that do not exist are missing.

    client: a started client of `KafkaConnection`. Raises KafkaError. aiokafka's own method would create the topics.
    """
    from aiokafka.errors import LeaderNotAvailableError, NoError, UnknownTopicOrPartitionError, for_code
    from aiokafka.protocol.metadata import MetadataRequest

    inner = client.client if hasattr(client, "client") else client._client
    request = MetadataRequest(list(topics), allow_auto_topic_creation=False)
    answer = await _to_its_end(inner.send(inner.get_random_node(), request))
    described = {}
    for found in answer.to_object()["topics"]:
        error = for_code(found["error_code"])
        if error in (NoError, LeaderNotAvailableError):
            parts = sorted(found["partitions"], key=lambda part: part["partition"])
            described[found["topic"]] = [part["replicas"] for part in parts]
        elif error is not UnknownTopicOrPartitionError:
            raise error(found["topic"])
    return described


async def topic_id(client: Any, topic: str) -> bytes | None:
    """Return the 16 bytes that tell a topic from an earlier one of the same name, or None if it does not exist.

    Also None for brokers before version 2.8. client: a started client of `KafkaConnection`. Raises KafkaError.
    """
    from kv_events.kafka.topic_ids import TopicIdRequest

    try:
        answer = await _to_its_end(client._client.send(client._client.get_random_node(), TopicIdRequest(topic)))
    except NotImplementedError:
        return None
    found = {name: identity for _, name, identity, *_ in answer.topics}
    identity = found.get(topic, bytes(16))
    return identity if any(identity) else None


async def _to_its_end(request: Awaitable[Any]) -> Any:
    """Await a request, which goes on if the caller gives it up.

    Only aiokafka's own time limit, 40 s, closes a connection on which no answers come any longer. Without another
    request, a client whose questions are given up earlier would keep it until the system notices, after 15 minutes.
    """
    asking = asyncio.ensure_future(request)
    asking.add_done_callback(lambda done: done.cancelled() or done.exception())  # later, nobody asks for the error
    return await asyncio.shield(asking)


async def stop_consumer(consumer: Any) -> None:
    """Stop an AIOKafkaConsumer and close its connections."""
    if not await _stops(consumer.stop()):
        await _stops(consumer._client.close())


async def stop_producer(producer: Any) -> None:
    """Flush an AIOKafkaProducer for at most a second, then close its connections. Later records are dropped."""
    if not await _stops(producer.stop()):
        await _stops(producer._sender.close())
        await _stops(producer.client.close())


async def _stops(stop: Awaitable[None]) -> bool:
    """Whether a client stops by itself, in time and without an error.

    Over TLS, a connection is closed when the broker confirms it. A second attempt ends in a cancellation, since the
    first one, given up, cancelled the future that both wait for.
    """
    stopping = asyncio.ensure_future(stop)
    await asyncio.wait({stopping}, timeout=_STOP_S)
    if stopping.done() and not stopping.cancelled() and stopping.exception() is None:
        return True
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    return False


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


def check_fetching(consumer: Any) -> None:
    """Raise RuntimeError if a started consumer reads no longer. aiokafka only logs that."""
    if consumer._fetcher.error_future.done():
        raise RuntimeError("aiokafka has ended its reading")


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
    import aiokafka  # noqa: F401  (creates the loggers)

    for name in list(logging.root.manager.loggerDict):
        if name == "aiokafka" or name.startswith("aiokafka."):
            logging.getLogger(name).addFilter(_once_per_period)  # a second time has no effect


def _is_without_secrets(line: logging.LogRecord) -> bool:
    """Whether a log line of aiokafka's connections may be shown: its DEBUG lines contain passwords and tokens."""
    return line.levelno > logging.DEBUG


def _report_loss(connection: Any) -> None:
    """Let a connection raise KafkaConnectionError if it was lost a moment ago.

    A write then raises RuntimeError under uvloop, which ends aiokafka's fetching or its place in a group for good.
    """
    from aiokafka.conn import CloseReason
    from aiokafka.errors import KafkaConnectionError

    if "send" in vars(connection):
        return
    send = connection.send

    def send_or_close(request: Any, expect_response: bool = True) -> Any:
        try:
            return send(request, expect_response=expect_response)
        except RuntimeError as error:
            connection.close(reason=CloseReason.CONNECTION_BROKEN)
            raise KafkaConnectionError(f"{error}") from error

    connection.send = send_or_close


class _Pace:
    """A pause after each of several things."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._next_at = 0.0

    async def wait(self) -> None:
        """Return when the next one may begin."""
        now = time.monotonic()
        if now < self._next_at:
            await asyncio.sleep(self._next_at - now)
        self._next_at = time.monotonic() + self._pause_s


class _MetadataConnection:
    """A connection that asks about topics without creating them."""

    def __init__(self, connection: Any, pace: _Pace) -> None:
        self._connection = connection
        self._pace = pace

    async def send(self, request: Any) -> Any:
        await self._pace.wait()
        request._allow_auto_topic_creation = False
        return await self._connection.send(request)


class _TokenProvider:
    """Gets a token of OAUTHBEARER for each connection. Errors are OSError, which aiokafka expects there."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._file = settings.kafka_token_file
        self._command = settings.kafka_token_command

    async def token(self) -> str:
        """Return a token. A hook of aiokafka."""
        return (await asyncio.to_thread(self._read if self._file is not None else self._run)).strip()

    def extensions(self) -> dict[str, str]:
        """Return no extensions. A hook of aiokafka."""
        return {}

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


def _token_provider(settings: KafkaSettings) -> _TokenProvider:
    from aiokafka.abc import AbstractTokenProvider

    AbstractTokenProvider.register(_TokenProvider)
    return _TokenProvider(settings)
