"""Kafka with TLS and logins: a real broker with a listener of each kind, and every way in which it refuses a client."""

import asyncio
import gc
import logging
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import NewTopic
from pydantic import SecretStr

from indexer.assembly import create_consumer
from indexer.settings import IndexerSettings
from indexer.sources.base import SourceUnavailableError
from indexer.sources.kafka import KafkaSource
from indexer.sources.reader import SourceReader
from kv_events.errors import InvalidValueError
from kv_events.kafka.connection import KafkaConnection, KafkaUnreachableError
from kv_events.kafka.settings import KafkaSettings
from kv_events.kafka.topics import inspect_topics
from kv_events.log.event_log import EventLogReader
from kv_events.records import LogRecord
from kv_events.schema import BlockStored, ResyncRequest, StorageMedium
from publisher import EventPublisher, PublisherSettings
from publisher.sinks import create_sink
from publisher.sinks.base import OutRecord, SinkUnavailableError
from selection.book import Book
from selection.exchange import create_exchange
from tests.support.commands import kvsight
from tests.support.servers.certificates import Certificates
from tests.support.servers.kafka_broker import administration, produce, topic_fields
from tests.support.servers.secure_kafka import PASSWORD, ROTATED_USER, USER, SecureKafka, unsecured_token
from tests.support.waiting import async_wait_until

pytestmark = pytest.mark.timing("a broker must refuse within the deadline of a connection")

NO_LOGIN = {"kafka_username": None, "kafka_password_file": None}
NO_TLS: dict[str, Any] = {"kafka_tls": False, "kafka_ca_file": None}


def login(password: Path, mechanism: str = "SCRAM-SHA-512") -> dict[str, Any]:
    """Settings of a login."""
    return {"kafka_sasl_mechanism": mechanism, "kafka_username": USER, "kafka_password_file": password}


@pytest.fixture
def kafka(secure_kafka: SecureKafka) -> SecureKafka:
    return secure_kafka


@pytest.fixture(autouse=True)
def ends_of_connections() -> Iterator[None]:
    """Ignore connections that end late: aiokafka does not wait for the end of one that the broker refuses."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with passwords and tokens."""
    contents = {"right": f"{PASSWORD}\n", "wrong": "another-secret", "token": unsecured_token(), "no-token": "x.y.z"}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    return tmp_path


def tls(kafka: SecureKafka, listener: str = "LOGIN", **more: Any) -> dict[str, Any]:
    """Settings of a connection with TLS."""
    return {"kafka": kafka.address(listener), "kafka_tls": True, "kafka_ca_file": kafka.certificates.ca, **more}


async def refusal(**settings: Any) -> str:
    """Return the one line that a connection is refused with, which must come within seconds."""
    connection, began = KafkaConnection(KafkaSettings(**settings)), time.monotonic()
    with pytest.raises(KafkaUnreachableError) as caught:
        await connection.check()
    assert time.monotonic() - began < 20
    said = str(caught.value)
    assert said.startswith(f"Kafka at {settings['kafka']}: ")
    assert "\n" not in said
    return said


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_a_user_with_the_right_password_is_let_in_and_another_is_not(
    kafka: SecureKafka, files: Path, mechanism: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await KafkaConnection(KafkaSettings(**tls(kafka, **login(files / "right", mechanism)))).check()
    said = await refusal(**tls(kafka, **login(files / "wrong", mechanism)))
    assert said.endswith(f"wrong user or password (user '{USER}', {mechanism})")
    assert PASSWORD not in caplog.text
    assert "another-secret" not in caplog.text + said


async def test_a_token_of_a_file_or_a_command_is_accepted_by_the_unsecured_validator_of_kafka(
    kafka: SecureKafka, files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    token = {"kafka_sasl_mechanism": "OAUTHBEARER"}
    await KafkaConnection(KafkaSettings(**tls(kafka, **token, kafka_token_file=files / "token"))).check()
    await KafkaConnection(KafkaSettings(**tls(kafka, **token, kafka_token_command=f"cat {files / 'token'}"))).check()
    assert (await refusal(**tls(kafka, **token, kafka_token_file=files / "no-token"))).endswith("it refuses the token")
    said = await refusal(**tls(kafka, **token, kafka_token_command="false"))
    assert said.endswith("KVSIGHT_KAFKA_TOKEN_COMMAND ended with exit code 1")
    assert (files / "token").read_text() not in caplog.text


async def test_a_client_certificate_is_accepted(kafka: SecureKafka, files: Path, tmp_path: Path) -> None:
    ours = kafka.certificates.issue("ours", password=PASSWORD)
    password = {"kafka_key_password_file": files / "right"}
    for own in ({"kafka_cert_file": ours.cert, "kafka_key_file": ours.key}, {"kafka_cert_file": ours.store}):
        await KafkaConnection(KafkaSettings(**tls(kafka, "MUTUAL", **own, **password))).check()
    assert (await refusal(**tls(kafka, "MUTUAL"))).endswith("it requires a client certificate")
    strange = Certificates(tmp_path / "strange").issue("strange")
    assert "it refuses the client certificate" in await refusal(**tls(kafka, "MUTUAL", kafka_cert_file=strange.store))


@pytest.mark.parametrize(
    ("listener", "changes", "reason"),
    [
        ("LOGIN", {"kafka_ca_file": "other"}, "its certificate is refused: it is signed by a CA that is not trusted"),
        ("EXPIRED", {}, "its certificate is refused: it has expired"),
        ("ELSEWHERE", {}, "its certificate is refused: it is for another IP address"),
        ("LOGIN", NO_TLS, "may require TLS: set KVSIGHT_KAFKA_TLS"),
        ("LOGIN", {}, "may require a login: set KVSIGHT_KAFKA_SASL_MECHANISM"),
        ("PLAINTEXT", {}, "may not use TLS: unset KVSIGHT_KAFKA_TLS"),
        ("PLAINTEXT", {**NO_TLS, **login(Path("right"))}, "unset KVSIGHT_KAFKA_SASL_MECHANISM"),
        ("LOGIN", {**NO_TLS, "kafka": "127.0.0.1:1"}, "connection refused"),
        ("LOGIN", {**NO_TLS, "kafka": "kafka.invalid:9092"}, "the host name is unknown"),
    ],
)
async def test_a_broker_that_is_not_as_the_settings_say_is_refused_with_the_reason(
    kafka: SecureKafka, files: Path, listener: str, changes: dict[str, Any], reason: str
) -> None:
    settings = {**tls(kafka, listener), **changes}
    if "kafka_password_file" in changes:
        settings["kafka_password_file"] = files / "right"
    if settings["kafka_ca_file"] == "other":
        settings["kafka_ca_file"] = Certificates(files / "other").ca
    assert (await refusal(**settings)).endswith(reason)


@pytest.mark.parametrize(
    ("field", "content", "expected"),
    [
        ("kafka_ca_file", None, "No such file"),
        ("kafka_ca_file", "text", "CA certificates in PEM"),
        ("kafka_cert_file", "text", "certificate in PEM"),
        ("kafka_cert_file", "(cert)", "private key"),
        ("kafka_key_file", "(key)", "private key of the certificate"),
        ("kafka_key_password_file", "wrong", "password of the key"),
        ("kafka_key_password_file", "", "1 .. 65536 bytes"),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_start_and_is_named(
    tmp_path: Path, field: str, content: str | None, expected: str
) -> None:
    issued = Certificates(tmp_path / "certificates")
    ours, other = issued.issue("ours", password="secret-of-the-key"), issued.issue("other")
    password, path = tmp_path / "password", tmp_path / "given"
    password.write_text("secret-of-the-key")
    if content is not None:
        path.write_text({"(cert)": other.cert.read_text(), "(key)": other.key.read_text()}.get(content, content))
    settings: dict[str, Any] = {
        "kafka_cert_file": ours.cert,
        "kafka_key_file": ours.key,
        "kafka_key_password_file": password,
    }
    if content == "(cert)":
        settings = {}  # a certificate without its key
    with pytest.raises(InvalidValueError) as caught:
        KafkaConnection(KafkaSettings(**{**settings, field: path}, kafka="h:1", kafka_tls=True))
    assert str(caught.value).startswith(f"KVSIGHT_{field.upper()}: got '{path}'")
    assert expected in str(caught.value)
    assert "secret-of-the-key" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "variable"),
    [
        ({"kafka_ca_file": "ca.pem"}, "KVSIGHT_KAFKA_CA_FILE"),
        ({"kafka_tls": True, "kafka_key_file": "key.pem"}, "KVSIGHT_KAFKA_KEY_FILE"),
        ({"kafka_password": "hidden"}, "KVSIGHT_KAFKA_PASSWORD"),
        ({"kafka_sasl_mechanism": "PLAIN", "kafka_username": "u"}, "KVSIGHT_KAFKA_PASSWORD_FILE"),
        ({"kafka_sasl_mechanism": "PLAIN", "kafka_password": "hidden"}, "KVSIGHT_KAFKA_USERNAME"),
        ({"kafka_sasl_mechanism": "OAUTHBEARER"}, "KVSIGHT_KAFKA_TOKEN_FILE"),
        ({"kafka_sasl_mechanism": "GSSAPI"}, "KVSIGHT_KAFKA_SASL_MECHANISM"),
        ({"kafka_token_command": "true"}, "KVSIGHT_KAFKA_TOKEN_COMMAND"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_without_secrets(settings: Any, variable: str) -> None:
    with pytest.raises(InvalidValueError, match=f"^{variable}: ") as caught:
        KafkaSettings(kafka="h:1", **settings)
    assert "hidden" not in str(caught.value)


def test_secrets_are_not_shown_by_settings() -> None:
    settings = PublisherSettings(
        model="m",
        worker="w",
        block_size=4,
        kafka_sasl_mechanism="PLAIN",
        kafka_username="u",
        kafka_password=SecretStr("hidden"),
    )
    assert "hidden" not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"


async def test_a_password_that_is_rotated_needs_no_restart(
    kafka: SecureKafka, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    own = {**topic_fields(kafka.address("BRIEF")), **login(password), "kafka_username": ROTATED_USER}
    settings = PublisherSettings(model="m", worker="w", block_size=4, heartbeat_s=0.2, **own)
    consumer = create_consumer(IndexerSettings(**own))
    async with EventPublisher(settings, create_sink(settings)) as publisher, consumer.running():

        async def shows(num_pages: int) -> None:
            publisher.publish([BlockStored([num_pages], None, [num_pages] * 4, 4, None, StorageMedium.GPU, None)])
            await async_wait_until(
                lambda: [view.num_pages[0] for view in consumer.namespaces.views] == [num_pages],
                deadline_s=30,
                what=f"{num_pages} pages in the index",
            )

        await shows(1)
        await asyncio.to_thread(kafka.set_password, ROTATED_USER, "the-second-secret")
        password.write_text("the-second-secret")
        await shows(2)
        resyncs = publisher.stats().resyncs
        consumer.resyncs.demand(consumer.namespaces.views[0])
        await async_wait_until(lambda: publisher.stats().resyncs > resyncs, deadline_s=30, what="a resync")
    password.write_text(PASSWORD)
    assert "wrong user or password" in await refusal(**own)
    assert PASSWORD not in caplog.text
    assert "the-second-secret" not in caplog.text


@pytest.mark.parametrize("right", ["describe", "read", "write"])
async def test_a_missing_right_on_a_topic_is_one_line_that_names_user_topic_and_right(
    kafka: SecureKafka, files: Path, right: str
) -> None:
    own = {**topic_fields(kafka.address("OPEN")), **login(files / "right")}
    plain = KafkaSettings(**{**own, "kafka": kafka.address("PLAINTEXT"), "kafka_sasl_mechanism": None, **NO_LOGIN})
    await inspect_topics(KafkaConnection(plain), plain, create=True)
    for topic in (own["events_topic"], own["control_topic"]):
        await kafka.allow(topic, right)
    source, sink = (
        KafkaSource(KafkaSettings(**own)),
        create_sink(PublisherSettings(model="m", worker="w", block_size=4, **own)),
    )

    async def said(work: Callable[[], Awaitable[object]], end: Callable[[], Awaitable[None]]) -> str:
        try:
            await work()
        except (SourceUnavailableError, SinkUnavailableError) as error:
            return str(error)
        finally:
            await end()
        return ""

    async def read() -> None:
        await source.start({})
        await source.fetch()

    async def request() -> None:
        await source.request(ResyncRequest("default/m/w/0", 1, "test"))

    async def write() -> None:
        await sink.start()
        await sink.send([OutRecord(b"k", b"v", time.time_ns() // 10**6, 1)])

    def refused(operation: str, topic: str) -> str:
        who = f"Kafka at {own['kafka']}: user '{USER}'"
        return "" if operation == right else f"{who} may not {operation} topic {topic}: an ACL must allow it"

    assert await said(read, source.stop) == refused("read", own["events_topic"])
    assert await said(request, source.stop) == refused("write", own["control_topic"])
    assert await said(write, sink.stop) == refused("write", own["events_topic"])


async def test_a_right_to_list_offsets_is_none_to_read_which_is_said_once(
    kafka: SecureKafka, files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = {**topic_fields(kafka.address("OPEN")), **login(files / "right")}
    topics = own["events_topic"], own["reservations_topic"]
    async with administration(kafka.address("PLAINTEXT")) as admin:
        await admin.create_topics([NewTopic(topic, 1, 1) for topic in topics])
    for topic in topics:
        await produce(kafka.address("PLAINTEXT"), topic, [LogRecord(0, 0, 0, b"k", b"v")])
        await kafka.allow(topic, "describe")
    reader = SourceReader(KafkaSource(KafkaSettings(**own)))
    await reader.start({})
    for _ in range(3):
        assert (await reader.fetch(), await reader.ends()) == ([], {0: 1})
    assert "may not read" in reader.obstacle
    flags = [part for field, value in own.items() for part in flag(field, value)]
    recorded = await asyncio.to_thread(kvsight, "record", tmp_path / "log", "--once", *flags)
    assert (recorded.returncode, "may not read" in recorded.stderr) == (2, True)
    exchange = create_exchange(IndexerSettings(**own), Book(300.0, 2.0))
    async with exchange.running():
        await async_wait_until(lambda: "may not read" in exchange.why_not_ready(), 60, "the reason")
    await kafka.allow(topics[0], "read")
    await async_wait_until(reader.fetch, 60, "the record")
    await reader.stop()
    lines = [each for each in caplog.messages if each.startswith("log ")]
    assert [each.partition(" since")[0].partition(" after")[0] for each in lines] == [
        "log unreadable",
        "log readable again",
    ]


def test_commands_log_in_with_the_same_flags(kafka: SecureKafka, files: Path, tmp_path: Path) -> None:
    settings = topic_fields("") | tls(kafka, **login(files / "right"))
    flags = [part for field, value in settings.items() for part in flag(field, value)]
    simulate = ["simulate", "--requests", "20", "--workers", "2", "--policy", "random", "--json"]
    simulated = kvsight(*simulate, *flags)
    assert simulated.returncode == 0, simulated.stderr
    assert kvsight("record", tmp_path / "log", "--once", *flags).returncode == 0
    assert EventLogReader(tmp_path / "log").next_index > 0
    wrong = kvsight(*simulate, *flags, "--kafka-password-file", files / "wrong")
    assert wrong.returncode == 2
    assert [line for line in wrong.stderr.splitlines() if "wrong user or password" in line] == wrong.stderr.splitlines()


def flag(field: str, value: object) -> list[str]:
    name = "--" + field.replace("_", "-")
    return [name] if value is True else [name, str(value)]
