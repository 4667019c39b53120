"""Settings of a shard group, from `KVSIGHT_*` environment variables or keyword arguments."""

from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from kv_events.errors import InvalidValueError
from kv_events.kafka.settings import check_name
from kv_events.runtime.settings import KvsightSettings
from kv_events.runtime.variables import variable

MAX_URL_LENGTH = 255


class GroupSettings(KvsightSettings):
    """Frozen; read once at start. A bad value stops the start and names the variable."""

    group: str | None = None
    """Name of the Kafka consumer group whose members share the partitions. None: this service reads everything."""
    advertise_url: str | None = None
    """Address under which the other members reach this one. None: derived from the socket."""
    group_deadline_s: float = Field(0.25, gt=0, le=60)
    """Time after which a member that does not answer is given up, and its partitions are missing in the answer."""
    group_session_s: float = Field(6.0, ge=1, le=300)
    """Silence after which Kafka removes a member from the group."""
    group_token_file: Path | None = None
    """File that contains the token that this member sends to the others. None: `KVSIGHT_API_TOKEN`."""
    group_ca_file: Path | None = None
    """PEM file of the CAs that may have signed the certificates of the other members. None: those of the system."""

    _has_name = field_validator("group")(check_name)

    @field_validator("advertise_url")
    @classmethod
    def _address_is_http(cls, url: str | None) -> str | None:
        if url is None or is_member_url(url):
            return None if url is None else url.rstrip("/")
        raise InvalidValueError(variable("advertise_url"), url, "http://HOST:PORT or https://HOST:PORT")

    def check(self, kafka: str | None, *, reuse_port: bool) -> None:
        """Check that these settings fit the mode of the service. Raises InvalidValueError.

        kafka: its brokers. reuse_port: whether other services listen on its port.
        """
        if self.group is not None and kafka is None:
            expected = f"none without {variable('kafka')}: the members of a group share the partitions of a topic"
            raise InvalidValueError(variable("group"), self.group, expected)
        if self.group is not None and reuse_port:
            expected = f"false with {variable('group')}: each member has an address of its own"
            raise InvalidValueError(variable("reuse_port"), reuse_port, expected)


def is_member_url(url: str) -> bool:
    """Return whether a text can be the address of a member: scheme, host and port, and nothing else."""
    try:
        parts = urlsplit(url.rstrip("/"))
        has_host = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    is_bare = not (parts.path or parts.query or parts.fragment or "@" in parts.netloc)
    return has_host and is_bare and len(url) <= MAX_URL_LENGTH and url.isascii() and url.isprintable()
