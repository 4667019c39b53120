"""Certificates for servers and clients in tests."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)


class Certificate(NamedTuple):
    """Files of one certificate."""

    cert: Path
    key: Path
    store: Path
    """Certificate and key in one file."""


class Certificates:
    """A CA in a folder, and what it issues. Created at the first use of the folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self.ca, key = folder / "ca.pem", folder / "ca-key.pem"
        if not self.ca.exists():
            made = trustme.CA()
            made.private_key_pem.write_to_path(str(key))
            made.cert_pem.write_to_path(str(self.ca))
        self._authority = trustme.CA.from_pem(self.ca.read_bytes(), key.read_bytes())

    def issue(self, name: str, *hosts: str, expired: bool = False, password: str | None = None) -> Certificate:
        """Issue a certificate for hosts, 127.0.0.1 if there are none. password: of the key."""
        until = datetime.now(UTC) - timedelta(days=1) if expired else None
        issued = self._authority.issue_cert(*(hosts or ("127.0.0.1",)), common_name=name, not_after=until)
        files = Certificate(*(self._folder / f"{name}{suffix}" for suffix in ("-cert.pem", "-key.pem", ".pem")))
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        lock = NoEncryption() if password is None else BestAvailableEncryption(password.encode())
        key = load_pem_private_key(issued.private_key_pem.bytes(), None).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, lock
        )
        files.cert.write_bytes(chain)
        files.key.write_bytes(key)
        files.store.write_bytes(key + chain)
        return files
