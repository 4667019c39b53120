"""Three simulated engines, and a `kvsight republish` that sends their events on."""

from contextlib import ExitStack
from typing import Self

from tests.support.commands import RunningCommand
from tests.support.engines.simulated_engine import SimulatedEngine
from tests.support.servers.child_process import free_port


class RepublishedFleet:
    """`with RepublishedFleet() as fleet:`, all parts as processes of their own."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.events: dict[str, tuple[str, str]] = {}
        """Address of an engine -> those of its republished events and of their replay."""

    def __enter__(self) -> Self:
        flags: list[object] = []
        for number in range(3):
            live, to, replay = free_port(), free_port(), free_port()
            engine = self._stack.enter_context(SimulatedEngine({"zmq_port": live}))
            self.events[engine.url] = f"tcp://127.0.0.1:{to}", f"tcp://127.0.0.1:{replay}"
            fields = f"model=m,republish=tcp://*:{to},republish_replay=tcp://*:{replay}"
            flags += ["--engine", f"e{number}=tcp://127.0.0.1:{live},{fields}"]
        self.kvsight = self._stack.enter_context(RunningCommand("republish", *flags))
        self.kvsight.wait_for("reading 3 streams")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def kill_kvsight(self) -> None:
        """Send SIGKILL to it."""
        self.kvsight.__exit__()
