"""The real vllm-router of PyPI, with the policy kv_aware on republished events, or with its default."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.support.engines.released_packages import environment
from tests.support.http_checks import succeeds
from tests.support.servers.child_process import ChildProcess, free_port
from tests.support.waiting import wait_until

VERSION = "0.1.17"


class VllmRouter(ChildProcess):
    """`with VllmRouter(folder, {engine: (events, replay), ...}) as router:`. Skips the test if pip cannot get it."""

    def __init__(self, folder: Path, engines: Mapping[str, tuple[str, str] | None]) -> None:
        """engines: address of an engine -> those of its events and of their replay; None for the default policy."""
        python = environment(f"vllm-router-{VERSION}", [f"vllm-router=={VERSION}"])
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = ["--port", str(port), "--prometheus-port", str(free_port()), "--worker-urls", *engines]
        for engine, events in engines.items():
            if events is not None:
                words += ["--kv-event-source", f"{engine}={events[0]}"]
                words += ["--kv-event-replay-source", f"{engine}={events[1]}"]
        if "--kv-event-source" in words:
            words += ["--policy", "kv_aware", "--kv-event-block-size", "16", "--kv-event-model", "m"]
        super().__init__([python.parent / "vllm-router", *words], folder / "vllm-router.log")

    def __enter__(self) -> Self:
        wait_until(self._is_healthy, 60, "vllm-router to answer")
        return self

    def _is_healthy(self) -> bool:
        assert self.running
        return succeeds(f"{self.url}/health")
