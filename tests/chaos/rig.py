"""The real parts of a chaos run: a broker, a Redis, engines, services, and a process that asks the services."""

import asyncio
import os
import signal
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
from aiokafka import AIOKafkaProducer
from aiokafka.admin import RecordsToDelete
from aiokafka.structs import TopicPartition

from kv_events.streams import DEFAULT_TENANT
from tests.chaos.asker import Asked, AskerOptions
from tests.chaos.engine import Engine, pinned_prompt
from tests.support.prepared_python import PreparedProcess
from tests.support.servers.child_process import free_port
from tests.support.servers.kafka_broker import LinkedKafka, administration
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.servers.tcp_proxy import TcpProxy
from tests.support.stepped_clock import SteppedClock

PARTITIONS = 3
SNAPSHOT_INTERVAL_S = 1.0
_SMALL_QUEUE_PAGES = 20_000


class Away(NamedTuple):
    """A time in which a service could not answer, because its process was dead or stopped."""

    began: float
    ended: float
    """inf while it lasts."""


class Service(ServiceProcess):
    """A `kvsight serve` process that knows when it could not answer."""

    def __init__(self, name: str, folder: Path, **variables: object) -> None:
        folder.mkdir()
        self.name = name
        self.folder = folder
        self.away: list[Away] = []
        """Until it was ready again: as a startup probe on `/ready` would have it."""
        self._is_paused = False
        self.clock = SteppedClock(folder / "clock")
        super().__init__(folder, **variables, **self.clock)

    @property
    def variables(self) -> dict[str, str]:
        """Its settings. A change counts from the next start on."""
        return self._variables

    @property
    def port(self) -> int:
        return self._port

    @property
    def is_away(self) -> bool:
        """Whether its process is dead, stopped, or was started and has not been ready yet."""
        return bool(self.away) and self.away[-1].ended == float("inf")

    @property
    def is_starting(self) -> bool:
        """Whether it was started and has not been ready yet."""
        return self.is_away and not self._is_paused and self._running

    def launch(self) -> None:
        self._leave()
        super().launch()

    def kill(self) -> None:
        if self._running:
            self._leave()
        super().kill()

    def pause(self) -> None:
        self._leave()
        self._is_paused = True
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)
        self._is_paused = False
        self.note_ready()

    def note_ready(self) -> None:
        if self.is_away:
            self.away[-1] = self.away[-1]._replace(ended=time.monotonic())

    def _leave(self) -> None:
        if not self.is_away:
            self.away.append(Away(time.monotonic(), float("inf")))

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send(number)


class Bridge:
    """A bridge, and the engine that it reads."""

    def __init__(self, folder: Path, variables: Mapping[str, object], **options: Any) -> None:
        """variables: `KVSIGHT_*` settings that name broker and topics. options: of the engine."""
        self.log = folder / "bridge.log"
        self._live, self._replay = free_port(), free_port()
        self._variables = {name: str(value) for name, value in variables.items()}
        self._process: PreparedProcess | None = None
        self.engine = Engine("bridged", folder, self._engine_variables, DEFAULT_TENANT, **options)

    @property
    def _engine_variables(self) -> dict[str, Any]:
        """Settings of the engine: it publishes in the engines' own protocol."""
        return {
            "KVSIGHT_ZMQ": f"tcp://*:{self._live}",
            "KVSIGHT_ZMQ_REPLAY": f"tcp://*:{self._replay}",
            "KVSIGHT_WITH_TOKENS": "true",
        }

    def start(self) -> None:
        name = self.engine.stream
        where = f"endpoint=tcp://127.0.0.1:{self._live},replay_endpoint=tcp://127.0.0.1:{self._replay}"
        option = f"worker={name.worker},model={name.model},tenant={name.tenant},{where}"
        with self.log.open("ab") as output, Path(os.devnull).open() as nothing:
            streams = nothing.fileno(), output.fileno(), output.fileno()
            environment = os.environ | self._variables
            self._process = PreparedProcess("kvsight", ["bridge", "--engine", option], environment, streams)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()


class Rig:
    """`with Rig(folder) as rig:`. All views are right at its beginning.

    Engines: caches of different kinds and two tenants. All but the last one have queues that an outage of some seconds
    overflows. A further one is read by a bridge. Services: the first one keeps a recording, and its snapshots in a
    folder, the others keep theirs in Redis, as do the members of a shard group. Each kind of client reaches each server
    over a link of its own.
    """

    def __init__(self, folder: Path, *, num_services: int = 2) -> None:
        self.folder = folder
        self.broker = LinkedKafka(_made(folder / "kafka"), ["ENGINES", "SERVICES"])
        self.redis = RedisServer(_made(folder / "redis"))
        self.links = {**self.broker.links, "REDIS": TcpProxy(self.redis.address)}
        self.topics = own_topics(self.broker.bootstrap, KVSIGHT_TOPIC_PARTITIONS=PARTITIONS)
        self.engines = [
            self.new_engine("small-queue", queue_pages=_SMALL_QUEUE_PAGES),
            self.new_engine("hybrid", cache="himamba", tenant="other", queue_pages=_SMALL_QUEUE_PAGES),
            self.new_engine("large-queue", cache="radix", device_pages=1024),
        ]
        self.bridge = Bridge(folder, self._over("ENGINES"), cache="radix", device_pages=1024, requests_per_s=4)
        self.bridged = self.bridge.engine
        self.services = [self.new_service(f"service-{number}", has_redis=number > 0) for number in range(num_services)]
        self.group = f"group-{uuid.uuid4().hex}"
        self.members = [self.new_member(f"member-{number}") for number in range(2)]
        self.answers = folder / "answers"
        self._asker: PreparedProcess | None = None
        self._num_twins = 0
        self._num_added = 0

    @property
    def all_engines(self) -> list[Engine]:
        """Those with publishers of their own, and the one that a bridge reads."""
        return [*self.engines, self.bridged]

    @property
    def all_services(self) -> list[Service]:
        """Those that read everything, and the members of the group."""
        return [*self.services, *self.members]

    @property
    def events_topic(self) -> str:
        return str(self.topics["KVSIGHT_EVENTS_TOPIC"])

    @property
    def control_topic(self) -> str:
        return str(self.topics["KVSIGHT_CONTROL_TOPIC"])

    def new_engine(self, name: str, *, tenant: str = DEFAULT_TENANT, **options: Any) -> Engine:
        """Return an engine that is not started. options: fields of `EngineOptions`."""
        return Engine(name, self.folder, self._over("ENGINES"), tenant, **options)

    def start_twin(self, engine: Engine) -> Engine:
        """Start a second engine under the name of one that runs."""
        self._num_twins += 1
        folder, seed = _made(self.folder / f"twin-{self._num_twins}"), 1000 * self._num_twins
        twin = Engine(engine.name, folder, engine.variables, engine.stream.tenant, **{**engine.options, "seed": seed})
        twin.start()
        return twin

    def new_member(self, name: str) -> Service:
        return self.new_service(name, has_redis=True, KVSIGHT_GROUP=self.group)

    def start_further_member(self) -> Service:
        self._num_added += 1
        member = self.new_member(f"added-member-{self._num_added}")
        member.start()
        return member

    def new_service(self, name: str, *, has_redis: bool, **variables: object) -> Service:
        """Return a service that is not started. variables: further settings."""
        folder = self.folder / name
        kept: dict[str, object] = {
            "KVSIGHT_SNAPSHOT_DIR": folder / "snapshots",
            "KVSIGHT_RECORD": folder / "recording",
            "KVSIGHT_RECORD_MAX_BYTES": "16MiB",
        }
        if has_redis:
            kept = {"KVSIGHT_REDIS": f"redis://{self.links['REDIS'].address}/0"}
        more = {"KVSIGHT_SNAPSHOT_INTERVAL_S": SNAPSHOT_INTERVAL_S, **variables}
        return Service(name, folder, **self._over("SERVICES"), **kept, **more)

    # --- what strangers and operators may do -----------------------------------------------------------------------

    def produce(self, topic: str, records: list[tuple[bytes | None, bytes | None]]) -> None:
        """Write records to a topic, as a stranger may: key and payload."""

        async def send() -> None:
            async with AIOKafkaProducer(bootstrap_servers=self.broker.bootstrap) as producer:
                for key, payload in records:
                    await producer.send_and_wait(topic, payload, key)

        asyncio.run(send())

    def cut_log(self) -> None:
        """Delete all records of the events topic, as its retention may."""

        async def cut() -> None:
            places = [TopicPartition(self.events_topic, number) for number in range(PARTITIONS)]
            async with administration(self.broker.bootstrap) as admin:
                await admin.delete_records({place: RecordsToDelete(before_offset=-1) for place in places})

        asyncio.run(cut())

    def delete_topic(self, topic: str) -> None:
        """Delete a topic. Publishers create it again."""

        async def delete() -> None:
            async with administration(self.broker.bootstrap) as admin:
                await admin.delete_topics([topic])

        asyncio.run(delete())

    # --- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._end)
            self.broker.restart()
            self.redis.restart()
            for engine in self.all_engines:
                engine.start()
            self.bridge.start()
            for service in self.all_services:
                service.launch()
            for service in self.all_services:
                service.wait_until_it_listens()
                service.wait_until_ready()
                service.note_ready()
            self._ask()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _ask(self) -> None:
        prompts = [Asked(e.name, e.stream.model, e.stream.tenant, pinned_prompt(e.name)) for e in self.all_engines]
        options = AskerOptions([service.port for service in self.all_services], prompts, str(self.answers))
        with (self.folder / "asker.log").open("ab") as output, Path(os.devnull).open() as nothing:
            streams = nothing.fileno(), output.fileno(), output.fileno()
            argument = msgspec.json.encode(options).decode()
            self._asker = PreparedProcess("tests.chaos.asker", [argument], os.environ, streams)

    def _end(self) -> None:
        if self._asker is not None:
            self._asker.kill()
        ends = [*(engine.kill for engine in self.all_engines), *(service.close for service in self.all_services)]
        for end in (*ends, self.bridge.kill, self.redis.kill, self.broker.close, self.links["REDIS"].close):
            end()

    def _over(self, link: str) -> dict[str, Any]:
        """Settings of clients that reach the broker over a link."""
        return {**self.topics, "KVSIGHT_KAFKA": self.links[link].address}


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
