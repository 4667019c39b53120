"""What pages of other sites cannot make a browser do, and HTTPS of the service."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.server import listen
from api.settings import ApiSettings
from kv_events.errors import InvalidValueError
from tests.rigs.api import served, served_worker
from tests.support.commands import kvsight
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream
from tests.support.servers.certificates import Certificates
from tests.support.servers.service_process import ServiceProcess
from tests.support.waiting import async_wait_for, async_wait_until

TOKENS = list(range(1, 17))
QUERY = {"model_name": "m", "token_ids": TOKENS}
CHANGES = ("/workers/w/resync", "/decisions", "/register", "/unregister")


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:3000"},
        {"sec-fetch-site": "cross-site", "origin": "null"},
        {"origin": "http://elsewhere.example"},
        {"origin": "null"},
    ],
    ids=str,
)
async def test_a_page_of_another_site_changes_nothing(headers: dict[str, str]) -> None:
    async with served_worker(TOKENS) as client:
        for path in CHANGES:
            check_problem(await client.post(path, headers=headers), 403, "other-site")
        assert (await client.get("/workers", headers=headers)).is_success


async def test_the_own_page_and_programs_may_ask_for_changes() -> None:
    async with served_worker(TOKENS) as client:
        own = str(client.base_url).rstrip("/")
        asking: list[dict[str, str]] = [
            {},
            {"sec-fetch-site": "none"},
            {"sec-fetch-site": "same-origin", "origin": "http://behind.a.proxy.example"},
            {"origin": own},
        ]
        for headers in asking:
            answer = await client.post("/workers/w/resync", headers=headers)
            assert answer.status_code == 202, (headers, answer.text)
        options = {"origin": "http://elsewhere.example", "access-control-request-method": "POST"}
        for answer in (await client.options("/query", headers=options), await client.get("/workers", headers=options)):
            assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_another_name_of_the_service_is_refused_on_either_path() -> None:
    async with served_worker(TOKENS, allowed_hosts="127.0.0.1,*.kvsight.example,[::1]") as client:
        for host in ("127.0.0.1", "127.0.0.1:8000", "a.KVSIGHT.example:80", "[::1]", "[::1]:8000"):
            for _ in range(5):  # the fast path knows the caller from the second one on
                assert (await client.post("/query", json=QUERY, headers={"host": host})).is_success, host
            assert (await client.get("/workers", headers={"host": host})).is_success, host
        for host in ("rebound.example", "kvsight.example", "127.0.0.1.example", "[::2]", "1", ""):
            for method, path, body in (("POST", "/query", QUERY), ("GET", "/workers", None), ("GET", "/metrics", None)):
                check_problem(await client.request(method, path, json=body, headers={"host": host}), 421, "other-host")
            for path in ("/health", "/ready"):
                assert (await client.get(path, headers={"host": host})).is_success, host
        check_problem(await client.get("/workers", headers={"host": "127.0.0.1:80@evil"}), 400)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certificates")


@pytest.fixture
async def secure(certificates: Certificates) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service of 300 workers that speaks HTTPS."""
    issued = certificates.issue("service")
    fed, context = HandFed(), ssl.create_default_context(cafile=certificates.ca)
    async with served(fed.consumer, context, tls_cert_file=issued.cert, tls_key_file=issued.key) as client:
        assert client.base_url.scheme == "https"
        for number in range(300):
            await fed.hold(Stream(f"worker-{number}"), TOKENS)
        yield client


async def test_queries_on_either_path_and_of_any_size_are_answered(secure: httpx.AsyncClient) -> None:
    for _ in range(10):  # one connection whose requests are alike
        fast = (await secure.post("/query", json=QUERY)).json()
        assert len(fast["instances"]) == 300
    by_fastapi = (await secure.post("/query?", json=QUERY)).json()
    assert by_fastapi["scores"] == fast["scores"]
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
    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout.startswith("no worker is known: let the service read an engine")


async def test_a_renewed_certificate_is_served_to_new_connections(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    issued = certificates.issue("service")
    context = ssl.create_default_context(cafile=certificates.ca)

    async def serial(client: httpx.AsyncClient) -> str:
        """Return the serial number of the certificate that a new connection gets."""
        _reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port, ssl=context)
        found: str = writer.get_extra_info("peercert")["serialNumber"]
        writer.close()
        return found

    files: dict[str, Any] = {"tls_cert_file": issued.cert, "tls_key_file": issued.key}
    async with served(HandFed().consumer, context, **files) as client:
        assert (await client.get("/health")).is_success
        first = await serial(client)
        issued.key.write_text("no key")
        await async_wait_until(lambda: "the certificates stay as they are" in caplog.text, 60)
        assert await serial(client) == first
        assert certificates.issue("service") == issued
        await async_wait_for(lambda: serial(client), lambda found: found != first, 60, "the new certificate")
        assert (await client.get("/health")).is_success


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
        listen(ApiSettings(**{name: paths[file] for name, file in files.items()}))  # type: ignore[arg-type]
