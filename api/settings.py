"""Settings of the HTTP side, from `KVSIGHT_*` environment variables or keyword arguments."""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, field_validator, model_validator

from api.workers.allowed_addresses import AllowedAddresses
from kv_events.errors import InvalidValueError
from kv_events.limits import URL_PATTERN
from kv_events.runtime.settings import KvsightSettings
from kv_events.runtime.tls import TlsFiles
from kv_events.runtime.variables import BYTES, LEAST_LOG, SECONDS, parse_quantity, variable

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::\d+)?")


class ApiSettings(KvsightSettings):
    """Frozen; read once at start. A bad value stops the start and names the variable."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65_535)
    """TCP port. 0 selects any free port."""
    reuse_port: bool = False
    """Whether several services of this machine may listen on the port. The kernel spreads connections over them."""
    api_token: SecretStr | None = Field(None, min_length=1)
    """Token that callers must send as `Authorization: Bearer`, except to `api.access.guard.OPEN_PATHS`. If None, no
    token is required.
    """
    tls_cert_file: Path | None = None
    """PEM file of the service's certificate and its chain. None: no TLS."""
    tls_key_file: Path | None = None
    """PEM file of its private key. None: the key is in the file of the certificate."""
    tls_key_password_file: Path | None = None
    """File with the password of that key."""
    api_tokens_file: Path | None = None
    """TOML file of tokens with scopes and limits, in addition to `api_token`. It is read again when it changes."""
    allowed_hosts: str | None = None
    """Names and addresses under which callers may reach the service: patterns such as `kvsight.example,10.*`, separated
    by commas, without ports. None: any.
    """
    answer_before_ready: bool = True
    """Whether queries are answered before the service is ready. Views are then `syncing`. If false, queries receive a
    503 with Retry-After until it is ready.
    """
    max_connections: int = Field(1024, ge=1)
    """Maximum number of concurrent connections. A further one takes the place of one without a request, or receives a
    503.
    """
    tokenize_url: str | None = None
    """Address of a vLLM or SGLang engine that makes tokens of text: `http://HOST:PORT`. None: texts are refused."""
    tokenizer_file: Path | None = None
    """`tokenizer.json` of the model, with which this process makes tokens of plain text. None: `tokenize_url` does."""
    tokenize_timeout_s: float = Field(0.2, gt=0)
    """Seconds after which the tokens of a query's text are given up."""
    tokenize_at_once: int = Field(16, ge=1, le=32)
    """Maximum number of texts that are tokenized concurrently."""
    metrics_max_workers: int = Field(200, ge=0)
    """Workers that have series of their own in `GET /metrics`. All further ones share the labels `other`. 0: none has,
    and the series of engines are sums."""

    record: Path | None = None
    """Folder of an event log, to which everything is recorded beside the service. None: nothing is recorded."""
    record_keep: str = "24h"
    """Age after which whole files of that log are deleted: a number with the unit s, m, h or d."""
    record_max_bytes: str | None = None
    """Bound on the size of that log, such as 20GiB, kept by deleting its oldest files. None: only the age counts."""
    explain_timeout_s: float = Field(60.0, gt=0)
    """Seconds after which an explanation is given up."""

    max_body_bytes: int = Field(32 * 2**20, ge=1024)
    """Maximum size of a request body. The default fits eight million packed tokens."""
    max_event_clients: int = Field(64, ge=0)
    """Maximum number of concurrent clients of `GET /events`."""

    def is_allowed_host(self, host: str) -> bool:
        """Return whether a `Host` header, with or without a port, is among `allowed_hosts`."""
        if self.allowed_hosts is None:
            return True
        found = _HOST.fullmatch(host.lower())
        if found is None:
            return False
        patterns = self.allowed_hosts.lower().replace("[", "[[]").split(",")  # of an IPv6 address, not of a pattern
        return any(fnmatchcase(found[1], pattern.strip()) for pattern in patterns)

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_have_no_ports(cls, hosts: str | None) -> str | None:
        for pattern in () if hosts is None else hosts.split(","):
            if not pattern.strip() or "/" in pattern or (":" in pattern and not pattern.strip().startswith("[")):
                raise InvalidValueError(variable("allowed_hosts"), pattern, "names or addresses without ports")
        return hosts

    @property
    def tls(self) -> TlsFiles | None:
        """Certificate and key of the service, or None."""
        if self.tls_cert_file is None:
            return None
        return TlsFiles("tls", None, self.tls_cert_file, self.tls_key_file, self.tls_key_password_file)

    @model_validator(mode="after")
    def _a_key_has_a_certificate(self) -> Self:
        if self.tls_cert_file is None and (self.tls_key_file or self.tls_key_password_file) is not None:
            raise InvalidValueError(variable("tls_cert_file"), None, "a file with the certificate of the key")
        return self

    @property
    def record_keep_s(self) -> float:
        """`record_keep` in seconds."""
        return parse_quantity(variable("record_keep"), self.record_keep, SECONDS)

    @property
    def record_bytes(self) -> int | None:
        """`record_max_bytes` as a number."""
        if self.record_max_bytes is None:
            return None
        return int(parse_quantity(variable("record_max_bytes"), self.record_max_bytes, BYTES, LEAST_LOG))

    @model_validator(mode="after")
    def _quantities_can_be_read(self) -> Self:
        _ = self.record_keep_s, self.record_bytes
        return self

    @field_validator("tokenize_url")
    @classmethod
    def _address_is_http(cls, url: str | None) -> str | None:
        if url is not None and not re.match(URL_PATTERN, url):
            raise InvalidValueError(variable("tokenize_url"), url, "http://HOST:PORT")
        return url


class RegistrationSettings(KvsightSettings):
    """Limits on the engines that callers may register."""

    register_allow: str = "*"
    """Where registered engines may be: networks, host names and paths, separated by commas, as in
    `10.0.0.0/16:5557-5560,*.engines.example,ipc:///run/engines/*`. Empty: no registration.
    """
    max_registrations: int = Field(1024, ge=0, le=65_536)
    """Bound on registered engine ranks."""
    forget_engine_s: float | None = Field(None, gt=0)
    """Seconds without a connection after which a registered rank is unregistered. None: never. Engines of the command
    line stay.
    """

    @field_validator("register_allow")
    @classmethod
    def _entries_can_be_read(cls, entries: str) -> str:
        AllowedAddresses(entries)
        return entries
