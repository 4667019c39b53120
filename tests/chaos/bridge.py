"""The bridge of a chaos run: `kvsight bridge`, which reads one engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kv_events.streams import DEFAULT_TENANT
from tests.chaos.engine import Engine
from tests.support.prepared_python import PreparedProcess
from tests.support.servers.child_process import free_port


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
        """Start to read the engine."""
        name = self.engine.stream
        where = f"endpoint=tcp://127.0.0.1:{self._live},replay_endpoint=tcp://127.0.0.1:{self._replay}"
        option = f"worker={name.worker},model={name.model},tenant={name.tenant},{where}"
        with self.log.open("ab") as output, Path(os.devnull).open() as nothing:
            streams = nothing.fileno(), output.fileno(), output.fileno()
            environment = os.environ | self._variables
            self._process = PreparedProcess("kvsight", ["bridge", "--engine", option], environment, streams)

    def kill(self) -> None:
        """Send SIGKILL. Idempotent."""
        if self._process is not None:
            self._process.kill()
