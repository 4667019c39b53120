"""Redis with TLS and users with few rights: a real server, and every way in which it refuses a client."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from indexer.settings import IndexerSettings, RedisSettings
from indexer.snapshots.base import SnapshotStoreError
from indexer.snapshots.redis import RedisStore
from kv_events.errors import InvalidValueError
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.certificates import Certificates
from tests.support.servers.child_process import PartMissingError
from tests.support.servers.embedded_service import service
from tests.support.servers.redis_server import RedisServer
from tests.support.waiting import async_wait_until

PASSWORD = "a-secret-of-the-tests"
RIGHTS = "~kvsight:* +get +set +expire +persist +multi +exec"
"""The rights in docs/operations.md."""


class SecureRedis:
    """A server with TLS and two users, of which `weak` may not write."""

    def __init__(self, folder: Path) -> None:
        self.certificates = Certificates(folder / "certificates")
        files, users = self.certificates.issue("redis"), folder / "users.acl"
        users.write_text(
            f"user default off\nuser kvsight on >{PASSWORD} {RIGHTS}\nuser weak on >{PASSWORD} ~kvsight:* +get\n"
        )
        keys = ["--tls-cert-file", files.cert, "--tls-key-file", files.key, "--tls-ca-cert-file", self.certificates.ca]
        self.server = RedisServer(folder, [*map(str, keys), "--tls-auth-clients", "optional", "--aclfile", str(users)])

    def settings(self, user: str = "kvsight@", **changes: Any) -> dict[str, Any]:
        """Settings of a user that is let in."""
        good = {"redis_ca_file": self.certificates.ca, "redis_password": SecretStr(PASSWORD)}
        return {"redis": f"rediss://{user}{self.server.address}/0", **good, **changes}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureRedis]:
    try:
        made = SecureRedis(tmp_path_factory.mktemp("secure-redis"))
    except PartMissingError as error:
        pytest.skip(str(error))
    made.server.restart()
    yield made
    made.server.kill()


async def refusal(**settings: Any) -> str:
    """Return the one line that saving fails with."""
    store = RedisStore(RedisSettings(**settings))
    with pytest.raises(SnapshotStoreError) as caught:
        await store.save([b"x"])
    await store.close()
    assert PASSWORD not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def test_a_user_with_few_rights_saves_and_loads_over_tls(redis: SecureRedis, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text(f"{PASSWORD}\n")
    with_file = redis.settings(redis_password=None, redis_password_file=password)
    client = redis.certificates.issue("client", password=PASSWORD)
    mutual: dict[str, Any] = {
        "redis_cert_file": client.cert,
        "redis_key_file": client.key,
        "redis_key_password_file": password,
    }
    for settings in (redis.settings(), with_file, redis.settings(**mutual)):
        store = RedisStore(RedisSettings(**settings))
        for image in (b"one", b"two"):
            await store.save([image])
            assert await store.load() == image
        await store.close()


async def test_registrations_are_kept_over_tls(redis: SecureRedis) -> None:
    with ZmqEngine() as engine:
        async with service(**redis.settings()) as first:
            await first.register(engine)
            await async_wait_until(first.is_ready, 60, "a ready service")
        async with service(**redis.settings()) as second:

            async def is_registered() -> bool:
                return len((await second.client.get("/workers")).json()) == 1

            await async_wait_until(is_registered, 60, "the registration")


@pytest.mark.parametrize(
    ("user", "changes", "reason"),
    [
        ("kvsight@", {"redis_password": SecretStr("wrong")}, "wrong user or password (user 'kvsight')"),
        ("", {"redis_password": None}, "it requires a login; set --redis-password-file"),
        ("weak@", {}, "a right is missing: *'set'*"),
        ("kvsight@", {"redis_ca_file": None}, "its certificate is refused: it is signed by a CA that is not trusted"),
        ("kvsight@", {"redis": "rediss://kvsight@localhost:{}/0"}, "its certificate is refused: * another host name"),
        ("", {"redis": "redis://127.0.0.1:1/0", "redis_ca_file": None}, "connection refused"),
    ],
)
async def test_a_client_that_is_refused_gets_the_reason_in_one_line(
    redis: SecureRedis, user: str, changes: dict[str, Any], reason: str
) -> None:
    settings = redis.settings(user, **changes)
    settings["redis"] = settings["redis"].format(redis.server.address.rpartition(":")[2])
    where = settings["redis"].rpartition("@")[2].removeprefix("redis://").removeprefix("rediss://").removesuffix("/0")
    assert fnmatchcase(await refusal(**settings), f"Redis at {where}: {reason}")


@pytest.mark.parametrize(
    ("settings", "variable"),
    [
        ({"redis": "redis://:hidden@h:1/0", "redis_password": SecretStr("hidden")}, "--redis-password-file"),
        ({"redis": "redis://h:1/0", "redis_ca_file": "ca.pem"}, "--redis-ca-file"),
        ({"redis": "http://u:hidden@h:1"}, "KVSIGHT_REDIS"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_without_secrets(settings: Any, variable: str) -> None:
    with pytest.raises(InvalidValueError, match=f"^{variable}: ") as caught:
        IndexerSettings(**settings)
    assert "hidden" not in str(caught.value)


def test_a_file_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"^--redis-ca-file: got .* \(No such file or directory\)"):
        RedisStore(RedisSettings(redis="rediss://h:1/0", redis_ca_file=tmp_path / "ca.pem"))


def test_a_password_in_the_url_is_not_shown() -> None:
    settings = IndexerSettings(redis="redis://u:hidden@h:1/0")
    assert "hidden" not in f"{settings!r} {settings}"
