"""Members of a group over TLS with tokens, and limits of tenants in a group.

A real broker, real publisher processes and real `kvsight serve` processes.
"""

import ssl
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engines.publishing_process import MODEL, PublishingProcess
from tests.support.servers.certificates import Certificates
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timing("members must join their group within seconds")

PARTITIONS = 6
WORKERS = ["w15", "w0", "w2", "w24", "w3", "w9"]
"""One in each partition."""
ROUTER, MEMBER = "router-0123456789abcdef", "member-0123456789abcdef"
QUERY = {"model_name": MODEL, "seq_hashes": [1, 2]}


@contextmanager
def engines(topics: dict[str, Any]) -> Iterator[None]:
    """Workers that hold the same two pages."""
    with ExitStack() as stack:
        for worker in WORKERS:
            stack.enter_context(PublishingProcess(worker, **topics)).store(1, 2)
        yield


def test_three_members_talk_over_tls_with_a_token_of_their_own(kafka_bootstrap: str, tmp_path: Path) -> None:
    certificates, folder = Certificates(tmp_path / "certificates"), tmp_path
    issued = certificates.issue("member")
    tokens, right, wrong = folder / "tokens.toml", folder / "right", folder / "wrong"
    tokens.write_text(
        f'[router]\ntoken = "{ROUTER}"\nscopes = ["read"]\n[member]\ntoken = "{MEMBER}"\nscopes = ["read"]\n'
    )
    right.write_text(MEMBER)
    wrong.write_text("another-0123456789abcdef")
    topics = own_topics(kafka_bootstrap, KVSIGHT_TOPIC_PARTITIONS=PARTITIONS)
    settings = topics | {
        "KVSIGHT_GROUP": f"group-{uuid.uuid4().hex}",
        "KVSIGHT_GROUP_DEADLINE_S": 10,
        "KVSIGHT_GROUP_CA_FILE": certificates.ca,
        "KVSIGHT_TLS_CERT_FILE": issued.cert,
        "KVSIGHT_TLS_KEY_FILE": issued.key,
        "KVSIGHT_API_TOKENS_FILE": tokens,
        "SSL_CERT_FILE": certificates.ca,
    }
    trusted = ssl.create_default_context(cafile=str(certificates.ca))
    headers = {"Authorization": f"Bearer {ROUTER}"}
    with (
        engines(topics),
        ServiceProcess(folder, **settings, KVSIGHT_GROUP_TOKEN_FILE=right) as first,
        ServiceProcess(folder, **settings, KVSIGHT_GROUP_TOKEN_FILE=right) as second,
        ServiceProcess(folder, **settings, KVSIGHT_GROUP_TOKEN_FILE=wrong) as third,
        httpx.Client(verify=trusted, headers=headers, timeout=60) as client,
    ):

        def answer(service: ServiceProcess) -> dict[str, Any]:
            found: dict[str, Any] = client.post(f"{service.url}/query_by_hash", json=QUERY).json()
            return found

        def has_all(service: ServiceProcess) -> bool:
            found = answer(service)
            return sorted(found.get("instances", {})) == sorted(WORKERS) and "missing" not in found

        def members_of(service: ServiceProcess) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = client.get(f"{service.url}/shards").json().get("members", [])
            return found

        wait_until(lambda: len(members_of(first)) == 3, 90, "three members")
        wait_until(lambda: has_all(first) and has_all(second), 90, "answers of three members")
        members = members_of(first)
        assert sorted(len(member["partitions"]) for member in members) == [2, 2, 2]
        assert {member["url"] for member in members} == {first.url, second.url, third.url}

        def missing_for_third() -> list[str]:
            """It lacks its own partitions, too, until it has read them."""
            return sorted(each["member"] for each in answer(third).get("missing", []))

        wait_until(lambda: missing_for_third() == sorted([first.url, second.url]), 60, "an answer of the third member")
        refused = answer(third)
        assert len(refused["instances"]) < len(WORKERS)
        assert all("401" in each["reason"] for each in refused["missing"])
        assert httpx.post(f"{first.url}/query_by_hash", json=QUERY, verify=trusted).status_code == 401
        logs = first.log.read_text() + second.log.read_text() + third.log.read_text()
    assert [secret for secret in (ROUTER, MEMBER, wrong.read_text()) if secret in logs] == []


def test_a_tenant_that_asks_too_often_is_refused_by_each_member(kafka_bootstrap: str, tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("[default]\nqueries_per_s = 0.001\n")
    topics = own_topics(kafka_bootstrap, KVSIGHT_TOPIC_PARTITIONS=2)
    settings = topics | {"KVSIGHT_GROUP": f"group-{uuid.uuid4().hex}", "KVSIGHT_TENANT_LIMITS_FILE": limits}
    with PublishingProcess("w", **topics) as engine, ServiceProcess(tmp_path, **settings) as service:
        engine.store(1, 2)
        wait_until(lambda: service.pages("w") == {1, 2}, 60, "the pages")
        answers = [service.query(MODEL, [1, 2]) for _ in range(3)]
        # the first one is not counted: only tenants of known models are
        assert [each.status_code for each in answers] == [200, 200, 429]
        assert answers[2].json()["type"].endswith("tenant-limit")
