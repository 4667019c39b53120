"""A real broker whose listeners require TLS, logins or client certificates."""

import base64
import json
import time
from pathlib import Path

from aiokafka.protocol.admin import CreateAclsRequest

from tests.support.servers.certificates import Certificates
from tests.support.servers.child_process import free_port
from tests.support.servers.kafka_broker import KafkaBroker, administration, run_kafka_tool

USER, PASSWORD = "kvsight-user", "a-secret-of-the-tests"
ROTATED_USER = "rotated-user"
"""Has the same password, until a test changes it."""
_MODULES = "org.apache.kafka.common.security"
_TOPIC = 2
_OPERATIONS = {"read": 3, "write": 4, "describe": 8}
_PROTOCOLS = {
    "LOGIN": "SASL_SSL",  # PLAIN, SCRAM and OAUTHBEARER over TLS
    "OPEN": "SASL_PLAINTEXT",  # the same without TLS
    "BRIEF": "SASL_PLAINTEXT",  # the same; the broker closes each connection after a second
    "MUTUAL": "SSL",  # TLS with client certificates
    "EXPIRED": "SSL",  # a certificate that has expired
    "ELSEWHERE": "SSL",  # a certificate for another host
}


class SecureKafka:
    """One broker with a listener of each kind, in a folder. Its tokens are unsecured JSON Web Tokens."""

    def __init__(self, folder: Path) -> None:
        self.certificates = Certificates(folder / "certificates")
        self._ports: dict[str, int] = json.loads((folder / "ports.json").read_text())

    @staticmethod
    def create(folder: Path) -> KafkaBroker:
        """Create one. `restart()` starts it. Raises PartMissingError."""
        ports = {name: free_port() for name in _PROTOCOLS}
        users = [f"{m}=[name={USER},password={PASSWORD}]" for m in ("SCRAM-SHA-256", "SCRAM-SHA-512")]
        users.append(f"SCRAM-SHA-512=[name={ROTATED_USER},password={PASSWORD}]")
        more = "\n".join(_settings(Certificates(folder / "certificates")))
        broker = KafkaBroker(folder, listeners=ports, more=more, users=users)
        ports["PLAINTEXT"] = int(broker.bootstrap.rpartition(":")[2])
        (folder / "ports.json").write_text(json.dumps(ports))
        return broker

    def address(self, listener: str) -> str:
        """The address of a listener, `host:port`."""
        return f"127.0.0.1:{self._ports[listener]}"

    async def allow(self, topic: str, *operations: str) -> None:
        """Let USER `read`, `write` or `describe` a topic, and no other user anything."""
        async with administration(self.address("PLAINTEXT")) as admin:
            for operation in operations:
                is_literal, is_allowed = 3, 3
                rule = (_TOPIC, topic, is_literal, f"User:{USER}", "*", _OPERATIONS[operation], is_allowed)
                answer = await admin._send_request(CreateAclsRequest(*rule))
                assert not any(code for code, _ in answer.creation_responses), answer

    def set_password(self, user: str, password: str) -> None:
        """Change the password of a user of SCRAM-SHA-512. Takes about 2 s."""
        server = ("--bootstrap-server", self.address("PLAINTEXT"))
        change = ("--alter", "--entity-type", "users", "--entity-name", user)
        config = f"SCRAM-SHA-512=[password={password}]"
        run_kafka_tool("kafka.admin.ConfigCommand", *server, *change, "--add-config", config)


def _settings(certificates: Certificates) -> list[str]:
    protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", **_PROTOCOLS}
    lines = [
        "inter.broker.listener.name=PLAINTEXT",
        "listener.security.protocol.map=" + ",".join(f"{name}:{p}" for name, p in protocols.items()),
        "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users=User:ANONYMOUS",  # of the listeners without a login
        "allow.everyone.if.no.acl.found=true",
        "sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
    ]
    stores = {
        "login": certificates.issue("login"),
        "mutual": certificates.issue("mutual"),
        "expired": certificates.issue("expired", expired=True),
        "elsewhere": certificates.issue("elsewhere", "kafka.invalid"),
    }
    for name, files in stores.items():
        lines += [
            f"listener.name.{name}.ssl.keystore.type=PEM",
            f"listener.name.{name}.ssl.keystore.location={files.store}",
        ]
    lines += [
        "listener.name.mutual.ssl.client.auth=required",
        "listener.name.mutual.ssl.truststore.type=PEM",
        f"listener.name.mutual.ssl.truststore.location={certificates.ca}",
    ]
    token_login = f'{_MODULES}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";'
    lines.append("listener.name.brief.connections.max.reauth.ms=1000")
    for name in ("login", "open", "brief"):
        where = f"listener.name.{name}"
        lines += [
            f'{where}.plain.sasl.jaas.config={_MODULES}.plain.PlainLoginModule required user_{USER}="{PASSWORD}";',
            f"{where}.scram-sha-256.sasl.jaas.config={_MODULES}.scram.ScramLoginModule required;",
            f"{where}.scram-sha-512.sasl.jaas.config={_MODULES}.scram.ScramLoginModule required;",
            f"{where}.oauthbearer.sasl.jaas.config={token_login}",
        ]
    return lines


def unsecured_token() -> str:
    """A token that Kafka's unsecured validator accepts."""
    claims = {"sub": USER, "iat": time.time() - 7200, "exp": time.time() + 3600}
    parts = [json.dumps(part).encode() for part in ({"alg": "none"}, claims)]
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts) + "."
