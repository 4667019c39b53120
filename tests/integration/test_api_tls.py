"""HTTPS of the service: both paths, both clients, and files that are wrong."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.app import create_app
from api.server import listen, running_server
from api.service import LiveService
from api.settings import ApiSettings
from kv_events.errors import InvalidValueError
from tests.support.commands import kvsight
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream
from tests.support.servers.certificates import Certificates
from tests.support.servers.service_process import ServiceProcess
from tests.support.waiting import async_wait_until

TOKENS = list(range(1, 17))
QUERY = {"model_name": "m", "token_ids": TOKENS}


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certificates")


@pytest.fixture
async def secure(certificates: Certificates) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service of 300 workers that speaks HTTPS."""
    issued = certificates.issue("service")
    settings, fed = ApiSettings(port=0, tls_cert_file=issued.cert, tls_key_file=issued.key), HandFed()
    context = ssl.create_default_context(cafile=certificates.ca)
    async with (
        running_server(create_app(LiveService(fed.consumer, settings)), settings) as url,
        httpx.AsyncClient(base_url=url, verify=context) as client,
    ):
        assert url.startswith("https://")
        for number in range(300):
            await fed.hold(Stream(f"worker-{number}"), TOKENS)
        yield client


async def test_queries_in_either_lane_and_of_any_size_are_answered(secure: httpx.AsyncClient) -> None:
    for _ in range(10):  # one connection whose requests repeat
        hot = (await secure.post("/query", json=QUERY)).json()
        assert len(hot["instances"]) == 300
    ordinary = (await secure.post("/query?", json=QUERY)).json()
    assert ordinary["scores"] == hot["scores"]
    large = {"model_name": "m", "token_ids": TOKENS * 50_000}
    assert (await secure.post("/query", json=large)).json()["instances"]["worker-7"]["gpu"] == len(TOKENS)
    assert len((await secure.get("/workers")).json()) == 300


async def test_plain_http_and_unknown_authorities_get_no_answer(secure: httpx.AsyncClient) -> None:
    async with httpx.AsyncClient() as stranger:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.get(f"{secure.base_url}/workers")
        with pytest.raises(httpx.TransportError):
            await stranger.get(str(secure.base_url).replace("https", "http") + "/workers")
    assert (await secure.get("/health")).is_success


def test_the_command_serves_https_with_a_locked_key(certificates: Certificates, tmp_path: Path) -> None:
    issued = certificates.issue("service", password="of-the-key")
    (tmp_path / "password").write_text("of-the-key\n")
    variables = {
        "KVSIGHT_TLS_CERT_FILE": issued.cert,
        "KVSIGHT_TLS_KEY_FILE": issued.key,
        "KVSIGHT_TLS_KEY_PASSWORD_FILE": tmp_path / "password",
        "SSL_CERT_FILE": certificates.ca,
    }
    with ServiceProcess(tmp_path, **variables) as service:
        asked = kvsight(
            *("top", "--ranks", "--once", "--url", service.url),
            environment={"SSL_CERT_FILE": str(certificates.ca), "PATH": os.environ["PATH"]},
        )
    assert (asked.returncode, asked.stdout, asked.stderr) == (0, "no worker is known\n", "")


async def test_a_renewed_certificate_is_served_to_new_connections(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    issued = certificates.issue("service")
    settings, fed = ApiSettings(port=0, tls_cert_file=issued.cert, tls_key_file=issued.key), HandFed()
    context = ssl.create_default_context(cafile=certificates.ca)

    async def served(url: str) -> str:
        """Return the serial number of the certificate that a new connection gets."""
        host, port = url.removeprefix("https://").split(":")
        _reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        serial: str = writer.get_extra_info("peercert")["serialNumber"]
        writer.close()
        return serial

    async with (
        running_server(create_app(LiveService(fed.consumer, settings)), settings) as url,
        httpx.AsyncClient(base_url=url, verify=context) as client,
    ):
        assert (await client.get("/health")).is_success
        first = await served(url)
        issued.key.write_text("no key")
        await async_wait_until(lambda: "the certificates stay as they are" in caplog.text, 60)
        assert await served(url) == first
        assert certificates.issue("service") == issued

        async def is_renewed() -> bool:
            return await served(url) != first

        await async_wait_until(is_renewed, 60, "the new certificate")
        assert (await client.get("/health")).is_success


def settings_of(files: dict[str, Any]) -> ApiSettings:
    return ApiSettings(port=0, **files)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"tls_key_file": "key"}, "--tls-cert-file"),
        ({"tls_cert_file": "cert"}, "--tls-cert-file"),
        ({"tls_cert_file": "missing"}, "--tls-cert-file"),
        ({"tls_cert_file": "cert", "tls_key_file": "other"}, "--tls-key-file"),
        ({"tls_cert_file": "cert", "tls_key_file": "locked"}, "--tls-key-password-file"),
    ],
)
def test_a_wrong_file_is_named_at_the_start(files: dict[str, str], named: str, certificates: Certificates) -> None:
    issued, other = certificates.issue("service"), certificates.issue("other")
    locked = certificates.issue("locked", password="secret")
    paths = {"cert": issued.cert, "key": issued.key, "other": other.key, "locked": locked.key, "missing": Path("/none")}
    with pytest.raises(InvalidValueError, match=named):
        listen(settings_of({name: paths[file] for name, file in files.items()}))
