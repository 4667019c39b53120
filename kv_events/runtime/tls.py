"""TLS: contexts from files, and reasons of failures in words."""

import errno
import socket
import ssl
from pathlib import Path
from typing import NamedTuple

from kv_events.errors import InvalidValueError
from kv_events.runtime.settings import read_secret
from kv_events.runtime.variables import variable

_REFUSED = "connection refused"
_VERIFY_REASONS = {
    9: "it is not valid yet",
    10: "it has expired",
    18: "it is signed by itself and not by a trusted CA",
    19: "it is signed by a CA that is not trusted",
    20: "it is signed by a CA that is not trusted",
    62: "it is for another host name",
    64: "it is for another IP address",
}
"""Numbers of OpenSSL's X509_V_ERR_*."""


class TlsFiles(NamedTuple):
    """Files of one end of TLS, in PEM."""

    server: str
    """First part of the settings' names, such as `kafka` for `kafka_ca_file`; `tls` for the API."""
    ca: Path | None
    cert: Path | None
    key: Path | None
    key_password: Path | None

    def context(self) -> ssl.SSLContext:
        """Return a context that verifies the server and its host name. Raises InvalidValueError naming the file."""
        try:
            context = ssl.create_default_context(cafile=self._readable("ca_file", self.ca))
        except ssl.SSLError:
            raise self._wrong("ca_file", self.ca, "a file with CA certificates in PEM") from None
        if self.cert is not None:
            self._load_cert(context, self.cert)
        return context

    def check_server(self) -> None:
        """Check that a server can use certificate and key. Raises InvalidValueError naming the file."""
        assert self.cert is not None
        self._load_cert(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), self.cert)

    def server_content(self) -> tuple[bytes, ...]:
        """Return the content of the files of a server, to compare. Raises InvalidValueError naming the file."""
        fields = {"cert_file": self.cert, "key_file": self.key, "key_password_file": self.key_password}
        found = []
        for field, path in fields.items():
            if path is not None:
                self._readable(field, path)
                found.append(path.read_bytes())
        return tuple(found)

    def load_server(self, context: ssl.SSLContext) -> None:
        """Let the next connections to a server have the certificate that is in the files now. Raises InvalidValueError
        naming the file; the context stays as it is then.
        """
        self.check_server()
        assert self.cert is not None
        self._load_cert(context, self.cert)

    def password(self) -> str | None:
        """Return the password of the private key. Raises InvalidValueError."""
        return None if self.key_password is None else read_secret(f"{self.server}_key_password_file", self.key_password)

    def _load_cert(self, context: ssl.SSLContext, cert: Path) -> None:
        self._readable("cert_file", cert)
        field, key = ("cert_file", cert) if self.key is None else ("key_file", self.key)
        self._readable(field, key)
        try:
            ssl.create_default_context(cafile=str(cert))
        except ssl.SSLError:
            raise self._wrong("cert_file", cert, "a file with a certificate in PEM") from None
        try:
            context.load_cert_chain(cert, self.key, self.password() or "")  # None would ask at the terminal
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise self._wrong(field, key, f"the private key of the certificate in {cert}") from None
            if b"ENCRYPTED" in key.read_bytes():
                expected = f"a file with the password of the key in {key}"
                raise self._wrong("key_password_file", self.key_password, expected) from None
            raise self._wrong(field, key, "a file with a private key in PEM") from None

    def _readable(self, field: str, path: Path | None) -> str | None:
        """The path as text, if the file can be read."""
        if path is None:
            return None
        try:
            path.open("rb").close()
        except OSError as error:
            raise self._wrong(field, path, f"a file that can be read ({error.strerror})") from None
        return str(path)

    def _wrong(self, field: str, path: Path | None, expected: str) -> InvalidValueError:
        return InvalidValueError(variable(f"{self.server}_{field}"), path, expected)


def connection_reason(error: BaseException | None) -> str | None:
    """Return in words why a connection cannot be opened. None: for another reason."""
    match error:
        case ssl.SSLError():
            return _tls_reason(error)
        case socket.gaierror():
            return "the host name is unknown"
        case ConnectionRefusedError():
            return _REFUSED
        case OSError() if f"[Errno {errno.ECONNREFUSED}]" in str(error):  # at each address of the host
            return _REFUSED
        case _:
            return None


def _tls_reason(error: ssl.SSLError) -> str:
    """Return in words why a TLS handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {_VERIFY_REASONS.get(error.verify_code, error.verify_message)}"
    reason = (error.reason or str(error)).lower()
    if "certificate_required" in reason or "handshake_failure" in reason:
        return "it requires a client certificate"
    if "alert" in reason and ("certificate" in reason or "unknown_ca" in reason):
        return f"it refuses the client certificate ({reason.replace('_', ' ')})"
    if "wrong_version" in reason or "record_layer" in reason:
        return "this port does not use TLS"
    return f"TLS handshake failed ({reason.replace('_', ' ')})"
