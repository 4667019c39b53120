"""Settings of the connection to Kafka and of the topics, for every process that reads or writes them."""

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator

from kv_events.errors import InvalidValueError
from kv_events.runtime.settings import KvsightSettings
from kv_events.runtime.variables import variable
from kv_events.streams import CONTROL_TOPIC, DECISIONS_TOPIC, EVENTS_TOPIC, RESERVATIONS_TOPIC

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_SERVER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+)(?::([0-9]{1,5}))?")
_OF_TLS = ("kafka_ca_file", "kafka_cert_file", "kafka_key_file", "kafka_key_password_file")
_OF_PASSWORD = ("kafka_username", "kafka_password", "kafka_password_file")
_OF_TOKEN = ("kafka_token_file", "kafka_token_command")


def check_name(name: str | None, of: ValidationInfo) -> str | None:
    """Validator of a field with a name that Kafka accepts, or None. Raises InvalidValueError."""
    if name is not None and not _NAME.fullmatch(name):
        raise InvalidValueError(variable(str(of.field_name)), name, "1 .. 249 letters, digits, '.', '_' or '-'")
    return name


class KafkaSettings(KvsightSettings):
    """The broker, the way to log in, and the topics. All processes of a deployment use the same topics.

    Raises InvalidValueError naming the variable, never a secret.
    """

    kafka: str | None = None
    """Bootstrap servers, `host:port[,host:port]`. None: no Kafka."""
    kafka_client_id: str = Field("kvsight", min_length=1, max_length=249)
    """Name of this client in the broker's logs, metrics and quotas."""
    kafka_tls: bool = False
    """Whether to use TLS. The broker's certificate and host name are verified."""
    kafka_ca_file: Path | None = None
    """PEM file of the CAs that may have signed the broker's certificate. None: those of the system."""
    kafka_cert_file: Path | None = None
    """PEM file of the client certificate and its chain. None: no client certificate."""
    kafka_key_file: Path | None = None
    """PEM file of the client's private key. None: the key is in `kafka_cert_file`."""
    kafka_key_password_file: Path | None = None
    """File that contains the password of the private key."""
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None = None
    """How to log in. None: no login."""
    kafka_username: str | None = Field(None, min_length=1)
    """User of PLAIN and SCRAM."""
    kafka_password: SecretStr | None = Field(None, min_length=1)
    """Password of PLAIN and SCRAM."""
    kafka_password_file: Path | None = None
    """File that contains the password."""
    kafka_token_file: Path | None = None
    """File that contains the token of OAUTHBEARER. It is read again for each connection."""
    kafka_token_command: str | None = Field(None, min_length=1)
    """Program with arguments, without a shell, that prints a token of OAUTHBEARER. It runs for each connection."""

    events_topic: str = EVENTS_TOPIC
    """Topic of the event batches."""
    control_topic: str = CONTROL_TOPIC
    """Topic of the resync requests."""
    decisions_topic: str = DECISIONS_TOPIC
    """Topic of the routers' decisions. The service writes it, and creates it with the first decision."""
    reservations_topic: str = RESERVATIONS_TOPIC
    """Topic of the reservations. Services write it and read it, and create it with the first reservation."""
    topic_partitions: int = Field(default=8, ge=1, le=100_000)
    """Partitions of all topics but the control topic when they are created. The control topic has one."""
    topic_replication: int = Field(default=1, ge=1, le=32_767)
    """Replicas of all topics when they are created."""
    topic_retention_s: int = Field(default=86_400, ge=60, le=10 * 365 * 86_400)
    """Time for which all topics keep records, when they are created. Bounds what a new reader reads, and what
    `kvsight record` can still copy."""

    _have_names = field_validator("events_topic", "control_topic", "decisions_topic", "reservations_topic")(check_name)

    @field_validator("kafka")
    @classmethod
    def _servers_are_addresses(cls, servers: str | None) -> str | None:
        for server in () if servers is None else servers.split(","):
            found = _SERVER.fullmatch(server.strip())
            if found is None or not 0 < int(found[2] or 9092) < 2**16:
                shown = re.sub(".*@", "...@", server)
                raise InvalidValueError(variable("kafka"), shown, "host:port[,host:port] of brokers")
        return servers

    @property
    def is_kafka_password_used(self) -> bool:
        return self.kafka_sasl_mechanism not in (None, "OAUTHBEARER")

    @model_validator(mode="after")
    def _topics_differ(self) -> Self:
        if self.events_topic == self.control_topic:
            raise InvalidValueError(variable("control_topic"), self.control_topic, "another topic than the events'")
        others = self.events_topic, self.control_topic
        if self.decisions_topic in others:
            expected = "another topic than those of the events and of the resync requests"
            raise InvalidValueError(variable("decisions_topic"), self.decisions_topic, expected)
        if self.reservations_topic in (*others, self.decisions_topic):
            raise InvalidValueError(variable("reservations_topic"), self.reservations_topic, "a topic of its own")
        return self

    @model_validator(mode="after")
    def _tls_is_complete(self) -> Self:
        if not self.kafka_tls:
            self.refuse(_OF_TLS, f"none without {variable('kafka_tls')}=true")
        if self.kafka_cert_file is None:
            self.refuse(("kafka_key_file", "kafka_key_password_file"), f"none without {variable('kafka_cert_file')}")
        return self

    @model_validator(mode="after")
    def _login_is_complete(self) -> Self:
        mechanism = self.kafka_sasl_mechanism
        if not self.is_kafka_password_used:
            needed = f"{variable('kafka_sasl_mechanism')}=PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512"
            self.refuse(_OF_PASSWORD, f"none without {needed}")
        elif self.kafka_username is None:
            raise InvalidValueError(variable("kafka_username"), None, f"a user, for {mechanism}")
        else:
            self._require_one(("kafka_password_file", "kafka_password"))
        if mechanism == "OAUTHBEARER":
            self._require_one(_OF_TOKEN)
        else:
            self.refuse(_OF_TOKEN, f"none without {variable('kafka_sasl_mechanism')}=OAUTHBEARER")
        return self

    def _require_one(self, fields: tuple[str, str]) -> None:
        given = [field for field in fields if getattr(self, field) is not None]
        if len(given) != 1:
            wanted = f"exactly one of {variable(fields[0])} and {variable(fields[1])}"
            raise InvalidValueError(variable(fields[0]), "both" if given else None, wanted)
