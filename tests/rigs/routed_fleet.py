"""Three simulated engines with a real kvsight, conversations, and what the best router would reuse."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import httpx
import pytest

from tests.support.commands import RunningCommand
from tests.support.engines.simulated_engine import SimulatedEngine
from tests.support.http_checks import WITHOUT_TLS
from tests.support.servers.child_process import free_port
from tests.support.waiting import wait_until

PAGE = 16
IN_TIME = pytest.mark.timing("several processes must start and answer within their time")
INSTALLS_A_ROUTER = [pytest.mark.soak, pytest.mark.timeout(600), IN_TIME]
"""Marks of tests of which the first one installs a router."""
Messages = list[dict[str, str]]


class _Fleet:
    """All parts are processes of their own."""

    kvsight: RunningCommand

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def kill_kvsight(self) -> None:
        """Send SIGKILL to it."""
        self.kvsight.__exit__()


class RepublishedFleet(_Fleet):
    """`with RepublishedFleet() as fleet:`, engines whose events a `kvsight republish` sends on."""

    def __enter__(self) -> Self:
        flags: list[object] = []
        self.events: dict[str, tuple[str, str]] = {}
        """Address of an engine -> those of its republished events and of their replay."""
        for number in range(3):
            live, to, replay = free_port(), free_port(), free_port()
            engine = self._stack.enter_context(SimulatedEngine({"zmq_port": live}))
            self.events[engine.url] = f"tcp://127.0.0.1:{to}", f"tcp://127.0.0.1:{replay}"
            fields = f"model=m,republish=tcp://*:{to},republish_replay=tcp://*:{replay}"
            flags += ["--engine", f"e{number}=tcp://127.0.0.1:{live},{fields}"]
        self.kvsight = self._stack.enter_context(RunningCommand("republish", *flags))
        self.kvsight.wait_for("reading 3 streams")
        return self


class RoutedFleet(_Fleet):
    """`with RoutedFleet() as fleet:`, engines that a `kvsight serve` reads."""

    def __init__(self, policy: str = "session,overlap-load") -> None:
        super().__init__()
        self._policy = policy

    def __enter__(self) -> Self:
        ports = [free_port() for _ in range(3)]
        self.engines = [self._stack.enter_context(SimulatedEngine({"zmq_port": port})) for port in ports]
        self.url = f"http://127.0.0.1:{(api := free_port())}"
        flags = ["--policy", self._policy, "--tokenize-url", self.engines[0].url, "--tokenize-timeout-s", 2]
        for number, (engine, port) in enumerate(zip(self.engines, ports, strict=True)):
            flags += ["--engine", f"e{number}=tcp://127.0.0.1:{port},model=m,block_size={PAGE},url={engine.url}"]
        self.kvsight = self._stack.enter_context(RunningCommand("serve", "--port", api, *flags))
        wait_until(lambda: len(self._workers()) == len(ports), 100, "all workers to be known")
        return self

    @property
    def addresses(self) -> list[str]:
        """Those of the engines."""
        return [engine.url for engine in self.engines]

    def wait_for_release(self) -> None:
        """Wait until no request is booked."""
        wait_until(lambda: self.requests() == 0, what="all reservations to end")

    def requests(self) -> int:
        """Requests that are booked now."""
        (model,) = httpx.get(f"{self.url}/loads", verify=WITHOUT_TLS).json()
        return sum(each["active_requests"] for each in model["loads"])

    def _workers(self) -> Sequence[Any]:
        try:
            return httpx.get(f"{self.url}/workers", verify=WITHOUT_TLS).json()  # type: ignore[no-any-return]
        except httpx.TransportError:
            return ()


def conversations(num: int, turns: int, seed: int = 0) -> list[list[Messages]]:
    """Turns of conversations, of which four groups share a long beginning. By turn, each in a random order."""
    numbers = random.Random(seed)

    def text(size: int) -> str:
        return "".join(numbers.choices("abcdefghijklmnopqrstuvwxyz ", k=size))

    systems = [{"role": "system", "content": text(320)} for _ in range(4)]
    chats: list[Messages] = [[systems[number % 4]] for number in range(num)]
    waves = []
    for _ in range(turns):
        for chat in chats:
            chat.append({"role": "user", "content": text(480)})
        waves.append(numbers.sample([list(chat) for chat in chats], num))
        for chat in chats:
            chat.append({"role": "assistant", "content": "yes"})
    return waves


class Outcome(NamedTuple):
    """The requests of a run."""

    cached: int
    """Tokens that the engines reused."""
    reusable: int
    """Tokens that one cache for all would have reused."""
    failures: int
    seconds: list[float]
    """How long each request took."""

    @property
    def share(self) -> float:
        return self.cached / self.reusable


async def run(
    url: str, waves: list[list[Messages]], at_once: int = 4, headers: Mapping[str, str] | None = None, **options: Any
) -> Outcome:
    """Send all turns to a router, several at once, and each wave after the one before. options: fields of bodies."""
    limit, seconds, seen = asyncio.Semaphore(at_once), list[float](), set[bytes]()
    cached = reusable = failures = 0

    async def send(messages: Messages) -> None:
        nonlocal cached, reusable, failures
        async with limit:
            reusable += _reusable(messages, seen)
            began = time.perf_counter()
            answer = await client.post(f"{url}/v1/chat/completions", json={"messages": messages, **options})
            seconds.append(time.perf_counter() - began)
        if answer.is_success:
            cached += answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        else:
            failures += 1

    async with httpx.AsyncClient(headers=headers, verify=WITHOUT_TLS, timeout=30) as client:
        for wave in waves:
            await asyncio.gather(*map(send, wave))
    return Outcome(cached, reusable, failures, seconds)


def _reusable(messages: Messages, seen: set[bytes]) -> int:
    """Return the tokens of a prompt whose pages were seen before, and note them. A token is a byte."""
    prompt = "".join(f"<{each['role']}>{each['content']}" for each in messages).encode()
    prefixes = [prompt[:end] for end in range(PAGE, len(prompt) + 1, PAGE)]
    known = sum(prefix in seen for prefix in prefixes)
    seen.update(prefixes)
    return min(known, (len(prompt) - 1) // PAGE) * PAGE
